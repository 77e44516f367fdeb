"""The simulator as a whole: the same seed gives the same run, every request ends once with all its tokens, whatever is
lost meanwhile, and time goes by as the steps say."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_setups import kind, load, setup

from tandem.cluster.simulator.loads import LOADS, SimulatedRequest, answer, piece_of, tokens
from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulated_group import SimulatedGroup
from tandem.cluster.simulator.simulation import LATENCY_S, SimulatedRun, Simulation
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts

HERE = "tests.unit.cluster.simulator.simulated_setups"


class Watched(Simulation):
    """A simulation that notes each request's end and its number of tokens."""

    def __init__(self, of: Setup) -> None:
        super().__init__(of)
        self.ends: Counter[str] = Counter()
        self.num_tokens: dict[str, int] = {}
        for gateway in self.gateways:
            over = gateway._over

            def noted(live: Any, why: str, over: Any = over) -> None:
                self.ends[live.request.request_id] += 1
                self.num_tokens[live.request.request_id] = live.times.num_tokens
                over(live, why)

            gateway._over = noted  # type: ignore[method-assign]


def run(**changes: Any) -> SimulatedRun:
    return Simulation(setup(**changes)).run()


def test_one_seed_prints_the_same_in_every_process() -> None:
    """Hashes of strings and addresses of objects differ between processes, so no order may depend on them."""
    code = (
        f"import msgspec; from {HERE} import *; from tandem.cluster.simulator.simulation import Simulation\n"
        "of = setup(load=load('adapters', 150, 12.0), deaths=2, gateways=2)\n"
        "print(msgspec.json.encode(Simulation(of).run()).decode())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    here = msgspec.json.encode(run(load=load("adapters", 150, 12.0), deaths=2, gateways=2)) + b"\n"
    assert said == {here}


def test_another_seed_is_another_run() -> None:
    assert run(seed=1, deaths=1).figures != run(seed=2, deaths=1).figures


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(sorted(LOADS)),
    seed=st.integers(0, 1000),
    groups=st.integers(1, 4),
    deaths=st.integers(0, 3),
    blocks=st.sampled_from([400, 1000]),
    host_slots=st.sampled_from([0, 300]),
    queued=st.sampled_from([2, 1024]),
    gateways=st.integers(1, 2),
)
def test_every_request_ends_once_with_all_its_tokens(
    name: str, seed: int, groups: int, deaths: int, blocks: int, host_slots: int, queued: int, gateways: int
) -> None:
    requests = load(name, 20, 6.0, seed)
    of = setup(
        kind=kind(blocks=blocks, host_slots=host_slots, max_num_queued_reqs=queued),
        load=requests, groups=groups, deaths=deaths, seed=seed, gateways=gateways, load_s=5.0,
    )  # fmt: skip
    watched = Watched(of)
    made = watched.run()
    assert watched.ends == Counter(f"request-{one.seed}" for one in requests)
    assert sum(made.ends.values()) == len(requests)
    refused = sum(count for why, count in made.ends.items() if why not in ("stop", "length"))
    assert set(made.ends) <= {"stop", "length", "slow_down", "service_unavailable", "request_poisoned"}
    short = [one for one in requests if watched.num_tokens[f"request-{one.seed}"] != one.output_len]
    assert len(short) == refused, "a served request has exactly the tokens of its answer"
    for group in watched.fleet.groups():
        assert not group.num_requests
        group.engine.scheduler.check_invariants()


def test_requests_of_a_lost_group_move_and_end() -> None:
    calm, torn = run(load=load(count=120, rate=12.0)), run(load=load(count=120, rate=12.0), deaths=2, load_s=5.0)
    assert calm.figures["moved"] == 0 and torn.figures["moved"] > 0
    assert torn.ends == calm.ends == {"stop": 120}
    assert torn.figures["output_tokens_per_s"] * torn.figures["duration_s"] == pytest.approx(
        calm.figures["output_tokens_per_s"] * calm.figures["duration_s"]
    )


def test_the_only_group_is_lost_and_requests_wait_for_the_next() -> None:
    torn = run(groups=1, load=load(count=30), deaths=1, load_s=20.0)
    assert torn.ends == {"stop": 30}
    assert torn.figures["ttft_p99_s"] > 10.0


def test_a_loss_while_no_group_serves_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    die = SimulatedGroup.die
    monkeypatch.setattr(SimulatedGroup, "die", lambda group, why: (lost.append(why), die(group, why))[1])
    torn = run(groups=1, load=load(count=30), deaths=3, load_s=2.0)
    assert torn.ends == {"stop": 30} and len(lost) == 3


def test_a_lone_request_takes_what_its_steps_take() -> None:
    times = FittedTimes(alone=WorkCosts(step_s=0.5, prefill_token_s=0.001))
    one = SimulatedRequest(1.0, (piece_of("x", 700),), output_len=5, max_tokens=9, seed=0)
    made = run(times=times, load=[one], groups=1)
    prompt_s = 2 * 0.5 + 0.001 * 700  # 512 tokens and the rest
    assert made.figures["ttft_p50_s"] == pytest.approx(prompt_s + LATENCY_S)
    assert made.figures["tpot_p50_s"] == pytest.approx(0.5)
    assert made.figures["itl_p99_s"] == pytest.approx(0.5, abs=1e-4)
    assert made.figures["duration_s"] == pytest.approx(1.0 + LATENCY_S - 0.001 + prompt_s + 4 * 0.5)


def test_groups_of_one_node_slow_each_other_down() -> None:
    crowd = load("uniform", 40, 20.0)
    apart, together = run(load=crowd), run(load=crowd, groups_per_node=2)
    assert together.figures["tpot_p50_s"] > 1.1 * apart.figures["tpot_p50_s"]


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    """Turn two has the prompt, the answer and a question: all full blocks before the question are found."""
    first = SimulatedRequest(0.0, (piece_of("a", 160),), output_len=65, max_tokens=65, seed=3)
    second = first._replace(at_s=20.0, pieces=(*first.pieces, *answer(3, 65), piece_of("b", 16)), seed=4)
    assert len(tokens(second.pieces)) == 160 + 65 + 16
    made = run(load=[first, second], groups=1)
    assert made.figures["hit_rate"] == pytest.approx((160 + 64) / (160 + 241))


def test_joint_routing_sends_the_next_turn_where_its_kv_is() -> None:
    """Through the groups' own KV events, which gateways index; what these predict is what the groups find."""
    talks = load("conversations", 100, 4.0)
    joint, least = (run(load=talks, groups=4, policy=name) for name in ("joint", "least-tokens"))
    assert joint.figures["hit_rate"] > 1.5 * least.figures["hit_rate"]
    assert joint.figures["right_predictions"] >= 0.95
    deaf = run(load=talks, groups=4, kind=kind(kv_events=False))
    assert deaf.figures["hit_rate"] < joint.figures["hit_rate"], "without the events a session's home is all there is"


def test_more_groups_serve_more() -> None:
    crowd = load(count=200, rate=20.0)
    few, many = run(load=crowd, groups=1), run(load=crowd, groups=4)
    assert few.figures["ttft_p99_s"] > 2 * many.figures["ttft_p99_s"]
    assert few.figures["goodput"] < many.figures["goodput"]
    assert many.figures["group_hours"] > few.figures["group_hours"]
