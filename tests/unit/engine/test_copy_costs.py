"""When a copy counts as cheaper than computing again."""

from workers.engine.copy_costs import CopyCosts


def measured(*, token_s: float) -> CopyCosts:
    costs = CopyCosts(block_bytes=1.0)
    costs.observe_step(100, 0, 100 * token_s)
    return costs


def test_until_prompt_speed_is_known_every_copy_is_worth_it():
    assert CopyCosts(block_bytes=1.0).copy_s("load", 1000) < CopyCosts(block_bytes=1.0).recompute_s(1)


def test_a_slow_way_makes_short_copies_lose_and_long_ones_win():
    costs = measured(token_s=1e-4)
    for _ in range(30):
        costs.observe_copy("load", 10, 0.001, 0.011, beside_steps=False)
    assert costs.copy_s("load", 1) > costs.recompute_s(16)
    assert costs.copy_s("load", 64) < costs.recompute_s(1024)


def test_steps_that_ran_meanwhile_are_not_part_of_the_way():
    costs = measured(token_s=1e-4)
    before_s = costs.copy_s("load", 10)
    for _ in range(30):
        costs.observe_copy("load", 10, 0.001, 0.5, beside_steps=True)
    assert costs.copy_s("load", 10) <= before_s
    assert costs.copy_s("load", 7) < costs.recompute_s(112), "a busy engine still copies"
