"""Groups that go missing and come back, and what ended their coordinators."""

from typing import Any

import msgspec
import pytest

from tandem.cluster.fleet.group_events import GroupEvent
from tandem.cluster.fleet.missing_groups import MissingGroups
from tandem.cluster.process.exit_watch import ExitWatch
from tests.support.fake_group import FakeFleet, serving


def test_each_change_is_told_once_with_what_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[set[int]] = []
    monkeypatch.setattr(ExitWatch, "watch_only", lambda self, pids: watched.append(set(pids)))
    monkeypatch.setattr(ExitWatch, "how_it_ended", lambda self, pid: {7: "was killed by SIGKILL"}.get(pid))
    here = msgspec.structs.replace(serving("here")["here"], host="this node", pid=7)
    there = msgspec.structs.replace(serving("there")["there"], host="another node", pid=7)
    fleet: Any = FakeFleet({"here": here, "there": there})
    missing = MissingGroups(fleet, ExitWatch(), "this node")
    assert missing.changes() == [] and watched == [{7}]
    fleet.records, fleet.missing = {}, [here, there]
    killed = GroupEvent("missing", "here", "its coordinator was killed by SIGKILL")
    assert missing.changes() == [killed, GroupEvent("missing", "there")]
    assert missing.changes() == []
    fleet.records, fleet.missing = {"there": there}, [here]
    assert missing.changes() == [GroupEvent("returned", "there")]
    fleet.missing = []
    assert missing.changes() == [] and watched[-1] == set(), "nothing of it is kept open"
