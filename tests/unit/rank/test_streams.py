"""Steps, the KV lane, adapters and streamed weights in any interleaving, under fake streams.

No two accesses to the same memory without an order between them, and the host reads nothing that the device has not
written. Each kind of fault that was there once is put back, to show that it would be found.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tandem.offload.weights.weight_copiers import StreamWeightCopier
from tandem.offload.weights.weight_stream import Copy, Wait, WeightStream
from tandem.workers.lora.device.host_copy import HostCopy
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.transfer import CopyKV, TransferResult
from tandem.workers.platforms import step_buffer
from tandem.workers.rank.launched_steps import LaunchedSteps, StepHandle
from tandem.workers.rank.transfers.lanes import Lanes
from tests.support.traced_accelerator import (
    NotActivated,
    Race,
    TracedAccelerator,
    TracedEvent,
    TracedStream,
    traced_platform,
)
from tests.support.traced_rank import (
    BLOCK_SIZE,
    INPUTS,
    OUTPUTS,
    SAMPLINGS,
    VOCAB,
    AdapterRank,
    MixedModel,
    Rank,
    Row,
    next_token,
    value_of,
)


@pytest.fixture
def rank() -> Iterator[Rank]:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        yield Rank(accelerator)


def prefill_then_store(rank: Rank) -> None:
    """A chunk that samples nothing, then a store of its blocks: a preemption in the middle of a prompt."""
    row = rank.add([3, 1, 4, 1, 5, 9, 2, 6], 2)
    rank.launch([(row, 6)])
    rank.collect()
    rank.store(row)


def step_during_a_load(rank: Rank) -> None:
    prefill_then_store(rank)
    other = rank.add([7, 7, 7], 3)
    rank.load(2, [(other, 3)])
    while rank.steps:
        rank.collect()


class History:
    """A random history of steps, KV copies, adapters and streamed weights on one rank. The engine's side is kept as the
    engine keeps it: blocks and slots are used again after the result of the last step that named them."""

    def __init__(self, accelerator: TracedAccelerator, data: st.DataObject) -> None:
        self.adapters = AdapterRank(accelerator)
        self.rank = Rank(accelerator, MixedModel(accelerator, self.adapters))
        self.data = data
        self.content: dict[int, int] = {}

    def run(self) -> None:
        for _ in range(self.data.draw(st.integers(4, 16))):
            self.rank.accelerator.lazy = self.data.draw(st.booleans())
            self.data.draw(st.sampled_from(list(self.possible())))()
        while self.rank.steps:
            self.rank.collect()
        self.rank.runner.close()

    @property
    def open_rows(self) -> list[Row]:
        return [row for row in self.rank.rows if not row.is_planned and row.scheduled < row.num_known]

    @property
    def idle_rows(self) -> list[Row]:
        return [row for row in self.rank.rows if row.used_by <= self.rank.collected and row.bound]

    def possible(self) -> Iterator[Callable[[], None]]:
        """The actions that can come next; those that make histories long more than once."""
        rank, open_rows = self.rank, self.open_rows
        if len(rank.rows) < 3 and len(rank.free) > 8:
            yield self.add
        if open_rows and len(rank.steps) < 3:
            yield from [self.launch] * 3
        if rank.steps:
            yield from [rank.collect] * 2
        if any(row.is_planned for row in self.idle_rows):
            yield lambda: rank.finish(next(row for row in self.idle_rows if row.is_planned))
        full = [row for row in self.idle_rows if min(row.scheduled, len(row.tokens)) >= BLOCK_SIZE]
        if full:
            yield lambda: rank.store(full[0])
        if rank.stored and len(rank.rows) < 4 and len(rank.free) > 12:
            yield from [self.load] * 2
        if self.free_slots:
            yield self.place

    @property
    def free_slots(self) -> list[int]:
        return sorted(set(range(4)) - {row.slot for row in self.rank.rows})

    def add(self) -> None:
        draw = self.data.draw
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))
        row = self.rank.add(prompt, draw(st.integers(1, 4)), draw(st.sampled_from(SAMPLINGS)))
        row.slot = draw(st.sampled_from([None, *sorted(self.content)]))
        row.value = 0 if row.slot is None else value_of(self.content[row.slot])

    def launch(self) -> None:
        some = self.data.draw(st.lists(st.sampled_from(self.open_rows), min_size=1, unique_by=id))
        self.rank.launch([(row, self.data.draw(st.integers(1, 5))) for row in some])

    def load(self) -> None:
        beside = self.data.draw(st.booleans())
        self.rank.load(2, [(row, 1) for row in self.open_rows] if beside else None)
        if not beside:
            self.rank.rows[-1].awaits = [self.rank.ticket]

    def place(self) -> None:
        """A step runs beside it, perhaps."""
        slot, content = self.data.draw(st.sampled_from(self.free_slots)), self.data.draw(st.integers(0, 3))
        rows = self.open_rows if len(self.rank.steps) < 3 else []
        if rows and self.data.draw(st.booleans()):
            self.rank.accelerator.before_synchronize = lambda: self.step_beside(rows)
        self.adapters.place(slot, content)
        self.content[slot] = content

    def step_beside(self, rows: list[Row]) -> None:
        with self.rank.accelerator.on_main():
            self.rank.launch([(row, 1) for row in rows])


def run_history(data: st.DataObject) -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        History(accelerator, data).run()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_history_of_steps_copies_adapters_and_weights_is_ordered(data: st.DataObject) -> None:
    run_history(data)


def answers_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: only sampling waited for the device, so that what comes after a result began too early."""
    settle = LaunchedSteps.settle

    def early(self: LaunchedSteps, last: StepHandle) -> None:
        if last.work is not None and last.work.drawn is None:
            last.done.wait = lambda: None  # type: ignore[method-assign]
        settle(self, last)

    monkeypatch.setattr(LaunchedSteps, "settle", early)
    monkeypatch.setattr(TracedEvent, "seconds_since", lambda self, earlier: 0.0)


