"""QuantizeSettings: how a model is quantized, checked; everything by which two runs may differ in what they write."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.params import Param
from tandem.workers.models.spec.weights.matrix_schemes import HELD_DENSE
from tandem.workers.models.spec.weights.names import targeted
from tandem.workers.quantize.rounding.mixed_bits import MIXED

METHODS: Final = ("rtn", "gptq", "awq", "smoothquant")
WHOLE_BITS: Final = (2, 3, 4, 8)
OWN: Final = "own"
SMALLEST_GROUP: Final = 32
SMALLEST_COMMON: Final = 16
"""The least size of experts' groups: where no larger one divides the inputs of all their matrices, each output has one
scale."""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """method: see METHODS. bits: of a weight; between 4 and 8 an average. group_size: inputs that share a scale, None
    for all of an output. calib: a file of text, or OWN. calib_tokens: to calibrate with, in sequences of length
    tokens, None for at most 512. alpha: SmoothQuant's share. ignore: layers that stay as they are, as
    compressed-tensors names them. head: the head is quantized too."""

    method: str = "gptq"
    bits: float = 4
    group_size: int | None = 128
    symmetric: bool = True
    act_order: bool = True
    calib: str = OWN
    calib_tokens: int = 16384
    length: int | None = None
    seed: int = 0
    alpha: float = 0.5
    ignore: tuple[str, ...] = ()
    head: bool = False

    @property
    def is_mixed(self) -> bool:
        return self.bits not in WHOLE_BITS

    @property
    def rounds_inputs(self) -> bool:
        """True if inputs are rounded too, to int8."""
        return self.method == "smoothquant"

    def checked(self) -> "QuantizeSettings":
        """Returns them as they are used. SettingsError, by flag, for values that there are not or do not fit."""
        if self.method not in METHODS:
            raise SettingsError(f"{self.method}: there are {', '.join(METHODS)}", "--method")
        if self.bits not in WHOLE_BITS and not MIXED[0] < self.bits < MIXED[1]:
            words = f"{self.bits:g}: there are 2, 3, 4 and 8, and averages between 4 and 8, such as 4.5"
            raise SettingsError(words, "--bits")
        if self.rounds_inputs and self.bits != 8:
            raise SettingsError(f"{self.bits:g}: smoothquant makes weights and inputs of 8 bits", "--bits")
        if self.group_size is not None and self.group_size < 2:
            raise SettingsError(f"{self.group_size}: at least 2 inputs, or -1 for all of an output", "--group-size")
        if not 0 <= self.alpha <= 1:
            raise SettingsError(f"{self.alpha:g}: from 0 to 1", "--alpha")
        if self.length is not None and self.length < 2:
            raise SettingsError(f"{self.length}: at least 2 tokens", "--calib-length")
        if self.calib_tokens < 2:
            raise SettingsError(f"{self.calib_tokens}: at least 2", "--calib-tokens")
        for name in self.ignore:
            _expression(name)
        ordered = replace(self, act_order=self.act_order and self.method == "gptq")
        return replace(ordered, group_size=None, symmetric=True) if self.rounds_inputs else ordered

    def check_ignored(self, modules: Sequence[str]) -> None:
        """SettingsError for a name that none of a model's modules has."""
        for name in self.ignore:
            if not any(map(_expression(name).fullmatch, modules)):
                likely = next((one for one in modules if "_proj" in one), modules[-1])
                raise SettingsError(f"{name}: no layer of the model is called so; one is {likely}", "--ignore")

    def leaves(self, param: Param) -> bool:
        """Returns whether a matrix stays as it is."""
        return param.role in HELD_DENSE or any(_expression(name).fullmatch(param.module) for name in self.ignore)

    def group_of(self, inputs: int) -> int | None:
        """Returns the size of the groups of a matrix with so many inputs, which has to divide them: a half, or a
        quarter of the size and so on, else the size nearest to it. None for all of an output."""
        size = self.group_size
        if size is None or size >= inputs:
            return None
        while size > SMALLEST_GROUP and inputs % size:
            size //= 2
        if inputs % size == 0:
            return size
        wanted = self.group_size or inputs
        divisors = [one for one in range(2, inputs + 1) if inputs % one == 0]
        nearest = min(divisors, key=lambda one: max(one, wanted) / min(one, wanted))
        return None if nearest == inputs else nearest

    def group_of_experts(self, matrix: tuple[int, ...]) -> int | None:
        """Returns the size of the groups of experts: one for all of their matrices, as vLLM and transformers need. So
        it divides both sizes of any of them, outputs and inputs. None for all of an output."""
        common = math.gcd(*matrix)
        if self.group_size is None or common < SMALLEST_COMMON:
            return None
        return self.group_of(common) or common

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ignore": list(self.ignore)}


def _expression(name: str) -> re.Pattern[str]:
    """Returns the pattern of an ignored layer. SettingsError for one that is no expression."""
    try:
        if name.startswith("re:"):
            re.compile(name.removeprefix("re:"))
        return re.compile(targeted(name))
    except re.error as error:
        raise SettingsError(f"{name}: no regular expression: {error}", "--ignore") from error
