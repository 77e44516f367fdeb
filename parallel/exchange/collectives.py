"""Collective operations between the ranks of one group: a Protocol and its implementations.

ParallelContext holds them; the layers of parallel/ and pipeline.py call them. Every rank of the group must make the
same calls in the same order with the same shapes and dtypes: sizes are not sent.
"""

from typing import Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A send under way; its tensor must live until wait() has returned."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """Collectives of one group; `peer` is a rank within it. Results go to memory of the caller's: none allocates on a
    device, so none runs out of memory half-way."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the group, bit-equal on every rank. May overwrite and return `tensor`."""
        ...

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Fills parts_R [ranks, *tensor's shape], contiguous, with the ranks' tensors in their order; returns it."""
        ...

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """Fills parts_R as all_gather does, on rank 0 alone; None on all others."""
        ...

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Starts to send a contiguous tensor."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Fills `tensor` with the one that `peer` sends; blocks."""
        ...

    def close(self) -> None:
        """Releases the group's resources; no call may follow."""
        ...


class SingleRank:
    """A group of one rank: its sum is the tensor itself, sends and receives are errors."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return parts_R.copy_(tensor)

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        assert parts_R is not None
        parts_R.copy_(tensor)

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        raise AssertionError("a group of one rank sends nothing")

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        raise AssertionError("a group of one rank receives nothing")

    def close(self) -> None:
        """Does nothing: there are no resources."""


class TorchCollectives:
    """Collectives of torch.distributed over one process group: gloo on CPU, NCCL on CUDA. `ranks`: its global ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int]) -> None:
        self._group = group
        self._ranks = ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        # flat: gloo takes parts behind one another along the first dimension, not in one of their own
        dist.all_gather_into_tensor(parts_R.view(-1), tensor.view(-1), group=self._group)
        return parts_R

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        parts = None if parts_R is None else list(parts_R.unbind())
        dist.gather(tensor, parts, dst=self._ranks[0], group=self._group)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with the values of rank `source`, on every rank, and returns it."""
        dist.broadcast(tensor, src=self._ranks[source], group=self._group)
        return tensor

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        pending = dist.isend(tensor, dst=self._ranks[peer], group=self._group)
        assert pending is not None
        return pending

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        dist.recv(tensor, src=self._ranks[peer], group=self._group)
        return tensor

    def close(self) -> None:
        """Does nothing: the creator of the process group destroys it (groups.py)."""
