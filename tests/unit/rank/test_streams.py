"""Steps, the KV lane, adapters and streamed weights in any interleaving, under fake streams.

No two accesses to the same memory without an order between them, and the host reads nothing that the device has not
written. Each kind of fault that was there once is put back, to show that it would be found.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.copies.kv_copies import bytes_per_slot
from tandem.offload.weights.weight_copiers import StreamWeightCopier
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import LinearPart, Shard
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.lora_ops import AdapterRows, TorchLora
from tandem.workers.lora.device.host_copy import HostCopy
from tandem.workers.lora.device.layout import ShardShape, pack
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.messages.transfer import CopyKV, PlaceAdapter, TransferResult
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.model_runner import ModelRunner, StepHandle
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.transfers.adapter_lanes import PlaceLane
from tandem.workers.rank.transfers.kv_lanes import MemoryLane
from tandem.workers.rank.transfers.lanes import Lanes
from tandem.workers.rank.transfers.load_gate import LoadGate
from tests.support.traced_accelerator import (
    NotActivated,
    Race,
    TracedAccelerator,
    TracedEvent,
    TracedStream,
    traced_platform,
)

VOCAB, LAYERS, BLOCKS, BLOCK_SIZE, DIM = 61, 3, 24, 2, 16
GREEDY = RowSampling(temperature=0.0)
BIASED = RowSampling(temperature=0.0, repetition_penalty=1.5)


def next_token(context: list[int]) -> int:
    return sum(token * (place + 1) for place, token in enumerate(context)) % VOCAB


class SumModel:
    """Writes each token to its slot in every layer; the next token is a sum over what its row reads back."""

    def forward(self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        next_T = torch.zeros(batch.num_tokens, dtype=torch.int64)
        for layer in kv.layers:
            value_TD = batch.input_ids_T.float()[:, None].expand(-1, DIM)
            for plane in (layer.keys, layer.values):
                plane.view(-1, DIM).index_copy_(0, batch.slot_mapping_T, value_TD)
            end = 0
            for row, length in enumerate(batch.seq_lens_list):
                end += batch.query_lens_list[row]
                blocks = batch.block_table_RN[row, : -(-length // BLOCK_SIZE)].long()
                context_J = layer.values.index_select(0, blocks).flatten(0, 1)[:length, 0, 0].long()
                next_T[end - 1] = (context_J * torch.arange(1, length + 1)).sum() % VOCAB
        return torch.nn.functional.one_hot(next_T[batch.logits_rows_S], VOCAB).float()

    def close(self) -> None: ...


@dataclass
class Row:
    """A sequence as the engine sees it. used_by: the last step that named its blocks."""

    number: int
    tokens: list[int]
    blocks: list[int]
    wanted: int
    num_known: int
    scheduled: int = 0
    bound: bool = False
    used_by: int = 0
    awaits: list[int] = field(default_factory=list)
    sampling: RowSampling = GREEDY
    start: int = 0

    @property
    def is_planned(self) -> bool:
        return self.scheduled == self.num_known and self.num_known == self.wanted


class Rank:
    """A rank under the traced accelerator, driven by hand: rows, one lane, plans ahead of their results."""

    def __init__(self, accelerator: TracedAccelerator) -> None:
        self.accelerator = accelerator
        self.platform = traced_platform(accelerator)
        self.kv = KVCache.allocate(LAYERS, BLOCKS, BLOCK_SIZE, 1, DIM, torch.float32, self.platform)
        self.accelerator.share(self.kv.slab, grain=4 * DIM)
        table = RowTable(2, 40, BLOCK_SIZE, VOCAB)
        self.runner = ModelRunner(SumModel(), ParallelContext.single(), self.kv, table, self.platform)
        self.gate = self.runner.gate = LoadGate(self.accelerator)
        self.slab = HostSlab.allocate(BLOCKS, bytes_per_slot(self.kv.planes), self.accelerator)
        copier = self.platform.kv_copier(self.kv.planes, LAYERS, self.slab.bytes_SB)
        self.lane = MemoryLane(copier, self.slab, self.gate)
        self.steps: deque[tuple[StepHandle, list[Row]]] = deque()
        self.rows: list[Row] = []
        self.free = list(range(BLOCKS))
        self.given_back: list[int] = []
        self.stored: list[list[int]] = []
        self.collected = self.step_id = self.ticket = 0
        self.freed: list[int] = []

    def add(self, prompt: list[int], more: int, sampling: RowSampling = GREEDY) -> Row:
        blocks = [self.free.pop() for _ in range(-(-(len(prompt) + more) // BLOCK_SIZE))]
        number = next(n for n in range(9) if n not in {row.number for row in self.rows})
        row = Row(number, list(prompt), blocks, len(prompt) + more, len(prompt), sampling=sampling)
        self.rows.append(row)
        return row

    def launch(self, chosen: list[tuple[Row, int]]) -> None:
        """A step of these rows and numbers of tokens."""
        self.step_id += 1
        inits, work, samplers, awaits = [], [], [], []
        for row, count in chosen:
            if not row.bound:
                inits.append(
                    RowInit(
                        row=row.number,
                        token_ids=list(row.tokens),
                        prompt_len=len(row.tokens),
                        num_computed=row.start,
                        sampling=row.sampling,
                    )
                )
            count = min(count, row.num_known - row.scheduled)
            row.scheduled += count
            samples = row.scheduled == row.num_known
            new = [] if row.bound else row.blocks
            work.append(RowWork(row=row.number, num_tokens=count, samples=samples, new_block_ids=new))
            row.bound, row.used_by = True, self.step_id
            awaits += row.awaits
            row.awaits = []
            if samples:
                samplers.append(row)
                row.num_known += row.num_known < row.wanted
        plan = StepPlan(step_id=self.step_id, work=work, new_rows=inits, freed_rows=self.freed, awaits=awaits)
        self.freed = []
        self.steps.append((self.runner.launch(plan), samplers))

    def collect(self) -> None:
        """The oldest step's result."""
        step, samplers = self.steps.popleft()
        result = step.result()
        assert result is not None and [r.row for r in result.rows] == [row.number for row in samplers]
        for row, found in zip(samplers, result.rows, strict=True):
            if len(row.tokens) < row.wanted:
                if row.sampling is GREEDY:
                    assert found.token_ids == [next_token(row.tokens)], "a token of what the row had"
                row.tokens += found.token_ids
        self.collected += 1

    def finish(self, row: Row) -> None:
        """Frees a row whose steps all have results."""
        assert row.used_by <= self.collected
        self.rows.remove(row)
        self.freed.append(row.number)
        self.free = row.blocks + self.free

    def store(self, row: Row) -> None:
        """Copies the row's full blocks to the host, after the result of the last step that used them."""
        assert row.used_by <= self.collected
        count = min(row.scheduled, len(row.tokens)) // BLOCK_SIZE
        slots = list(range(count))
        self._move("store", row.blocks[:count], slots)
        self.stored = [row.tokens[: count * BLOCK_SIZE]]

    def load(self, more: int, during: list[tuple[Row, int]] | None) -> None:
        """A row of what was stored last; a step awaits its load, launched while the copies run if `during`."""
        tokens = [*self.stored.pop(), 5, 6]
        row = self.add(tokens, more)
        row.start = row.scheduled = len(tokens) - 2
        count = row.start // BLOCK_SIZE

        def step() -> None:
            row.awaits = [self.ticket]
            with self.accelerator.on_main():
                self.launch([(row, 2), *(during or [])])

        if during is not None:
            self.accelerator.before_synchronize = step
        self._move("load", row.blocks[:count], list(range(count)))

    def _move(self, kind: Any, blocks: list[int], slots: list[int]) -> None:
        self.ticket += 1
        self.lane.move(CopyKV(ticket=self.ticket, kind=kind, block_ids=blocks, slots=slots))


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


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_interleaving_of_steps_and_copies_is_ordered(data: st.DataObject) -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        rank = Rank(accelerator)
        for _ in range(data.draw(st.integers(4, 14))):
            rank.accelerator.lazy = data.draw(st.booleans())
            open_rows = [row for row in rank.rows if not row.is_planned and row.scheduled < row.num_known]
            idle = [row for row in rank.rows if row.used_by <= rank.collected and row.bound]
            done = [row for row in idle if row.is_planned]
            full = [row for row in idle if min(row.scheduled, len(row.tokens)) >= BLOCK_SIZE]
            actions = ["add"] if len(rank.rows) < 3 and len(rank.free) > 8 else []
            actions += ["launch"] * 3 if open_rows and len(rank.steps) < 3 else []
            actions += ["collect"] * 2 if rank.steps else []
            actions += ["finish"] if done else []
            actions += ["store"] if full else []
            actions += ["load", "load"] if rank.stored and len(rank.rows) < 4 and len(rank.free) > 12 else []
            match data.draw(st.sampled_from(actions)):
                case "add":
                    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))
                    rank.add(prompt, data.draw(st.integers(1, 4)), data.draw(st.sampled_from([GREEDY, GREEDY, BIASED])))
                case "launch":
                    some = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique_by=id))
                    rank.launch([(row, data.draw(st.integers(1, 5))) for row in some])
                case "collect":
                    rank.collect()
                case "finish":
                    rank.finish(done[0])
                case "store":
                    rank.store(full[0])
                case "load":
                    beside = data.draw(st.booleans())
                    rank.load(2, [(row, 1) for row in open_rows] if beside else None)
                    if not beside:
                        rank.rows[-1].awaits = [rank.ticket]
        while rank.steps:
            rank.collect()
        rank.runner.close()


