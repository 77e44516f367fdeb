"""StepArrays: host arrays that a step's kernels read, collected before they are copied to the device together.

What prepares a part of a step (sampling_ops.py, the logits processors) sends its arrays and keeps what it gets back;
the tensors are there once the step's one packed copy has been given (DeviceRows.step). On CPUs they are views.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]


class Sent:
    """One array on its way."""

    __slots__ = ("_tensor",)

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def arrive(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        """Returns the tensor on the device, of the array's shape and dtype. It lasts as long as the step's copy."""
        assert self._tensor is not None, "read before the step's copy"
        return self._tensor


Send = Callable[[Array], Sent]


class StepArrays:
    """The arrays of one step, in the order in which they were sent."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._sent: list[Sent] = []

    def send(self, array: Array) -> Sent:
        """Notes an array of int32, int64, float32 or float64 for the copy. It must not change until then."""
        sent = Sent()
        self.arrays.append(array)
        self._sent.append(sent)
        return sent

    def arrive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hands out the tensors of all arrays, in order."""
        for sent, tensor in zip(self._sent, tensors, strict=True):
            sent.arrive(tensor)


def sending_with(to_device: Callable[[torch.Tensor], torch.Tensor]) -> Send:
    """Returns a Send that copies each array at once, by a copy of its own."""

    def send(array: Array) -> Sent:
        return arrived(to_device(torch.from_numpy(array)))

    return send


def arrived(tensor: torch.Tensor) -> Sent:
    """Returns what is there already."""
    sent = Sent()
    sent.arrive(tensor)
    return sent
