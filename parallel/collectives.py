"""What the ranks of one group say to each other during a step: a small Protocol and its implementations.

Held by ParallelContext, called by the layers of parallel/ and by pipeline.py. Every rank of the group must make the
same calls in the same order with the same shapes and dtypes; nothing here sends sizes.
"""

from typing import Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A send under way; its tensor must live until wait() has returned."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """Collectives of one group; `source` and `peer` are ranks within the group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, bit-equal on every rank. May overwrite and return `tensor`."""
        ...

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenation along the last dim, in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s values in `tensor`, on every rank; overwrites and returns `tensor`."""
        ...

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Starts sending a contiguous tensor."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Fills `tensor` with what `peer` sends; blocks."""
        ...

    def close(self) -> None:
        """Gives up what the group holds; no call may follow."""
        ...


class SingleRank:
    """A group of one: sums and gathers are the tensor itself, and there is nobody to send to."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert source == 0
        return tensor

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        raise AssertionError("a group of one rank sends nothing")

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        raise AssertionError("a group of one rank receives nothing")

    def close(self) -> None:
        """Nothing is held."""


class TorchCollectives:
    """torch.distributed over one process group: gloo on CPU, NCCL on CUDA. `ranks` are the group's global ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int]) -> None:
        self._group = group
        self._ranks = ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in self._ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
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
        """The process group is destroyed by whoever made it, see groups.py."""
