"""The collectives of one stage's TP ranks, counted step by step, so that a rank that cannot compute can carry out the
rest of them.

Layers call all_reduce, the head gather. The first step of a rank is recorded: every step of a model makes the same
calls, and only their first dim differs. Behind them the last one, the head's gather, may come again for other rows (log
probabilities of prompts). A replay carries out some of them as one, on all ranks or on none: NCCL demands it. The ranks
of one that draws by shards tell each other of tokens in place of the gather. T tokens of a step, S rows that sample.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Final, NamedTuple, Protocol

import torch

from tandem.parallel.exchange.collectives import Collectives


class Kind(Enum):
    """The kinds of exchanges: of [T, *shape] a sum, of [S, *shape] gathers on the first rank and on all."""

    SUM = "sum"
    GATHER = "gather"
    ALL = "all gather"


NUM_PAIRS: Final = 2
"""Exchanges of a draw by shards: of the best logits, then of the greatest sums with noise."""


class Exchange(NamedTuple):
    """One exchange of each step."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class PaddedReplay(Protocol):
    """A captured part of a step, as a rank launches it that cannot compute: on padding alone."""

    @property
    def exchanges(self) -> range:
        """Its collectives, among those of a step."""
        ...

    def launch(self) -> None:
        """Replays it through StepCollectives.replay. Needs no memory."""
        ...


class StepCollectives:
    """Collectives of the `size` ranks of a stage; a step's calls stand between begin() and end(), of whatever comes
    before and after them nothing is noted."""

    def __init__(self, group: Collectives, size: int, rank: int = 0) -> None:
        self.group = group
        self.size = size
        self.is_first = rank == 0
        self._exchanges: list[Exchange] | None = [] if size == 1 else None
        self._by_shards = False
        self._recording: list[Exchange] | None = None
        self._rows = (0, 0)
        self._more: Sequence[int] = ()
        self._padded: PaddedReplay | None = None
        self._num_done = 0
        self._is_inside = False

    @property
    def padded(self) -> PaddedReplay | None:
        """The capture that all ranks replay in this step and that is not replayed yet."""
        return self._padded

    @property
    def num_exchanges(self) -> int | None:
        """The collectives of a step; None before the first step has ended."""
        return None if self._exchanges is None else len(self._exchanges)

    @property
    def is_exchanging(self) -> bool:
        """True while a collective is under way, as far as the host knows. From any thread."""
        return self._is_inside

    @property
    def num_done(self) -> int:
        """The collectives of the step that are over."""
        return self._num_done

    # ---- layers ----

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, bit-equal on each. May overwrite and return `tensor`."""
        self._note(tensor, Kind.SUM)
        return self._exchange(lambda: self.group.all_reduce(tensor))

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Fills parts_R [size, *tensor's shape], contiguous, with the ranks' tensors in their order; returns it."""
        self._note(tensor, Kind.ALL)
        return self._exchange(lambda: self.group.all_gather(parts_R, tensor))

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """Fills parts_R so on rank 0 alone; None on all others."""
        self._note(tensor, Kind.GATHER)
        self._exchange(lambda: self.group.gather(parts_R, tensor))

    def replay(self, replay: Callable[[], object], count: int) -> None:
        """Replays a capture of the next `count` of the step's collectives. None is kept here, or NCCL could not end."""
        self._is_inside = True
        replay()
        self._is_inside = False
        self._num_done += count
        self._padded = None

    # ---- steps ----

    def begin(
        self,
        num_tokens: int,
        num_samples: int,
        more_gathers: Sequence[int] = (),
        padded: PaddedReplay | None = None,
        *,
        by_shards: bool = False,
    ) -> None:
        """Starts a step of T tokens and S rows that sample. more_gathers: the rows of each gather that follows that of
        the S rows. padded: the capture that all ranks replay in it; None: all run it eagerly. by_shards: one that is to
        be captured, with a draw by shards."""
        self._by_shards = by_shards and self.size > 1
        self._rows = (num_tokens, num_samples)
        self._more = more_gathers if self.size > 1 else ()
        self._padded = padded
        self._num_done = 0
        self._is_inside = False
        self._recording = [] if self._exchanges is None else None

    def end(self) -> None:
        """Ends a step in which every layer was computed. AssertionError when it made other collectives than the first
        did: peers of a rank that runs out of memory would wait for ever."""
        if self._recording is not None:
            self._exchanges, self._recording = self._recording, None
        expected = len(self._calls()) + len(self._more)
        assert expected == self._num_done, f"{self._num_done} collectives, not {expected}"

    def make_up(self) -> None:
        """Carries out the step's collectives that are left, with zeros, or as a replay on padding. RuntimeError when it
        is not known which."""
        if self._exchanges is None:
            raise RuntimeError("the first step did not end")
        calls = [(exchange, self._rows[exchange.kind is not Kind.SUM]) for exchange in self._calls()]
        calls += [(self._exchanges[-1], num_rows) for num_rows in self._more]
        self._make_up(calls)

    @contextmanager
    def apart(self, num_tokens: int, num_samples: int, *, by_shards: bool = False) -> Iterator[None]:
        """Surrounds a step's collectives that all ranks run outside of a step. A rank without memory makes up the rest
        and raises torch.OutOfMemoryError; RuntimeError where it cannot."""
        self.begin(num_tokens, num_samples, by_shards=by_shards)
        try:
            yield
            self.end()
            return
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # which keeps the memory of what was computed
        try:
            self.make_up()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{failure}; its peers cannot go on: {error}") from error
        raise failure

    def close(self) -> None:
        """Releases the group's resources; no call may follow."""
        self.group.close()

    # ---- inside ----

    def _calls(self) -> list[Exchange]:
        """The exchanges of this step, but for more gathers."""
        assert self._exchanges is not None
        if not self._by_shards:
            return self._exchanges
        pair = Exchange(Kind.ALL, (2,), torch.int32, self._exchanges[-1].device)
        return [*self._exchanges[:-1], *[pair] * NUM_PAIRS]

    def _make_up(self, calls: Sequence[tuple[Exchange, int]]) -> None:
        """Carries out those of `calls`, each with its rows, that are not done."""
        if self._is_inside:
            raise RuntimeError("a collective was interrupted")
        while self._num_done < len(calls):
            if self._padded is not None and self._num_done == self._padded.exchanges.start:
                self._padded.launch()
                continue
            exchange, num_rows = calls[self._num_done]
            zeros = torch.zeros((num_rows, *exchange.shape), dtype=exchange.dtype, device=exchange.device)
            if exchange.kind is Kind.SUM:
                self.all_reduce(zeros)
            elif exchange.kind is Kind.ALL or self.is_first:
                parts_R = zeros.new_empty(self.size, *zeros.shape)
                self.all_gather(parts_R, zeros) if exchange.kind is Kind.ALL else self.gather(parts_R, zeros)
            else:
                self.gather(None, zeros)

    def _note(self, tensor: torch.Tensor, kind: Kind) -> None:
        if self._recording is not None:
            if kind is Kind.GATHER and self._recording and self._recording[-1].kind is kind:
                return  # one of the further gathers
            assert tensor.shape[0] == self._rows[kind is not Kind.SUM], (tensor.shape, self._rows)
            self._recording.append(Exchange(kind, tuple(tensor.shape[1:]), tensor.dtype, tensor.device))

    def _exchange(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._is_inside = True
        result = call()
        self._is_inside = False
        self._num_done += 1
        return result
