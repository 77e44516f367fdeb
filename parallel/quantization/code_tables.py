"""The values that codes stand for, as tensors: float32 [2**bits], or None where a code is its own value.

NF4: the quantiles of a normal distribution (Dettmers et al. 2023, QLoRA). FP4: bitsandbytes' own, whose codes are not
in order. E2M1, E4M3: floats of OCP's MX and FP8 formats. IQ4: integers of a byte (ggml's kvalues_iq4nl).
"""

from functools import cache
from typing import Final

import torch

from tandem.parallel.quantization.schemes import Coded, Codes

NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
HALF_FP4: Final = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
HALF_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def table_of(scheme: Coded) -> torch.Tensor | None:
    """Returns the values of a scheme's codes, on the CPU."""
    if scheme.zeros:
        return None
    return _table(scheme.codes, scheme.bits)


def integer_table(bits: int) -> torch.Tensor:
    """Returns the integers around 0 that codes of so many bits stand for, on the CPU."""
    return _table(Codes.INTEGERS, bits)


@cache
def _table(codes: Codes, bits: int) -> torch.Tensor:
    if codes is Codes.INTEGERS:
        return torch.arange(2**bits, dtype=torch.float32) - 2 ** (bits - 1)
    if codes is Codes.E4M3:
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    if codes is Codes.NF4:
        return torch.tensor(NF4)
    if codes is Codes.IQ4:
        return torch.tensor(IQ4, dtype=torch.float32)
    half = torch.tensor(HALF_FP4 if codes is Codes.FP4 else HALF_E2M1)
    return torch.cat([half, -half])