def test_a_chunk_that_samples_nothing_is_done_when_it_is_answered(rank: Rank) -> None:
    prefill_then_store(rank)


def test_an_answer_before_the_device_is_found(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1 put back: only sampling waited for the device."""
    settle = ModelRunner.settle

    def early(self: ModelRunner, last: StepHandle) -> None:
        if last.computed is not None and last.computed.drawn is None:
            last.done.wait = lambda: None  # type: ignore[method-assign]
        settle(self, last)

    monkeypatch.setattr(ModelRunner, "settle", early)
    monkeypatch.setattr(TracedEvent, "seconds_since", lambda self, earlier: 0.0)
    with pytest.raises(Race):
        prefill_then_store(rank)


def test_tokens_that_are_read_before_their_event_are_found(rank: Rank) -> None:
    row = rank.add([3, 1, 4], 2)
    rank.launch([(row, 3)])
    assert not rank.steps[0][0].is_done()
    drawn = rank.steps[0][0].computed.drawn  # type: ignore[union-attr]
    assert drawn is not None and drawn.collect().token_ids != [next_token([3, 1, 4])]
    rank.collect()
    assert drawn.collect().token_ids == [next_token([3, 1, 4])]


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

INPUTS, OUTPUTS, RANK_OF_ADAPTER = 16, 32, 8


def adapter_copy(shape: ShardShape, slab: HostSlab, seed: int) -> HostCopy:
    ranks_S = np.full(len(shape.parts), RANK_OF_ADAPTER)
    packing = pack(shape, ranks_S)
    pages = slab.bytes_SB[: packing.num_pages].view(torch.float32)
    return HostCopy(pages, packing, ranks_S, np.full(len(shape.parts), 0.5, np.float32))


class AdapterRank:
    """A slab of adapters, the lane that places them, and a step that reads them."""

    def __init__(self, accelerator: TracedAccelerator) -> None:
        self.accelerator = accelerator
        platform = traced_platform(accelerator)
        part = LinearPart("q", Shard(INPUTS, 0, INPUTS), Shard(OUTPUTS, 0, OUTPUTS))
        self.shape = ShardShape.of([part], RANK_OF_ADAPTER)
        pages = pack(self.shape, np.array([RANK_OF_ADAPTER])).num_pages
        self.slab = AdapterSlab(self.shape, 4 * pages, torch.float32, platform)
        self.pages_each = pages
        host = HostSlab.allocate(pages, self.shape.page_elements * 4, self.accelerator)
        self.copies = {f"{n}": adapter_copy(self.shape, host, n) for n in range(4)}
        self.lane = PlaceLane(self.slab, self.copies, self.accelerator)
        table = self.slab.tables[0]
        self.accelerator.share(self.slab.memory_PE, table.a_rows, table.ranks, table.scales, grain=4)
        self.placed: list[int] = []

    def place(self, slot: int) -> None:
        first = slot * self.pages_each
        pages = list(range(first, first + self.pages_each))
        ref = AdapterRef(name=f"{slot}", source="here", digest=f"{slot}")
        self.lane.move(PlaceAdapter(ticket=1, adapter=ref, slot=slot, pages=pages))
        self.placed.append(slot)

    def step(self) -> None:
        """Tokens of every placed adapter."""
        with self.accelerator.on_main():
            slots = self.accelerator.to_device(torch.tensor(self.placed, dtype=torch.int32))
            segments = [(place, place + 1, slot) for place, slot in enumerate(self.placed)]
            x, y = torch.ones(len(self.placed), INPUTS), torch.zeros(len(self.placed), OUTPUTS)
            rows = AdapterRows(slots, segments)
            if self.placed:
                TorchLora().add(y, x, self.slab.memory_PE, self.slab.tables, rows)
            self.accelerator.event().wait()


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
    """F3 put back: a new slot got larger tables, published before the device had filled them."""
    accelerator, put = TracedAccelerator(), AdapterSlab.put

    def growing(self: AdapterSlab, copy: HostCopy, pages: Any, slot: int) -> None:
        for name in ("_rows_2SLR", "_ranks_SL", "_scales_SL"):
            setattr(self, name, getattr(self, name).clone())
        tables = (self._rows_2SLR[0, 0], self._rows_2SLR[1, 0], self._ranks_SL[0], self._scales_SL[0])
        self.tables = [type(self.tables[0])(*tables, INPUTS, OUTPUTS, 0)]
        put(self, copy, pages, slot)

    with accelerator.tracing():
        rank = AdapterRank(accelerator)
        rank.place(0)
        monkeypatch.setattr(AdapterSlab, "put", growing)
        rank.accelerator.before_synchronize = rank.step
        with pytest.raises(Race):
            rank.place(1)


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
