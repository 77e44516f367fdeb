"""What the engine's tests share: short builders, a sink that checks the stream invariants, a clock, and the oracle."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
from fake_adapters import AdapterPlan, FakeAdapters
from fake_executor import FakeExecutor, chain_of, fake_embedding, fake_token
from fake_tiers import FakeTiers, TierPlan

from tandem.configs.schema import (
    CacheSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.offload.kv.kv_groups import KVGroups
from tandem.workers.engine.adapters.adapter_cache import AdapterCache
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.messages.request import (
    AdapterRef,
    Ended,
    GenerationRequest,
    Pool,
    PromptLogprobs,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from tandem.workers.messages.step import RowSampling
from tests.support.engine_invariants import check_invariants

EOS = 1
VOCAB = 97


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Sink:
    """Collects what is said; asserts: positions without gap or repeat, one end per request, after its deltas."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    stop_reasons: dict[tuple[str, int], int | None] = field(default_factory=dict)
    ends: dict[str, Ended] = field(default_factory=dict)
    batches: list[list[TokenDelta]] = field(default_factory=list)
    resumed: dict[tuple[str, int], int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    def on_begun(self, request: GenerationRequest, cached_tokens: int) -> None:
        assert request.request_id not in self.ends, "a row after the end"
        self.begun[request.request_id] = cached_tokens

    def deltas(self, deltas: list[TokenDelta]) -> None:
        assert deltas, "an empty batch of deltas"
        self.batches.append(deltas)
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert delta.request_id not in self.ends, "a delta after the end"
            assert key not in self.reasons, "a delta after the last one"
            assert delta.request_id in self.begun or not delta.token_ids, "a token before the first row"
            have = self.tokens.setdefault(key, [])
            assert delta.first_position == self.resumed.get(key, 0) + len(have), "a gap or a repeat"
            have.extend(delta.token_ids)
            if delta.prompt_logprobs is not None:
                self._score(delta, delta.prompt_logprobs)
                continue
            if delta.embedding is not None:
                assert delta.finish_reason == "stop" and delta.usage is not None
                self.embeddings[delta.request_id] = delta.embedding
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
                self.stop_reasons[key] = delta.stop_reason
            else:
                assert delta.token_ids and delta.usage is None

    def _score(self, delta: TokenDelta, got: PromptLogprobs) -> None:
        assert not delta.token_ids and delta.usage is None and delta.finish_reason is None
        entries = self.prompt_logprobs.setdefault(delta.request_id, [])
        assert got.entries and got.first_position == len(entries) + 1, "a gap or a repeat"
        entries += got.entries

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.request_id == request.request_id
        assert ended.request_id not in self.ends, "a second end"
        self.ends[ended.request_id] = ended


@dataclass
class Harness:
    """One engine over one FakeExecutor. Build it with `harness(...)`. look_every: steps from one look at all invariants
    to the next; more than one where thousands of requests wait, which a look goes through."""

    engine: Engine
    executor: FakeExecutor
    sink: Sink
    clock: FakeClock
    facts: ModelFacts
    step_s: float = 0.01
    patience: int = 1
    look_every: int = 1
    num_steps: int = 0

    @property
    def tiers(self) -> FakeTiers:
        """The fake lanes of a harness that has them."""
        assert self.executor.tiers is not None
        return self.executor.tiers

    @property
    def adapters(self) -> FakeAdapters:
        """The fake ranks' adapters of a harness that has them."""
        assert self.executor.adapters is not None
        return self.executor.adapters

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.executor.wanted[request.sampling.seed] = None if request.adapter is None else request.adapter.digest
            for choice, tokens in enumerate(request.resume_token_ids):
                self.sink.resumed[request.request_id, choice] = len(tokens)
            self.engine.add_request(request)

    def step(self) -> bool:
        self.clock.now_s += self.step_s
        progress = self.engine.turn(0.05)
        self.num_steps += 1
        if self.num_steps % self.look_every == 0:
            check_invariants(self.engine)
        return progress

    def run(self, most_steps: int = 5_000) -> None:
        """Steps until nothing is left to do; an engine that stops making progress fails."""
        idle = 0
        for _ in range(most_steps):
            if not self.engine.has_work():
                break
            idle = 0 if self.step() else idle + 1
            assert idle <= self.executor.stalls + self.patience, "the engine is stuck"
        assert not self.engine.has_work(), "not finished"
        self.drain_transfers()
        self.assert_empty()

    def drain_transfers(self, most_polls: int = 2000) -> None:
        """Nobody asks for anything: the copies that are under way come to their end."""
        for _ in range(most_polls):
            if not self.engine.is_copying:
                break
            self.clock.now_s += self.step_s
            self.engine.turn(0.0)
            check_invariants(self.engine)

    def states(self, name: str) -> list[SequenceStatus | Blocker]:
        """Of each choice of a request: what it waits for; its status if that is nothing but a row and blocks."""
        state = self.engine.requests.get(name)
        assert state is not None
        return [self.engine.scheduler.waiting.blocker_of(seq) or seq.status for seq in state.sequences]

    def assert_empty(self) -> None:
        """Quiescence of KV: nothing is used when nothing runs."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.in_flight_steps, stats.used_blocks) == (0, 0, 0, 0)
        manager = self.engine.manager
        assert manager.pool.num_reserved == manager.num_promised == 0, "a block is reserved or promised still"
        if self.executor.tiers is not None:
            assert not self.tiers.under_way, "a ticket is open"
        if stats.adapters is not None:
            assert not self.adapters.under_way, "a ticket of an adapter is open"
            assert stats.adapters.waiting == 0, "somebody waits for an adapter still"
            assert stats.adapters.in_use == 0, "an adapter has a user still"


def harness(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    stages: int = 1,
    asynchronous: bool = False,
    max_model_len: int = 512,
    caching: bool = True,
    kv_events: bool = True,
    roots: dict[int, str] | None = None,
    fail_at: frozenset[tuple[int, int, int]] = frozenset(),
    stalls: int = 0,
    room: Any = lambda step_id: float("inf"),
    device_s: Any = lambda plan: 0.0,
    step_log: str | None = None,
    tiers: TierPlan | None = None,
    adapters: AdapterPlan | None = None,
    adapter_cache: type[AdapterCache] = AdapterCache,
    transfers: type[TransferManager] = TransferManager,
    patience: int = 1,
    drafts: int = 0,
    windows: tuple[int | None, ...] = (None,),
    experts: tuple[dict[int, list[int]], ...] = (),
    build: Callable[..., Engine] = build_engine,
    **scheduler: Any,
) -> Harness:
    """An engine over a FakeExecutor; further keywords are SchedulerSettings' fields. patience: steps without progress
    that are no sign of a standstill (late transfers). drafts: --speculative-config's num_speculative_tokens; 0: off.
    adapter_cache, transfers: the real ones or defective. windows: of the groups of layers. experts: loads of
    experts that each stage reports, by layer. build: build_engine(), or what records too."""
    limits = SchedulerSettings(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "async_scheduling": asynchronous, **scheduler}
    )
    settings = EngineSettings(
        model=ModelSettings(model="fake"),
        cache=CacheSettings(block_size=block_size, enable_prefix_caching=caching, kv_events=kv_events),
        scheduler=limits,
        parallel=ParallelSettings(pipeline_parallel_size=stages),
        lora=LoraSettings(enable_lora=False)
        if adapters is None
        else LoraSettings(enable_lora=True, max_loras=adapters.max_loras, max_cpu_loras=adapters.max_cpu_loras),
        step_log=step_log,
        speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=drafts) if drafts else None,
    )
    executor = FakeExecutor(
        num_blocks,
        block_size,
        min(limits.max_num_seqs, limits.max_num_batched_tokens),
        stages=stages,
        vocab_size=VOCAB,
        roots=roots,
        fail_at=fail_at,
        stalls=stalls,
        room=room,
        device_s=device_s,
        tiers=tiers,
        adapters=adapters,
        windows=windows,
        experts=experts,
    )
    in_flight = (stages if stages > 1 else 1 + asynchronous) * limits.max_num_batched_tokens
    groups = KVGroups(block_size, windows, in_flight)
    facts = ModelFacts(max_model_len, VOCAB, (EOS,), "revision", "float32", groups, bool(experts))
    sink, clock = Sink(), FakeClock()
    with (
        mock.patch("tandem.workers.engine.adapters.adapter_cache.AdapterCache", adapter_cache),
        mock.patch("tandem.workers.engine.build_engine.TransferManager", transfers),
    ):
        engine = build(settings, facts, executor, executor.start(), sink, clock, sink.on_begun)
    return Harness(engine, executor, sink, clock, facts, patience=patience)


def request(
    name: str,
    prompt: list[int] | int,
    max_tokens: int = 8,
    *,
    attempt: int = 0,
    priority: int = 0,
    salt: str = "",
    deadline_s: float | None = None,
    resume: list[list[int]] | None = None,
    adapter: str | None = None,
    tenant: str = "default",
    begun: bool = False,
    suspect: bool = False,
    ended: list[int] | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """A request; an int as prompt means that many tokens that no other name has. The seed comes from the name."""
    tokens = (
        [2 + hash((ord(name[0]), len(name), *map(ord, name), i)) % (VOCAB - 2) for i in range(prompt)]
        if isinstance(prompt, int)
        else prompt
    )
    params = {"seed": sum(ord(c) * 257**i for i, c in enumerate(name)) % 2**31, "ignore_eos": True, **sampling}
    return GenerationRequest(
        request_id=name,
        attempt=attempt,
        prompt_token_ids=tokens,
        sampling=msgspec.structs.replace(SamplingParams(), max_tokens=max_tokens, **params),
        tenant=tenant,
        priority=priority,
        cache_salt=salt,
        deadline_s=deadline_s,
        resume_token_ids=resume or [],
        begun=begun,
        suspect=suspect,
        ended_choices=ended or [],
        adapter=None if adapter is None else AdapterRef(name=adapter, digest=adapter, source=adapter),
    )


def filled(manager: BlockManager, table: BlockTable, num_tokens: int, hits: Iterable[int] = ()) -> bool:
    """Whether there was room for an empty table of num_tokens tokens, which then has all its blocks."""
    if not manager.admit(table, num_tokens, list(hits)):
        return False
    manager.take_reserved(table, num_tokens)
    return True


def embedding(name: str, prompt: list[int] | int, kind: Any = "last", **more: Any) -> GenerationRequest:
    """A request for the embedding of a prompt; as request()."""
    generates = request(name, prompt, **more)
    sampling = msgspec.structs.replace(generates.sampling, max_tokens=0)
    return msgspec.structs.replace(generates, sampling=sampling, pool=Pool(kind=kind))


def assert_embedded(h: Harness, *requests: GenerationRequest, root: str = "") -> None:
    """These finished requests have the oracle's embeddings, and the bill of a prompt."""
    for req in requests:
        assert req.pool is not None
        of_row = root if req.adapter is None else f"{root}{req.adapter.digest}"
        wanted = fake_embedding(req.pool.kind, chain_of(of_row, req.prompt_token_ids))
        assert h.sink.embeddings[req.request_id] == wanted, f"{req.request_id}: another embedding"
        ended = h.sink.ends[req.request_id]
        assert (ended.finish_reasons, ended.positions, ended.refused) == (["stop"], [0], None)
        usage = ended.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(req.prompt_token_ids), 0)


