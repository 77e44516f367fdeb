"""Adapters beyond --max-loras that have rows take turns in steps: none of them stands still for long."""

import pytest
from builders import Harness, assert_as_expected, request
from test_adapters_engine import step_until, with_adapters
from test_engine_outputs import MODES

from tandem.workers.engine.base.sequence import SequenceStatus


def on_device(*adapters: str, **options: object) -> Harness:
    """An engine whose steps have one adapter, and which has these on the device."""
    h = with_adapters(**{"max_loras": 1, "num_pages": 40, "max_cpu_loras": 64, "num_blocks": 400, **options})
    for name in adapters:
        h.add(request(f"bring-{name}", 4, 1, adapter=name))
        h.run()
    return h


def longest_gap(h: Harness, name: str, most_steps: int, each_step: object = None) -> int:
    """The most steps between two tokens of a request, until it ends."""
    gap = longest = 0
    for _ in range(most_steps):
        if name in h.sink.ends:
            break
        before = len(h.sink.tokens.get((name, 0), ()))
        if callable(each_step):
            each_step()
        h.step()
        gap = gap + 1 if len(h.sink.tokens.get((name, 0), ())) == before else 0
        longest = max(longest, gap)
    return longest


@pytest.mark.parametrize("mode", MODES)
def test_who_runs_goes_on_while_the_first_in_the_queue_finds_no_blocks(mode):
    """The other's prompt needs more blocks than are left."""
    h = on_device("a", "b", num_blocks=20, **mode)
    first, second = request("a", 40, 30, adapter="a"), request("b", 50, 4, adapter="b")
    h.add(first)
    step_until(h, "a", SequenceStatus.RUNNING)
    h.add(second)
    assert longest_gap(h, "a", 300) <= 4
    h.run()
    assert_as_expected(h, first, second)


def test_who_runs_goes_on_while_a_long_prompt_takes_all_tokens():
    h = on_device("a", "b", max_model_len=1200)
    h.add(request("a", 4, 60, adapter="a"))
    step_until(h, "a", SequenceStatus.RUNNING)
    h.add(request("base", 1000, 4))
    h.step()
    h.add(request("b", 4, 4, adapter="b"))
    assert longest_gap(h, "a", 300) <= 3
    h.run()


def test_who_runs_goes_on_beside_many_that_need_one_step():
    others = [f"x{i}" for i in range(10)]
    h, names = on_device("a", *others), iter(range(1000))
    h.add(request("a", 4, 60, adapter="a"))
    step_until(h, "a", SequenceStatus.RUNNING)

    def another_comes() -> None:
        name = next(names)
        h.add(request(f"r{name}", 4, 1, adapter=others[name % 10]))

    assert longest_gap(h, "a", 300, another_comes) <= 3
    h.run()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_when_those_whose_turn_it_is_have_no_work_others_have_the_step(stages):
    """The last token of the one is still in the pipeline; the other's has come."""
    h = on_device("a", "b", stages=stages)
    h.add(*(request(name, 4, 40, adapter=name) for name in "ab"))
    turns = in_flight = 0
    while h.engine.has_work():
        h.step()
        turns += 1
        in_flight += 1 + h.engine.stats().in_flight_steps
    assert in_flight / turns > 1.9, "a step of each"
    h.run()
