"""What a gateway says when a new version does not start: once, by the reason that Serve has."""

import logging

import pytest

from tandem.cluster.fleet.group_events import GroupEvent
from tandem.cluster.gateway.app.update_watch import UpdateWatch
from tandem.cluster.ray_private.application_state import ApplicationState

TOLD = """The deployment failed to start 3 times in a row during a rolling update. See controller logs. Error:
ray::ServeReplica.initialize_and_get_metadata()
  File "coordinator.py", line 310, in _wait_until_opened
RuntimeError: group abc did not start: rank 0: the model has no layers
"""
WHY = "RuntimeError: group abc did not start: rank 0: the model has no layers"
RUNNING = ApplicationState("RUNNING", "", {})
FAILED = ApplicationState("DEPLOY_FAILED", "Failed to update the deployments ['c'].", {"c": TOLD})


def test_the_reason_is_what_was_raised() -> None:
    assert FAILED.why_failed == WHY
    assert ApplicationState("DEPLOY_FAILED", "Unexpected error.\nSettingsError: x", {}).why_failed == "SettingsError: x"
    assert ApplicationState("DEPLOY_FAILED", "", {}).why_failed == "Serve says no reason"
    assert RUNNING.why_failed is None and not RUNNING.is_ending
    assert [ApplicationState(status, "", {}).is_ending for status in ("DELETING", "NOT_STARTED")] == [True, True]


async def test_it_is_told_once_and_again_when_it_happens_again(caplog: pytest.LogCaptureFixture) -> None:
    states = [None, RUNNING, FAILED, None, FAILED, RUNNING, FAILED]
    events: list[GroupEvent] = []

    async def ask() -> ApplicationState | None:
        return states.pop(0)

    async def tell(event: GroupEvent) -> None:
        events.append(event)

    async def follow() -> None:
        followed.append(len(states))

    followed: list[int] = []
    watch = UpdateWatch(ask, tell, follow)
    with caplog.at_level(logging.WARNING, "tandem.gateway"):
        while states:
            await watch.look()
    assert events == [GroupEvent("not_updated", "", WHY)] * 2
    assert [WHY in line for line in caplog.messages] == [True, True]
    assert followed == [7, 6, 5, 4, 3, 2, 1], "also while nothing is known of the application"