def expected(req: GenerationRequest, choice: int, max_len: int, root: str = "") -> tuple[list[int], str]:
    """The oracle: output tokens (after the resumed ones) and finish reason of one choice, computed alone.

    max_len: the most tokens that prompt and output may have together (context, and KV slots + 1).
    """
    params = req.sampling
    stops = {*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids}
    sampling = RowSampling(
        temperature=1.0, seed=params.seed, choice=choice, min_tokens=params.min_tokens, stop_token_ids=tuple(stops)
    )
    resumed = req.resume_token_ids[choice] if req.resume_token_ids else []
    tokens, prompt_len = [*req.prompt_token_ids, *resumed], len(req.prompt_token_ids)
    most = min(prompt_len + params.max_tokens, max_len)
    reason = "stop" if resumed and resumed[-1] in stops and len(resumed) >= params.min_tokens else "length"
    while len(tokens) < most and (reason == "length"):
        token = fake_token(sampling, chain_of(root, tokens)[-1], len(tokens), len(tokens) - prompt_len, VOCAB)
        tokens.append(token)
        if token in stops and len(tokens) - prompt_len >= params.min_tokens:
            reason = "stop"
    return tokens[prompt_len + len(resumed) :], reason


def assert_as_expected(h: Harness, *requests: GenerationRequest, root: str = "") -> None:
    """Every choice of these finished requests has the oracle's tokens, reason and bill."""
    max_len = h.engine.max_len
    for req in requests:
        of_row = root if req.adapter is None else f"{root}{req.adapter.digest}"
        ended = h.sink.ends[req.request_id]
        positions = []
        for choice in range(req.sampling.n):
            tokens, reason = expected(req, choice, max_len, of_row)
            assert h.sink.tokens.get((req.request_id, choice), []) == tokens, (
                f"{req.request_id}[{choice}]: wrong tokens"
            )
            assert ended.finish_reasons[choice] == h.sink.reasons[req.request_id, choice] == reason
            positions.append(len(tokens) + (len(req.resume_token_ids[choice]) if req.resume_token_ids else 0))
        assert ended.positions == positions
        assert ended.usage.prompt_tokens == len(req.prompt_token_ids)
        assert ended.usage.completion_tokens == sum(positions)
