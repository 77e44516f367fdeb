"""Shares and first tokens of tenants, over weights, lengths, adapters and KV pressure; in one group and in two."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tenant_steps import Outcome, Room, SharedEngine, Tenant, describe, measure, measure_groups

STEPS = 1500
FLOOD = Tenant("flood", 100, tokens=(60, 180))


def assert_fair(outcome: Outcome, within: float) -> None:
    told = "\n".join(describe(outcome))
    assert min(share.of_claim for share in outcome.shares) >= 1 - within, told
    assert max(share.wait for share in outcome.shares) <= 5, told
    assert outcome.for_tenants <= 0.03, told


@pytest.mark.parametrize("pause", [0, 2, 10, 30])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tenant_that_asks_for_half_of_the_rows_has_them(pause: int, asynchronous: bool) -> None:
    """What was found: 31 of 100 tokens, and up to 121 steps to a first token."""
    tenants = [Tenant("calm", 8, pause), Tenant("flood", 120, 0)]
    assert_fair(measure(tenants, Room(asynchronous=asynchronous), steps=STEPS), 0.03)


def test_all_of_many_tenants_come_at_once() -> None:
    tenants = [Tenant(f"t{number}", 1, 7, tokens=(33, 33)) for number in range(15)]
    assert_fair(measure([*tenants, FLOOD], steps=STEPS), 0.03)


def test_tenants_come_and_go() -> None:
    tenants = [Tenant("calm", 5, there=(1, 3)), Tenant("other", 40, there=(2, 3), tokens=(60, 180)), FLOOD]
    outcome = measure(tenants, phases=4, steps=STEPS)
    assert min(share.of_claim for share in outcome.shares) >= 0.97, "\n".join(describe(outcome))
    assert outcome.shares[0].wait <= 5


@settings(max_examples=6, deadline=None)
@given(draw=st.data())
def test_shares_and_first_tokens(draw: st.DataObject) -> None:
    """Any calm tenants beside a flood: each has the lesser of what it asks and its share."""
    tenants = [FLOOD]
    for number in range(draw.draw(st.integers(1, 3))):
        shortest = draw.draw(st.sampled_from([30, 60, 120]))
        tenants.append(
            Tenant(
                f"calm{number}",
                clients=draw.draw(st.integers(1, 6)),
                pause=draw.draw(st.integers(0, 40)),
                prompt=draw.draw(st.sampled_from([8, 8, 60, 200])),
                tokens=(shortest, draw.draw(st.sampled_from([shortest, 2 * shortest]))),
                weight=draw.draw(st.sampled_from([0.5, 1.0, 1.0, 4.0])),
                adapters=draw.draw(st.sampled_from([0, 0, 2])),
            )
        )
    room = Room(asynchronous=draw.draw(st.booleans()), caching=draw.draw(st.booleans()))
    assert_fair(measure(tenants, room, steps=STEPS), 0.03)


@settings(max_examples=4, deadline=None)
@given(draw=st.data())
def test_shares_and_first_tokens_where_blocks_are_scarce(draw: st.DataObject) -> None:
    """Half to three quarters of the blocks that the rows come to hold."""
    prompt = draw.draw(st.sampled_from([8, 60]))
    calm = Tenant(
        "calm",
        clients=draw.draw(st.integers(1, 4)),
        pause=draw.draw(st.integers(0, 20)),
        prompt=prompt,
        tokens=(60, draw.draw(st.sampled_from([60, 120]))),
        weight=draw.draw(st.sampled_from([1.0, 2.0])),
    )
    flood = Tenant("flood", 100, prompt=draw.draw(st.sampled_from([8, 100])), tokens=(60, 180))
    outcome = measure([calm, flood], Room(blocks=draw.draw(st.integers(90, 140))), steps=STEPS)
    told = "\n".join(describe(outcome))
    assert min(share.of_claim for share in outcome.shares) >= 0.95, told
    assert outcome.shares[0].wait <= 5, told


def test_shares_are_those_of_both_groups() -> None:
    """By what each is told of the other a second later."""
    calm, flood = Tenant("calm", 8), Tenant("flood", 120, 0)
    assert_fair(measure_groups([[calm, flood]] * 2, steps=STEPS), 0.03)
    uneven = [[replace(calm, clients=6, weight=2.0), flood], [replace(calm, clients=2, weight=2.0), flood]]
    assert_fair(measure_groups(uneven, steps=STEPS), 0.03)


def test_who_floods_one_group_has_its_share_of_both_there() -> None:
    here, both = Tenant("here", 120, 0, tokens=(60, 180)), Tenant("both", 120, 0, tokens=(60, 180))
    # that is every row of the one group: each row that the other has there for a while is missing
    outcome = measure_groups([[here, both], [replace(here, clients=0), both]], steps=STEPS, warm=1500)
    assert min(share.of_claim for share in outcome.shares) >= 0.95, "\n".join(describe(outcome))


def test_a_trickle_earns_nothing() -> None:
    """A tenant that asked for one row for long gets no more than its share when it asks for all."""
    trickle = Tenant("late", 1, 0, there=(0,))
    shared = SharedEngine([trickle, replace(FLOOD, tokens=(120, 120))], Room())
    shared.run(1, 3000, 0)
    shared.tenants["late"] = replace(trickle, clients=100, there=None)
    shared.add_clients("late", 99)
    shared.run(1, 1500, 0)
    late, flood = (shared.counts[name].served[-1] for name in ("late", "flood"))
    assert late / (late + flood) < 0.53
