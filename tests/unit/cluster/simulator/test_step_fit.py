"""The times of steps: planted ones are found again, in samples and in logs that simulated groups have written, and what
says nothing is refused by name."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from simulated_setups import TIMES, kind, load, setup

from tandem.cluster.simulator.simulation import Simulation
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts, read_step_times, write_step_times
from tandem.cluster.simulator.steps.step_fit import fit, fit_logs, timed_steps
from tandem.cluster.simulator.steps.step_work import PlanWork, WorkCounter
from tandem.configs.errors import SettingsError
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan


def test_planted_times_are_found_again() -> None:
    draw = random.Random(1)
    samples = []
    for _ in range(400):
        work = PlanWork(draw.randrange(30), draw.choice([0, 0, draw.randrange(2048)]), draw.randrange(60_000))
        others = draw.choice([0.0, 1.0, 2.5])
        samples.append((work, others, TIMES.seconds(work, others) * draw.uniform(0.98, 1.02)))
    found = fit(samples)
    assert found.num_steps == 400 and 0.0 < found.error < 0.03
    for part in ("alone", "beside"):
        for name in ("step_s", "decode_s", "prefill_token_s", "context_token_s"):
            planted, seen = (getattr(getattr(times, part), name) for times in (TIMES, found))
            assert seen == pytest.approx(planted, rel=0.25), (part, name)


def test_two_logs_in_one_file_are_refused(tmp_path: Path) -> None:
    """Their steps count from 1 again: rows of the first would be taken for the second's."""
    plans = [StepPlan(step_id=step, work=[]) for step in (1, 2, 1)]
    (tmp_path / "two.jsonl").write_bytes(b"".join(msgspec.json.encode(plan) + b"\n" for plan in plans))
    with pytest.raises(SettingsError, match=r"two\.jsonl is not the step log of one group: step 1 .* after step 2"):
        timed_steps(tmp_path / "two.jsonl")


def test_the_work_of_a_plan_is_counted_as_ranks_see_it() -> None:
    """Row 0 has a prompt of 5 in two chunks, then decodes; row 1 comes with 16 of its 20 tokens in a cache, and is
    taken back once."""
    sampling = RowSampling(temperature=0.0)

    def bound(row: int, tokens: int, computed: int) -> RowInit:
        return RowInit(row=row, token_ids=[7] * tokens, prompt_len=tokens, num_computed=computed, sampling=sampling)

    def plan(*work: tuple[int, int], new: Sequence[RowInit] = (), back: tuple[int, int, int] | None = None) -> StepPlan:
        rows = [RowWork(row=row, num_tokens=count, samples=True) for row, count in work]
        return StepPlan(step_id=1, work=rows, new_rows=list(new), rolled_back=[] if back is None else [back])

    counter = WorkCounter()
    plans = [
        plan((0, 3), new=[bound(0, 5, 0)]),
        plan((0, 2), (1, 4), new=[bound(1, 20, 16)]),
        plan((0, 1), (1, 1)),
        plan((0, 1), (1, 1), back=(1, 21, 20)),
    ]
    assert [counter.count(one) for one in plans] == [
        PlanWork(0, 3, 0),
        PlanWork(0, 6, 3 + 16),
        PlanWork(2, 0, 5 + 20),
        PlanWork(2, 0, 6 + 20),
    ]


def test_no_time_is_negative() -> None:
    """Where steps get faster with more context, as chance may have it, context costs nothing."""
    samples = [(PlanWork(k % 7, 0, 100 * k), 0.0, 0.02 + 0.001 * (k % 7) - 1e-6 * k) for k in range(100)]
    found = fit(samples)
    assert found.alone.context_token_s == 0.0
    assert found.alone.decode_s == pytest.approx(0.001, rel=0.1)
    assert found.beside == WorkCosts()


def test_a_simulated_group_writes_the_log_that_its_times_are_found_in(tmp_path: Path) -> None:
    """Through the real StepLog: what the engine's clock says of each step."""
    log, alone = tmp_path / "steps.jsonl", FittedTimes(alone=TIMES.alone)
    of = setup(kind=kind(step_log=str(log)), groups=1, times=alone, load=load(count=80, rate=3.0))
    Simulation(of).run()
    found = fit_logs([log])
    assert found.error < 0.01
    for name in ("step_s", "decode_s", "prefill_token_s"):
        assert getattr(found.alone, name) == pytest.approx(getattr(alone.alone, name), rel=0.1), name


def test_a_log_without_times_says_so(tmp_path: Path) -> None:
    log = tmp_path / "old.jsonl"
    log.write_bytes(b"".join(b'["step",%d,[[0,3,true]],[[0,[5,6,7],3,0,[1.0]]]]\n' % step for step in (1, 2)))
    assert timed_steps(log) == []
    with pytest.raises(SettingsError, match=r"--step-log: .*old.jsonl: 0 steps with times; at least 50"):
        fit_logs([log])


@pytest.mark.parametrize("text", [b'{"no": "log"}\n', b'["times",7,0.0,1.0,1.0]\n', b"words\n"])
def test_what_is_no_step_log_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    log = tmp_path / "other.txt"
    log.write_bytes(text)
    with pytest.raises(SettingsError, match=r"--step-log: .*other.txt is not the step log of one group"):
        fit_logs([log])
    with pytest.raises(SettingsError, match=r"--step-log: .*nowhere cannot be read"):
        fit_logs([tmp_path / "nowhere"])


def test_times_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_step_times(TIMES, file)
    assert read_step_times(file) == TIMES
    for times, words in (
        ({"alone": {"step_s": -1.0}}, "step_s -1 must be from 0"),
        ({"alone": {"fast_s": 1.0}}, "fast_s"),
        ({}, "alone"),
    ):
        file.write_bytes(msgspec.json.encode(times))
        with pytest.raises(SettingsError, match=words) as refused:
            read_step_times(file)
        assert refused.value.flag == "--step-times" and "times.json" in str(refused.value)
    with pytest.raises(SettingsError, match="cannot be written"):
        write_step_times(TIMES, tmp_path / "no" / "folder")
