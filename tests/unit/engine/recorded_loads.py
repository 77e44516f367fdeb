"""Random loads for recorded engines: everything that an engine can be told, in one mixture."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from builders import EOS, Harness, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan, up_to

from tandem.workers.engine.recording.call_records import CallRecord
from tandem.workers.engine.recording.recorded_engine import RecordedEngine, recorded_engine
from tandem.workers.engine.recording.tape import Tape, TapeCopy
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import IDLE_PRIORITY, Abort, AdapterRef
from tandem.workers.messages.transfer import Failure

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"asynchronous": True, "drafts": 3, "max_itl_ms": 15},
    "stages": {"stages": 3, "drafts": 2, "experts": ({0: [3, 4]}, {}, {1: [5, 6]})},
    "windows": {"windows": (None, 9), "num_blocks": 60, "asynchronous": True},
    "batches": {"batching_policy": "dynamic", "batching_max_delay_ms": 40},
}


def recorded_harness(rng: random.Random, tape: Tape, mode: dict[str, Any]) -> Harness:
    """An engine on this tape, over few blocks, rows and pages of adapters, with tiers below; ranks that are late, fail
    and lack memory now and then."""

    def build(*parts: Any) -> RecordedEngine:
        return recorded_engine(*parts, tape)

    adapters = AdapterPlan(num_pages=6, max_loras=2, max_cpu_loras=4, delay=lambda move, rank: rng.choice([0, 0, 2]))
    tiers = TierPlan(host_slots=30, disk_keys=40, policy=rng.choice(["lru", "cost"]), delay=up_to(rng, 3))
    given = {"num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 6, "max_num_queued_reqs": 30, **mode}
    h = harness(
        **given,
        adapters=adapters,
        tiers=tiers,
        patience=400,
        build=build,
        room=lambda step: 5 if step % 23 == 0 else 99,
        device_s=lambda plan: 0.001 * len(plan.work) + rng.random() * 0.01,
    )
    h.executor.grammars.delay = lambda text: rng.choice([0, 3])
    h.executor.grammars.refuses = lambda text: Failure("content", f"{text} is wrong") if text == "wrong" else None
    return h


def load(h: Harness, rng: random.Random, num_requests: int) -> None:
    """Requests of all kinds, aborts and news from the cluster, with steps between; then until all have ended."""
    text, live = [rng.randrange(2, 90) for _ in range(40)], list[str]()
    news: list[Callable[[], object]] = [
        lambda: h.engine.set_weights({"t0": rng.choice([0.5, 2.0])}),
        h.engine.drain_charges,
        lambda: h.engine.merge_remote_charges({"t1": rng.random() * 500, "t3": 70.0}),
        lambda: h.engine.set_pinned_adapters(frozenset(_ref(i) for i in rng.sample(range(5), 2))),
        h.engine.reset_prefix_cache,
        lambda: h.engine.abort(Abort(request_id=rng.choice(live), attempt=0, choice=rng.choice([None, 0]))),
        lambda: h.engine.abort(Abort(request_id=rng.choice(live), attempt=0, keep_positions=rng.randrange(4))),
        lambda: h.engine.stats(),
    ]
    for i in range(num_requests):
        live.append(f"r{i}")
        with suppress(RequestRefused):
            h.add(_request(live[-1], rng, text))
        for _ in range(rng.randrange(6)):
            h.step()
        if rng.randrange(3) == 0:
            rng.choice(news)()
    h.run(50_000)


def _ref(number: int) -> AdapterRef:
    return AdapterRef(name=f"a{number}", digest=f"a{number}", source=f"s3://a{number}:password@host/a{number}")


def _request(name: str, rng: random.Random, text: list[int]) -> Any:
    n = rng.choice([1, 1, 1, 3])
    prompt = [*text[: rng.choice([0, 17, 40])], *(rng.randrange(2, 90) for _ in range(rng.randint(1, 20)))]
    resumed = [[rng.randrange(2, 90) for _ in range(rng.randint(1, 9))] for _ in range(n)]
    made = request(
        name,
        prompt,
        rng.randint(1, 24),
        n=n,
        tenant=f"t{rng.randrange(3)}",
        priority=rng.choice([0, 0, 1, IDLE_PRIORITY]),
        salt=rng.choice(["", "pepper"]),
        deadline_s=rng.choice([None, None, 0.2]),
        resume=resumed if rng.randrange(5) == 0 else None,
        suspect=rng.randrange(12) == 0,
        ignore_eos=rng.choice([True, False]),
        stop_token_ids=rng.choice([(), (rng.randrange(2, 20), 33, 34, 35), (EOS,)]),
        min_tokens=rng.choice([0, 1]),
        grammar=rng.choice([None, None, None, None, "sober", "strict", "wrong"]),
        logit_bias=rng.choice([(), ((5, 1.0),)]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    return msgspec.structs.replace(made, adapter=rng.choice([None, None, *map(_ref, range(5))]))


def calls_of_copy(copy: TapeCopy) -> list[CallRecord]:
    """The calls of a tape's copy, decoded."""
    decode = msgspec.msgpack.Decoder(CallRecord).decode
    return [decode(call) for call in copy.calls]
