"""Loads of experts: when the engine asks for them, and that the answers of all stages make its statistics."""

import math

import pytest
from builders import harness, request

from tandem.workers.engine.base.expert_reports import PERIOD_S, ExpertStats

LOADS = ({1: [30, 10, 0, 0], 2: [4, 4, 4, 4]}, {4: [0, 8, 0, 0]})


@pytest.mark.parametrize("experts", [LOADS, LOADS[::-1]])
def test_stages_are_asked_once_a_period_while_there_are_steps_and_once_behind_the_last(
    experts: tuple[dict[int, list[int]], ...],
) -> None:
    h = harness(stages=2, experts=experts, patience=4)
    assert h.engine.idle_s == math.inf and h.engine.stats().experts is None
    h.add(request("a", 3, 4))
    h.step()
    assert h.executor.num_counts == 1 and h.engine.stats().experts is None, "one stage has not answered"
    h.run()
    found = h.engine.stats().experts
    assert found == ExpertStats([34, 22, 4, 4], {1: 3.0, 2: 1.0, 4: 4.0})
    assert list(found.imbalance) == [1, 2, 4]
    assert h.executor.num_counts == 1 and 0 < h.engine.idle_s < PERIOD_S
    h.clock.now_s += h.engine.idle_s
    assert h.engine.idle_s == pytest.approx(0.0)
    h.step()
    assert h.executor.num_counts == 2 and h.engine.is_copying, "until they have answered it is turned again"
    h.drain_transfers()
    assert h.engine.idle_s == math.inf and not h.engine.turn(0.0) and h.executor.num_counts == 2
    h.add(request("b", 3, 4))
    h.clock.now_s += PERIOD_S
    h.step()
    assert h.executor.num_counts == 3


def test_ranks_of_a_model_without_experts_are_not_asked() -> None:
    h = harness()
    h.add(request("a", 3, 4))
    h.run()
    assert h.executor.num_counts == 0 and h.engine.idle_s == math.inf and h.engine.stats().experts is None
