"""Copy or compute: unknown counts as copy, measured speeds decide, and one odd sample does not turn it over."""

import pytest

from tandem.workers.engine.transfers.copy_costs import CopyCosts

BLOCK_BYTES = 1e6


def measured(token_s: float, block_s: float) -> CopyCosts:
    costs = CopyCosts(BLOCK_BYTES)
    for _ in range(60):
        costs.observe_step(100, 0, 100 * token_s)
        costs.observe_copy("load", 8, 8 * block_s, 8 * block_s + 1e-4)
    return costs


def test_before_anything_is_measured_copying_is_cheaper():
    costs = CopyCosts(BLOCK_BYTES)
    assert costs.copy_s("load", 1000) < costs.recompute_s(1)
    assert costs.copy_s("load", 0) == 0.0


def test_measured_speeds_decide():
    slow_model, fast_model = measured(1e-3, 1e-3), measured(1e-6, 1e-3)
    assert slow_model.copy_s("load", 10) < slow_model.recompute_s(160)
    assert fast_model.copy_s("load", 10) > fast_model.recompute_s(160)
    assert slow_model.copy_s("load", 10) == pytest.approx(10e-3 + 1e-4, rel=0.01)
    assert slow_model.recompute_s(160) == pytest.approx(0.16, rel=0.01)


def test_decodes_beside_a_prefill_are_not_charged_to_it():
    costs = CopyCosts(BLOCK_BYTES)
    for _ in range(60):
        costs.observe_step(0, 8, 0.010)
        costs.observe_step(100, 8, 0.030)
    assert costs.recompute_s(100) == pytest.approx(0.020, rel=0.05)


def test_short_prefills_and_steps_without_time_do_not_count():
    costs = CopyCosts(BLOCK_BYTES)
    costs.observe_step(5, 0, 1.0)
    costs.observe_step(500, 0, 0.0)
    assert costs.recompute_s(1) == float("inf")


def test_kinds_are_kept_apart_and_an_odd_sample_passes():
    costs = measured(1e-3, 1e-3)
    before = costs.copy_s("load", 10)
    for _ in range(20):
        costs.observe_copy("fetch", 1, 5.0, 6.0)
    assert costs.copy_s("load", 10) == before
    costs.observe_copy("load", 8, 0.8, 0.9)
    assert costs.copy_s("load", 10) > before
    for _ in range(30):
        costs.observe_copy("load", 8, 8e-3, 8.1e-3)
    assert costs.copy_s("load", 10) == pytest.approx(before, rel=0.05)


def test_steps_that_ran_meanwhile_are_not_part_of_the_latency() -> None:
    costs = measured(1e-4, 1e-4)
    before_s = costs.copy_s("load", 10)
    for _ in range(30):
        costs.observe_copy("load", 10, 1e-3, 0.5, beside_steps=True)
    assert costs.copy_s("load", 10) <= before_s
    assert costs.copy_s("load", 7) < costs.recompute_s(112), "a busy engine still copies"


def test_the_share_of_a_copy_is_known_once_both_were_measured():
    costs = CopyCosts(BLOCK_BYTES)
    assert costs.copy_share(16) is None
    costs.observe_step(100, 0, 0.1)
    assert costs.copy_share(16) is None, "no load was seen yet"
    costs.observe_copy("store", 8, 8e-3, 8e-3)
    assert costs.copy_share(16) is None
    assert measured(1e-3, 1.6e-3).copy_share(16) == pytest.approx(0.1, rel=0.01)
    assert measured(1e-6, 1.6e-3).copy_share(16) > 1
