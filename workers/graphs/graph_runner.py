"""The Protocol of graphs: a step, or its layers, over static inputs, run eagerly or as a replay of an earlier run.

The decoder asks for nothing but `run`; a platform chooses the runner. cpu_graphs.py replays captured kernel calls of
the layers, cuda_graphs.py CUDA graphs of whole steps, which the model runner asks for.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from tandem.parallel.exchange.step_collectives import StepCollectives

Outputs = tuple[torch.Tensor, ...]
"""Tensors whose dim 0 is the token."""
C = TypeVar("C")


class StaticInputs(Protocol):
    """The values that change between steps of one key. A body reads it nowhere else."""

    @property
    def num_tokens(self) -> int: ...

    def static(self) -> Self:
        """Returns the same values in memory of its own."""
        ...

    def take(self, inputs: Self, /) -> None:
        """Copies another step's values into this memory, of as many tokens."""
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

    def begin_layer(self) -> None:
        """Says that the body begins a layer: it reads no result from before the last one any more."""
        ...

    def close(self) -> None:
        """Drops the captures, which refer to memory that is about to be released. No run may follow."""
        ...


class StaticStep(Protocol):
    """A step that is captured whole. It has room for num_tokens, of which num_samples are sampled, in memory of its
    own; run() reads its inputs nowhere else."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def by_shards(self) -> bool:
        """True if ranks exchange pairs of a draw by shards in place of logits."""
        ...

    def run(self) -> Outputs:
        """Gives the device the step's work. The first output has num_tokens elements."""
        ...

    def pad(self) -> None:
        """Makes all of it padding, which changes nothing that a row has. Needs no memory."""
        ...


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A PaddedReplay of a whole step, which holds those of a step's collectives that are in `exchanges`. outputs: what
    step.run() has returned, with each replay's values."""

    graph: Callable[[], object]
    step: StaticStep
    outputs: Outputs
    exchanges: range
    tp: StepCollectives
    before_run: Callable[[], None]

    def replay(self) -> None:
        """Runs the step on the inputs of now."""
        self.before_run()
        self.tp.replay(self.graph, len(self.exchanges))

    def launch(self) -> None:
        self.step.pad()
        self.replay()


@runtime_checkable
class StartGraphs(GraphRunner, Protocol):
    """A GraphRunner that runs layers eagerly: whole steps are captured, all of them at the start, by the ranks of a
    stage together."""

    def capture(self, key: Hashable, step: StaticStep) -> str | None:
        """Captures a step of a key; returns why it could not. What it sums, the peers sum, whether it can be captured
        or not."""
        ...

    def capture_apart(self, body: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs] | str:
        """Captures what exchanges nothing and is no step; returns its replay and its outputs, whose memory stays, or
        why it could not."""
        ...

    def find(self, key: Hashable | None, num_tokens: int) -> StepReplay | None:
        """Returns the least capture of a key that has room for so many tokens."""
        ...

    def drop(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        """Forgets captures, by key and number of tokens, if they are there."""
        ...


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
