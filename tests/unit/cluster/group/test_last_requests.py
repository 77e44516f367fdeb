"""A group that is taken down: it ends at --shutdown-timeout, or stays for requests that nobody else can compute."""

import pytest
from msgspec.structs import replace

from tandem.cluster.fleet.fleet_view import GroupRecord, GroupState
from tandem.cluster.group.last_requests import LOOK_PERIOD_S, nobody_takes_over, time_is_over

OWN = GroupRecord(group="g0", life=1, model="m", state="draining", host="h", pid=1, kind="a")


def other(digest: str, state: GroupState) -> GroupRecord:
    return replace(OWN, group="g1", state=state, kind=digest)


@pytest.mark.parametrize(
    ("fleet", "stays"),
    [
        ([], False),  # the only one: its requests are held until the next one has loaded
        ([other("a", "loading")], False),
        ([other("a", "serving")], False),
        ([other("b", "loading")], True),
        ([other("b", "serving")], True),
        ([other("b", "draining")], False),
        ([other("b", "serving"), replace(other("a", "serving"), group="g2")], False),
        ([other("b", "serving"), replace(other("a", "loading"), group="g2")], True),  # it cannot take them yet
        ([other("b", "serving"), replace(other("a", "draining"), group="g2")], True),
        ([other("", "serving")], False),  # a release that does not say is taken to have the same
    ],
)
def test_a_group_stays_while_only_other_models_follow(fleet: list[GroupRecord], stays: bool) -> None:
    assert nobody_takes_over(OWN, [OWN, *fleet]) is stays


@pytest.mark.parametrize("looks", [0, 3])
async def test_it_is_over_at_the_timeout_or_once_it_is_not_needed(looks: int) -> None:
    waited: list[float] = []
    needed = iter([True] * looks + [False])

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    async def is_needed() -> bool:
        return next(needed)

    await time_is_over(30.0, is_needed, pause)
    assert waited == [30.0, *[LOOK_PERIOD_S] * looks]
