"""The Protocol of graphs: a step's layers as one body over static inputs, run eagerly or as a replay of an earlier run.

The decoder asks for nothing but `run`; a platform chooses the runner. cpu_graphs.py replays captured kernel calls,
cuda_graphs.py CUDA graphs, NoGraphs nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from tandem.parallel.exchange.step_collectives import PaddedReplay

Outputs = tuple[torch.Tensor, ...]
"""Tensors whose dim 0 is the token."""
C = TypeVar("C")


class StaticInputs(Protocol):
    """The values that change between steps of one key. A body reads it nowhere else."""

    @property
    def num_tokens(self) -> int: ...

    def static(self, num_tokens: int) -> Self:
        """Returns the same values in memory of its own, with room for num_tokens; the rest is padding, which reaches
        no other token and writes a scratch block at most."""
        ...

    def take(self, inputs: Self, /) -> None:
        """Copies another step's values into this memory, of as many tokens or fewer."""
        ...

    def pad(self) -> None:
        """Makes all tokens of this memory padding. Needs no memory."""
        ...


I = TypeVar("I", bound=StaticInputs)  # noqa: E741
Body = Callable[[I], Outputs]


class GraphRunner(Protocol):
    """Runs the layers of one rank.

    can_replay: steps may be replayed; set to False where one turned out to hold what cannot be captured, and by those
    who want eager steps. num_replays: the number of replayed steps.
    """

    can_replay: bool
    num_replays: int

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        """Returns the body's outputs for the inputs' tokens; the next run may overwrite them, and the inputs.

        key: bodies of equal keys and numbers of tokens make the same calls on the same memory, but for the inputs.
        None: this step's calls are its own. A runner keeps the body of what it has captured.
        """
        ...

    def padded(self, key: Hashable | None, num_tokens: int) -> PaddedReplay | None:
        """Returns the capture that a run of this key and so many tokens will replay, where its ranks sum in it."""
        ...

    def begin_layer(self) -> None:
        """Says that the body begins a layer: it reads no result from before the last one any more."""
        ...

    def close(self) -> None:
        """Drops the captures, which refer to memory that is about to be released. No run may follow."""
        ...


@runtime_checkable
class StartGraphs(GraphRunner, Protocol):
    """A GraphRunner whose captures are made at the start, all of them, by the ranks of a stage together."""

    def capture(self, key: Hashable, num_tokens: int, make_inputs: Callable[[], I], body: Body[I]) -> str | None:
        """Captures steps of a key and up to so many tokens; returns why it could not. make_inputs: makes those of a
        step of padding. What the body sums, the peers sum, whether it can be captured or not."""
        ...

    def launch(self, key: Hashable, num_tokens: int) -> None:
        """Replays a capture on padding."""
        ...

    def drop(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        """Forgets captures, by key and number of tokens, if they are there."""
        ...


class NoGraphs:
    """Runs every step eagerly."""

    can_replay = False
    num_replays = 0

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        return body(inputs)

    def padded(self, key: Hashable | None, num_tokens: int) -> PaddedReplay | None:
        return None

    def begin_layer(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Captures(Generic[C]):
    """The captured steps of a runner by key, at most `room`; the one unused for longest makes room. A key is due for
    capture when it has been seen `runs_before` times, as a capture takes as long as some replays save."""

    def __init__(self, room: int, runs_before: int) -> None:
        self._room = room
        self._runs_before = runs_before
        self._held: OrderedDict[Hashable, C] = OrderedDict()
        self._seen: deque[Hashable] = deque(maxlen=runs_before * room)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: Hashable) -> C | None:
        captured = self._held.get(key)
        if captured is not None:
            self._held.move_to_end(key)
        return captured

    def is_due(self, key: Hashable) -> bool:
        """Returns whether to capture a step of this key; notes the step if not."""
        if self._seen.count(key) >= self._runs_before:
            return True
        self._seen.append(key)
        return False

    def keep(self, key: Hashable, captured: C) -> None:
        self._held[key] = captured
        if len(self._held) > self._room:
            oldest, _ = self._held.popitem(last=False)
            self._seen = deque((seen for seen in self._seen if seen != oldest), self._seen.maxlen)

    def clear(self) -> None:
        self._held.clear()
