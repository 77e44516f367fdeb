"""TN-03 at length: thousands of requests over 500 adapters, Zipf, with room for a few, ranks that are late and refuse,
clients that give up, preemption and KV below the device. make chaos."""

import random
from contextlib import suppress

import pytest
from builders import assert_as_expected, harness, request
from fake_adapters import AdapterOp, AdapterPlan, kind_of
from fake_tiers import TierPlan, up_to

from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import Abort, GenerationRequest

pytestmark = pytest.mark.chaos

MODES = [
    {"asynchronous": False},
    {"asynchronous": True},
    {"stages": 2},
    {"stages": 4},
    {"drafts": 4, "asynchronous": True},
]
ADAPTERS = 500


@pytest.mark.parametrize("mode", MODES, ids=["depth1", "async", "pp2", "pp4", "drafts"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_tn_03_five_hundred_adapters_of_three_tenants(mode, num_ranks, seed):
    rng = random.Random(seed)
    late: dict[tuple[int, int], int] = {}
    moods: dict[tuple[str, int], bool] = {}

    def delay(move: AdapterOp, rank: int) -> int:
        return late.setdefault((move.ticket, rank), rng.choice([0, 0, 1, 3]))

    def refuses(move: AdapterOp, rank: int) -> str | None:
        bad = moods.setdefault((move.adapter.digest, rank), rng.randrange(40) == 0)
        return "not today" if bad and kind_of(move) == "fetch" else None

    plan = AdapterPlan(
        num_pages=12,
        num_ranks=num_ranks,
        max_loras=4,
        max_cpu_loras=12,
        pages=lambda digest, rank: 1 + len(digest) % 3,
        refuses=refuses,
        delay=delay,
    )
    tiers = TierPlan(host_slots=30, num_ranks=num_ranks, delay=up_to(rng, 3))
    h = harness(
        **mode, num_blocks=20, max_num_seqs=8, max_num_queued_reqs=1000, patience=300, adapters=plan, tiers=tiers
    )
    weights = [1 / (i + 1) for i in range(ADAPTERS)]
    accepted: list[GenerationRequest] = []
    for i in range(1500):
        adapter = rng.choice([None, f"a{rng.choices(range(ADAPTERS), weights)[0]}"])
        prompt = [2 + 7 * j % 90 for j in range(rng.randint(1, 24))]
        req = request(
            f"r{i}", prompt, rng.randint(1, 30), adapter=adapter, tenant="tuv"[i % 3], n=rng.choice([1, 1, 2])
        )
        with suppress(RequestRefused):  # its adapter was refused lately
            h.add(req)
            accepted.append(req)
        for _ in range(rng.randrange(12)):
            h.step()
        if rng.randrange(10) == 0:
            h.engine.abort(Abort(request_id=rng.choice(accepted).request_id, attempt=0))
    h.run(100_000)
    served = [req for req in accepted if h.sink.ends[req.request_id].refused is None]
    whole = [req for req in served if "abort" not in h.sink.ends[req.request_id].finish_reasons]
    assert_as_expected(h, *whole)
    stats = h.engine.stats()
    assert len(whole) > 1000 and stats.adapters is not None and stats.adapters.evictions > 100
    assert stats.preemptions > 0 and stats.rejected["adapter"] > 0
