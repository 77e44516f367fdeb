"""Sums of a capture that a rank of two has no memory for: its peers make them, whether it captures or not."""

from collections.abc import Callable

import pytest
import torch

from tandem.parallel.exchange.collectives import SingleRank
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.graphs.cuda_graphs import CudaGraphs
from tandem.workers.graphs.graph_runner import Outputs

NUM_SUMS = 3


class Counted(SingleRank):
    """Counts the sums of one rank."""

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return tensor


class Tokens:
    """Inputs of so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class Step:
    """The StaticStep of four tokens."""

    num_tokens, num_samples, by_shards = 4, 0, False

    def __init__(self, body: Callable[[Tokens], Outputs]) -> None:
        self._body = body

    def pad(self) -> None: ...

    def run(self) -> Outputs:
        return self._body(Tokens(4))


class Layers:
    """The graphs of a rank that has run a first step of so many sums. fails_at: the number of a sum from which on it
    has no memory."""

    def __init__(self) -> None:
        self.group = Counted()
        self.tp = StepCollectives(self.group, 2)
        self.graphs = CudaGraphs(lambda: None, True, self.tp, self._captured)
        self.fails_at = NUM_SUMS
        self.tp.begin(3, 0)
        self.graphs.run(None, Tokens(3), self.body)
        self.tp.end()
        self.group.num_sums = 0

    def body(self, inputs: Tokens) -> Outputs:
        total = torch.ones(inputs.num_tokens, 8)
        for number in range(NUM_SUMS):
            if number == self.fails_at:
                raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
            total = self.tp.all_reduce(total)
        return (total,)

    def capture(self) -> str | None:
        return self.graphs.capture("decode", Step(self.body))

    @staticmethod
    def _captured(body: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        return lambda: None, (torch.ones(4, 8),)


@pytest.mark.parametrize("fails_at", range(NUM_SUMS))
def test_a_rank_without_memory_makes_up_the_sums_of_a_capture(fails_at: int) -> None:
    layers = Layers()
    layers.fails_at = fails_at
    assert layers.capture() == "Tried to allocate 20.00 GiB" and layers.group.num_sums == NUM_SUMS
    assert layers.graphs.find("decode", 4) is None


def test_without_memory_for_those_either_the_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on to the next capture, and its peers would wait for sums of this one or take others for them."""
    layers = Layers()
    layers.fails_at = 1

    def nothing_left(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")

    monkeypatch.setattr(torch, "zeros", nothing_left)
    with pytest.raises(RuntimeError, match=r"20.00 GiB; its peers cannot go on: Tried to allocate 2.00 MiB"):
        layers.capture()
    assert layers.group.num_sums == 1


def test_a_step_that_is_over_keeps_no_capture() -> None:
    """It holds the cache; and NCCL's communicator ends only behind the last graph that has its operations."""
    layers = Layers()
    assert layers.capture() is None
    padded = layers.graphs.find("decode", 4)
    assert padded is not None and padded.exchanges == range(NUM_SUMS)
    for computes in (True, False):
        layers.tp.begin(3, 0, padded=padded)
        if computes:
            padded.replay()
            layers.tp.end()
        else:
            layers.tp.make_up()
        assert layers.tp.num_done == NUM_SUMS and layers.tp.padded is None
