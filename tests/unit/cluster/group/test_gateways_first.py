"""A new group with another model is shown to Serve once the gateways of its version have taken over."""

import pytest
from msgspec.structs import replace

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.gateway_records import GatewayRecord
from tandem.cluster.group.gateways_first import FOLLOW_S, LOOK_PERIOD_S, SETTLE_S, are_to_follow, wait_for_gateways

OWN = GroupRecord(group="n0", life=1, model="m", state="serving", host="h", pid=1, kind="2.b")
OLD_GATEWAY = GatewayRecord(
    gateway="g", host="h", pid=1, ready=True, in_flight=0, metrics=b"", tenant_metrics=b"", kind="2.a"
)


def old(group: str) -> GroupRecord:
    return replace(OWN, group=group, kind="2.a")


@pytest.mark.parametrize(
    ("fleet", "gateways", "waits"),
    [
        ([], [OLD_GATEWAY], False),  # nothing is taken from the old gateways
        ([old("o0")], [OLD_GATEWAY], True),
        ([old("o0")], [replace(OLD_GATEWAY, kind="2.b")], False),
        ([old("o0")], [replace(OLD_GATEWAY, is_leaving=True)], False),
        ([old("o0")], [replace(OLD_GATEWAY, kind="")], False),  # of a release that does not say
        ([old("o0"), old("o1")], [OLD_GATEWAY], False),  # new gateways do not come yet
        ([old("o0"), old("o1"), replace(OWN, group="n1")], [OLD_GATEWAY], True),
        ([replace(OWN, group="o0")], [OLD_GATEWAY], False),  # a version with the same model
    ],
)
def test_it_waits_while_new_gateways_may_come(
    fleet: list[GroupRecord], gateways: list[GatewayRecord], waits: bool
) -> None:
    assert are_to_follow(OWN, fleet, gateways) is waits
    assert are_to_follow(OWN, [*fleet, OWN], gateways) is waits, "its own record is there"


@pytest.mark.parametrize(("looks", "waited_s"), [(0, 0.0), (4, 4 * LOOK_PERIOD_S + SETTLE_S), (10_000, FOLLOW_S)])
async def test_it_does_not_wait_for_ever(looks: int, waited_s: float) -> None:
    now_s, left = 0.0, looks

    async def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def are_missing() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    await wait_for_gateways(are_missing, pause, lambda: now_s)
    assert now_s == pytest.approx(waited_s)
