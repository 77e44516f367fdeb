"""KV-02 at length: thousands of requests of eight clients over tiny tiers, with late and failing copies. make chaos."""

import random

import pytest
from builders import assert_as_expected, harness, request
from fake_tiers import TierPlan, sometimes, up_to

from tandem.workers.messages.request import Abort, GenerationRequest

pytestmark = pytest.mark.chaos

MODES = [
    {"asynchronous": False},
    {"asynchronous": True},
    {"stages": 2},
    {"stages": 4},
    {"drafts": 4, "asynchronous": True},
    {"windows": (None, 9, 9), "asynchronous": True, "num_blocks": 96},
    {"windows": (13,), "drafts": 4, "asynchronous": True},
    {"windows": (None, 6), "stages": 2, "num_blocks": 64, "drafts": 3},
]


@pytest.mark.parametrize(
    "mode", MODES, ids=["depth1", "async", "pp2", "pp4", "drafts", "groups", "window", "groups-pp2"]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_kv_02_eight_clients_thrash_tiny_tiers(mode, num_ranks, seed):
    """Each client talks on: its next turn is all that was said. Some give up; what is left equals the oracle."""
    rng = random.Random(seed)
    plan = TierPlan(
        host_slots=rng.choice([6, 20, 60]),
        disk_keys=rng.choice([0, 30, 400]),
        num_ranks=num_ranks,
        policy=rng.choice(["lru", "cost"]),
        delay=up_to(rng, 4),
        fails=sometimes(rng, rng.choice([5, 40])),
    )
    h = harness(**{"num_blocks": 32, **mode}, max_num_seqs=8, tiers=plan, patience=80, stalls=rng.randint(0, 1))
    talks: list[list[int]] = [[] for _ in range(8)]
    running: dict[int, GenerationRequest] = {}
    finished = number = 0
    while finished < 1000:
        for client in range(8):
            if client not in running:
                if len(talks[client]) > 70:
                    talks[client] = [] if rng.random() < 0.5 else talks[client][:24]
                prompt = [*talks[client], *(rng.randrange(2, 90) for _ in range(rng.randint(1, 9)))]
                running[client] = request(f"c{client}-{number}", prompt, rng.randint(1, 14))
                number += 1
                h.add(running[client])
        h.step()
        for client, req in list(running.items()):
            if rng.randrange(400) == 0 and req.request_id not in h.sink.ends:
                h.engine.abort(Abort(request_id=req.request_id, attempt=0))
            ended = h.sink.ends.get(req.request_id)
            if ended is not None:
                del running[client]
                finished += 1
                if ended.finish_reasons != ["abort"]:
                    assert_as_expected(h, req)
                    talks[client] = req.prompt_token_ids + h.sink.tokens[req.request_id, 0]
    h.run(100_000)
    kinds = h.tiers.kinds()
    assert kinds["store"] and (kinds["load"] or plan.host_slots < 20), kinds