def asks_for_a_stream_without_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: the current stream of another device."""
    monkeypatch.setattr(TracedAccelerator, "current_stream", lambda self: TracedStream(self, 10**9))


def grows_tables_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3: a new slot got larger tables, published before the device had filled them."""
    put = AdapterSlab.put

    def growing(self: AdapterSlab, copy: HostCopy, pages: Any, slot: int) -> None:
        for name in ("_rows_2SLR", "_ranks_SL", "_scales_SL"):
            setattr(self, name, getattr(self, name).clone())
        tables = (self._rows_2SLR[0, 0], self._rows_2SLR[1, 0], self._ranks_SL[0], self._scales_SL[0])
        self.tables = [type(self.tables[0])(*tables, INPUTS, OUTPUTS, 0)]
        put(self, copy, pages, slot)

    monkeypatch.setattr(AdapterSlab, "put", growing)


def frees_what_another_stream_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's copy goes through memory of the step's stream, in order, that is given back while the copy runs."""
    start = StreamWeightCopier.start

    def through_scratch(self: StreamWeightCopier, copies: Sequence[Copy]) -> Wait:
        scratch = torch.zeros(4)
        return start(self, [lambda: scratch.mul_(1.0), *copies])

    monkeypatch.setattr(StreamWeightCopier, "start", through_scratch)


@pytest.mark.parametrize(
    "defect",
    [
        asks_for_a_stream_without_its_device,
        grows_tables_beside_a_step,
        frees_what_another_stream_uses,
    ],
)
def test_a_defect_is_found_in_some_history(defect: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(Race):
        hunt()


HUNT = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    database=None,
    report_multiple_bugs=False,
)


@HUNT
@given(st.data())
def hunt(data: st.DataObject) -> None:
    run_history(data)


def test_a_chunk_that_samples_nothing_is_done_when_it_is_answered(rank: Rank) -> None:
    prefill_then_store(rank)


def test_an_answer_before_the_device_is_found(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_early(monkeypatch)
    with pytest.raises(Race):
        prefill_then_store(rank)


def test_tokens_that_are_read_before_their_event_are_found(rank: Rank) -> None:
    row = rank.add([3, 1, 4], 2)
    rank.launch([(row, 3)])
    assert not rank.steps[0][0].is_done()
    drawn = rank.steps[0][0].work.drawn  # type: ignore[union-attr]
    assert drawn is not None and drawn.collect().token_ids != [next_token([3, 1, 4])]
    rank.collect()
    assert drawn.collect().token_ids == [next_token([3, 1, 4])]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalties", "words"])
def test_a_step_takes_the_tokens_of_the_one_before_from_the_device(rank: Rank, sampling: RowSampling) -> None:
    """Three steps of two rows, of which the host reads nothing until all are launched; one copy brings each. Logits
    processors read them there too."""
    first, second = rank.add([3, 1, 4], 4, sampling), rank.add([2, 7], 4)
    rank.launch([(first, 3), (second, 2)])
    rank.accelerator.counts.clear()
    for _ in range(2):
        rank.launch([(first, 1), (second, 1)])
    counts = rank.accelerator.counts
    assert counts["uploads"] == 2 and counts["synchronizations"] == counts["reads on the host"] == 0
    while rank.steps:
        rank.collect()
    assert len(first.tokens) == 6 and len(second.tokens) == 5


def test_pinned_memory_that_is_filled_too_early_is_found(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffer, "STAGING_BUFFERS", 1)
    row = rank.add([3, 1, 4], 4)
    rank.launch([(row, 2)])
    rank.runner._rows._buffer._read[0] = None  # type: ignore[attr-defined]
    with pytest.raises(Race, match="before the device has read it"):
        rank.launch([(row, 1)])


def test_a_steps_time_is_its_own(rank: Rank) -> None:
    """F7: the time of a step that samples nothing was in the next one's. Here an event takes a second."""
    row = rank.add([3, 1, 4, 1, 5], 2)
    rank.launch([(row, 4)])
    rank.launch([(row, 1)])
    (first, _), (second, _) = rank.steps
    found = [step.result() for step in (first, second)]
    spans = [(step.began.number, step.done.number) for step in (first, second)]  # type: ignore[attr-defined]
    assert [result.device_s for result in found if result] == [done - began for began, done in spans]
    assert found[1] is not None and found[1].wait_s == spans[1][0] - spans[0][1]


