"""A rank of the CUDA platform under the traced accelerator, driven by hand: rows, the KV lane, adapters.

Its model is a sum over what rows read back, so that a wrong or early read shows in the tokens as well as in the trace.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.copies.kv_copies import bytes_per_slot
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import LinearPart
from tandem.parallel.params import Span
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import NOT_KNOWN
from tandem.workers.kernels.lora_ops import AdapterRows, TorchLora
from tandem.workers.lora.device.host_copy import HostCopy
from tandem.workers.lora.device.layout import ShardShape, pack
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.messages.transfer import CopyKV, PlaceAdapter
from tandem.workers.models.spec.kv_layout import KVLayout
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.launched_steps import StepHandle
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.transfers.adapter_lanes import PlaceLane
from tandem.workers.rank.transfers.kv_lanes import MemoryLane
from tandem.workers.rank.transfers.load_gate import LoadGate
from tests.support.platforms import NoGraphs
from tests.support.traced_accelerator import TracedAccelerator, traced_platform
from tests.unit.sampling.naive_twin import choose

VOCAB, LAYERS, BLOCKS, BLOCK_SIZE, DIM = 61, 3, 24, 2, 16
INPUTS, OUTPUTS, RANK_OF_ADAPTER = 16, 32, 8
GREEDY = RowSampling(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    RowSampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=2.0),
    RowSampling(
        temperature=0.0,
        min_tokens=2,
        stop_token_ids=tuple(range(0, VOCAB, 3)),
        bad_words_token_ids=tuple((token, (7 * token) % VOCAB) for token in range(VOCAB)),
        thinking_budget=ThinkingBudget(tokens=1, start=(1,), end=(5, 6), inside=True),
    ),
)
"""What they choose depends on the tokens before."""


def next_token(context: list[int]) -> int:
    return sum(token * (place + 1) for place, token in enumerate(context)) % VOCAB


class SumModel:
    """Writes each token to its slot in every layer; the next token is a sum over what its row reads back. constant: is
    added to it in forward()."""

    graphs = NoGraphs()
    constant = 0

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
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


class MixedModel(SumModel):
    """The same over layers whose weights stream from host memory; each adds its number. Adapters add their value."""

    constant = sum(range(1, LAYERS + 1))

    def __init__(self, accelerator: TracedAccelerator, adapters: "AdapterRank") -> None:
        weights = [torch.full((8, 8), layer + 1.0) for layer in range(LAYERS)]
        self._stream = WeightStream(
            range(LAYERS), traced_platform(accelerator).weight_copier(LAYERS * weights[0].nbytes)
        )
        self._placed = [self._stream.place_of(layer)(weight) for layer, weight in enumerate(weights)]
        self._stream.begin()
        self._adapters = adapters

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        added = torch.zeros(1, dtype=torch.int64)
        layers = []
        for (weight, arrive), layer in zip(self._stream.in_turn(self._placed), kv.layers, strict=True):
            layers.append(layer)
            assert arrive is not None
            arrive()
            added = added + weight[0, 0].long()
        logits_SV = super().forward(batch, replace(kv, layers=layers), hidden_TH)
        added_T = added.expand(batch.num_tokens).clone()
        if batch.adapters is not None:
            y_TO = torch.zeros(batch.num_tokens, OUTPUTS)
            slab = self._adapters.slab
            TorchLora().add(y_TO, torch.ones(batch.num_tokens, INPUTS), slab.memory_PE, slab.tables, batch.adapters)
            added_T += y_TO[:, 0].round().long()
        next_S = (logits_SV.argmax(1) + added_T[batch.logits_rows_S]) % VOCAB
        return torch.nn.functional.one_hot(next_S, VOCAB).float()

    def close(self) -> None:
        self._stream.close()


@dataclass
class Row:
    """A sequence as the engine sees it. used_by: the last step that named its blocks. slot, value: of its adapter."""

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
    prompt_len: int = 0
    start: int = 0
    slot: int | None = None
    value: int = 0

    @property
    def is_planned(self) -> bool:
        return self.scheduled == self.num_known and self.num_known == self.wanted


class Rank:
    """A rank under the traced accelerator, driven by hand: rows, one lane, plans ahead of their results."""

    def __init__(self, accelerator: TracedAccelerator, model: SumModel | None = None) -> None:
        self.accelerator = accelerator
        self.platform = traced_platform(accelerator)
        self.model = model or SumModel()
        self.kv = KVCache.allocate(
            [KVLayout.keys_and_values(1, DIM)] * LAYERS, BLOCKS, BLOCK_SIZE, torch.float32, self.platform
        )
        self.accelerator.share(self.kv.slab, grain=4 * DIM)
        table = RowTable(2, 40, BLOCK_SIZE, VOCAB)
        self.runner = ModelRunner(self.model, ParallelContext.single(), self.kv, table, self.platform)
        self.gate = self.runner.gate = LoadGate(self.accelerator)
        self.slab = HostSlab.allocate(BLOCKS, bytes_per_slot(self.kv.planes), self.accelerator)
        copier = self.platform.kv_copier(self.kv.layers, self.slab.bytes_SB)
        slots = np.full(BLOCKS, NOT_KNOWN, np.int32)
        self.lane = MemoryLane(copier, self.slab, self.gate, self.kv.drafted, slots)
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
        row.prompt_len = len(prompt)
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
                        adapter_slot=row.slot,
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
                best = (next_token(row.tokens) + self.model.constant + row.value) % VOCAB
                expected = choose(np.eye(VOCAB)[best], row.sampling, row.tokens, row.prompt_len)
                assert found.token_ids == [expected], "a token of what the row had"
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


def value_of(content: int) -> int:
    """What an adapter adds to an output for an input of ones."""
    return content + 1


def adapter_copy(shape: ShardShape, slab: HostSlab, content: int) -> HostCopy:
    """A = B = c: an output is scale * RANK_OF_ADAPTER * (INPUTS * c) * c."""
    ranks_S = np.full(len(shape.parts), RANK_OF_ADAPTER)
    packing = pack(shape, ranks_S)
    first = content * packing.num_pages
    pages = slab.bytes_SB[first : first + packing.num_pages].view(torch.float32)
    pages.fill_(math.sqrt(value_of(content) / (0.5 * RANK_OF_ADAPTER * INPUTS)))
    return HostCopy(pages, packing, ranks_S, np.full(len(shape.parts), 0.5, np.float32))


class AdapterRank:
    """A slab of adapters, the lane that places them, and a step that reads them."""

    def __init__(self, accelerator: TracedAccelerator) -> None:
        self.accelerator = accelerator
        platform = traced_platform(accelerator)
        part = LinearPart("q", Span(INPUTS, 0, INPUTS), Span(OUTPUTS, 0, OUTPUTS))
        self.shape = ShardShape.of([part], RANK_OF_ADAPTER)
        pages = pack(self.shape, np.array([RANK_OF_ADAPTER])).num_pages
        self.slab = AdapterSlab(self.shape, 4 * pages, torch.float32, platform)
        self.pages_each = pages
        host = HostSlab.allocate(4 * pages, self.shape.page_elements * 4, self.accelerator)
        self.copies = {f"{n}": adapter_copy(self.shape, host, n) for n in range(4)}
        self.lane = PlaceLane(self.slab, self.copies, self.accelerator)
        table = self.slab.tables[0]
        self.accelerator.share(self.slab.memory_PE, table.a_rows, table.ranks, table.scales, grain=4)
        self.placed: list[int] = []
        self.accelerator.synchronize()  # the contents were written by the host

    def place(self, slot: int, content: int | None = None) -> None:
        """content: one of four, by default the slot's number."""
        first, digest = slot * self.pages_each, f"{slot if content is None else content}"
        pages = list(range(first, first + self.pages_each))
        ref = AdapterRef(name=digest, source="here", digest=digest)
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
