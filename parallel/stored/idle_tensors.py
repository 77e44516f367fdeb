"""Tensors that producers write and no model has a parameter for, with values by which they change nothing. Torch-free.

Checked where a checkpoint is opened, as what they hold otherwise would be left out in silence: codes in an order of
their own, biases, integers in the layout of a GPU's kernel. They are a few KB each.
"""

from enum import Enum
from typing import Final

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.headers import StoredTensor

MOST_BYTES: Final = 2**26
"""More are no such tensor."""


class Idle(Enum):
    """The values by which a tensor changes nothing."""

    ZEROS = "zeros"
    IN_TURN = "groups of inputs in turn"  # 0 0 .. 1 1 ..: the groups of an order that is none


def check_idle(tensor: StoredTensor, idle: Idle) -> None:
    """SettingsError for a tensor with other values."""
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            data = stream.read(min(tensor.nbytes, MOST_BYTES))
    except OSError as error:
        raise SettingsError(f"cannot read {tensor.file}: {error.strerror}", "MODEL") from error
    if len(data) != tensor.nbytes or not (_is_zero if idle is Idle.ZEROS else _is_in_turn)(data, tensor.dtype):
        raise SettingsError(
            f"{tensor.file}: tensor {tensor.name} does not belong to the model of config.json: it would change nothing "
            f"as {idle.value}, and is not that",
            "MODEL",
        )


def _is_zero(data: bytes, dtype: str) -> bool:
    return not any(data)


def _is_in_turn(data: bytes, dtype: str) -> bool:
    if dtype not in ("I32", "I64"):
        return False
    import numpy as np  # its threads would take signals of the launcher, which reads headers too

    groups = np.frombuffer(data, "<i4" if dtype == "I32" else "<i8")
    size = int(np.count_nonzero(groups == 0))
    return size > 0 and bool((groups == np.arange(len(groups)) // size).all())