def test_a_step_may_use_a_layer_that_has_arrived(rank: Rank) -> None:
    step_during_a_load(rank)


def test_a_gate_on_another_devices_stream_is_found(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2 put back: the current stream without its device is device 0's."""
    elsewhere = TracedStream(rank.accelerator, 10**9)
    monkeypatch.setattr(rank.accelerator, "current_stream", lambda: elsewhere)
    with pytest.raises(Race):
        step_during_a_load(rank)


@pytest.mark.parametrize("activates", [True, False])
def test_a_lane_activates_its_device_first(rank: Rank, activates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2 put back: a thread of a rank on the second device works on the first."""
    prefill_then_store(rank)
    if not activates:
        monkeypatch.setattr(rank.accelerator, "activate", lambda: None)
    done: list[TransferResult] = []
    lanes = Lanes(0, done.append)
    lanes.open("memory", rank.accelerator, rank.lane)
    lanes.put(CopyKV(ticket=9, kind="store", block_ids=rank.rows[0].blocks[:1], slots=[3]))
    lanes.close()
    failure = done[0].failure
    assert failure is None if activates else failure is not None and NotActivated.__name__ in failure.message


# ---- adapters ----


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["before", "during", "after"]), min_size=4, max_size=4), st.permutations(range(4)))
def test_adapters_are_placed_beside_steps(when: list[str], order: list[int]) -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        rank = AdapterRank(accelerator)
        for slot, moment in zip(order, when, strict=True):
            if moment == "before":
                rank.step()
            if moment == "during":
                rank.accelerator.before_synchronize = rank.step
            rank.place(slot)
            rank.step()


def test_tables_that_grow_beside_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        rank = AdapterRank(accelerator)
        rank.place(0)
        grows_tables_beside_a_step(monkeypatch)
        rank.accelerator.before_synchronize = rank.step
        with pytest.raises(Race):
            rank.place(1)


def test_a_placement_that_fails_half_way_has_ended_when_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies read the adapter's host memory and write pages that are somebody else's next."""
    accelerator, put = TracedAccelerator(), AdapterSlab.put

    def failing(self: AdapterSlab, copy: HostCopy, pages: Any, slot: int) -> None:
        put(self, copy, pages, slot)
        raise torch.OutOfMemoryError("seeded")

    with accelerator.tracing():
        rank = AdapterRank(accelerator)
        rank.place(0)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterSlab, "put", failing)
            with pytest.raises(torch.OutOfMemoryError):
                rank.place(1)
        with accelerator.on_main():
            rank.slab.memory_PE.mul(1.0)


# ---- weights ----


def walk_weights(accelerator: TracedAccelerator, streamed: tuple[int, ...], steps: list[int]) -> None:
    """Steps over seven layers that end at the given layer."""
    weights = [torch.full((8, 8), float(layer)) for layer in range(7)]
    copier = traced_platform(accelerator).weight_copier(len(streamed) * weights[0].nbytes)
    assert isinstance(copier, StreamWeightCopier)
    stream = WeightStream(streamed, copier)
    places = [stream.place_of(layer)(weight) for layer, weight in enumerate(weights)]
    stream.begin()
    for until in steps:
        for layer, (tensor, arrive) in enumerate(stream.in_turn(places)):
            if arrive is not None:
                arrive()
            found = tensor * 1.0
            accelerator.event().wait()
            assert found[0, 0] == layer
            if layer == until:
                break
    pinned = sum(accelerator.pinned.values())
    stream.close()
    assert pinned == len(streamed) * weights[0].nbytes, "bytes promised are bytes pinned"
    assert not accelerator.pinned


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 6)), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_streamed_weights_are_ordered_with_the_layers(streamed: set[int], steps: list[int]) -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        walk_weights(accelerator, tuple(sorted(streamed)), [*steps, 6])


@pytest.mark.parametrize("side", ["before", "after"])
def test_copies_that_nothing_orders_are_found(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that waits for no layer, and a layer that waits for no copy."""
    accelerator, wait_event = TracedAccelerator(), TracedStream.wait_event

    def deaf(self: TracedStream, event: Any) -> None:
        if (self.number == 0) != (side == "after"):
            wait_event(self, event)

    monkeypatch.setattr(TracedStream, "wait_event", deaf)
    with accelerator.tracing(), pytest.raises(Race):
        walk_weights_without_waiting(accelerator)


def walk_weights_without_waiting(accelerator: TracedAccelerator) -> None:
    """The same, where the host does not wait for the layers."""
    weights = [torch.full((8, 8), float(layer)) for layer in range(7)]
    copier = traced_platform(accelerator).weight_copier(7 * weights[0].nbytes)
    stream = WeightStream(range(7), copier)
    places = [stream.place_of(layer)(weight) for layer, weight in enumerate(weights)]
    stream.begin()
    for tensor, arrive in stream.in_turn(places):
        assert arrive is not None
        arrive()
        tensor.mul(1.0)
