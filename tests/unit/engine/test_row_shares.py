"""Shares of tenants and their first tokens, over weights, lengths, adapters and KV pressure; in one group and in two."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tenant_steps import Outcome, Room, SharedEngine, Tenant, describe, measure

STEPS = 1500
FLOOD = Tenant("flood", 100, tokens=(60, 180))


def assert_fair(outcome: Outcome, within: float, again: float = 0.03) -> None:
    told = "\n".join(describe(outcome))
    assert min(share.of_claim for share in outcome.shares) >= 1 - within, told
    assert max(share.wait for share in outcome.shares) <= 5, told
    assert outcome.again <= again, told


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


@settings(max_examples=12, deadline=None)
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
