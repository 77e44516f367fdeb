"""The host tier's loop in this process: only the client that leases memory waits while it is reserved."""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.environment import short_temp_folder
from tandem.offload.host import host_regions
from tandem.offload.host.host_messages import HostTierError, LeaseRegion
from tandem.offload.host.host_process import attach, lease, status
from tandem.offload.host.host_server import HostServer
from tests.support.service import wait_for

PAGE = 4096
BUDGET = 8 * PAGE


@dataclass
class Host:
    """A server whose reservations wait for `go_on` when the layout is "slow"."""

    socket: Path
    go_on: threading.Event
    asked: threading.Event


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    plain = host_regions._allocate
    with tempfile.TemporaryDirectory(prefix="th-", dir=short_temp_folder()) as folder:
        made = Host(Path(folder) / "s", threading.Event(), threading.Event())

        def allocate(ask: LeaseRegion) -> Any:
            if ask.layout == "slow":
                made.asked.set()
                assert made.go_on.wait(60)
            return plain(ask)

        monkeypatch.setattr(host_regions, "_allocate", allocate)
        reader, writer = os.pipe()
        with os.fdopen(reader) as parent, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", parent)
            server = HostServer(made.socket, BUDGET)
            running = threading.Thread(target=server.run)
            running.start()
            yield made
            made.go_on.set()
            os.close(writer)
            running.join(30)
            assert not running.is_alive()
            server.close()


def test_a_rank_attaches_while_another_groups_memory_is_reserved(host: Host) -> None:
    first = lease(host.socket, "quick", PAGE, [PAGE], 30)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(lease, host.socket, "slow", PAGE, [PAGE, PAGE], 60)
        assert host.asked.wait(30)
        slab = attach(host.socket, first.token, 0, 30)
        assert status(host.socket, 30).leases == 1
        third = pool.submit(lease, host.socket, "quick", PAGE, [PAGE], 60)  # leases are made one after the other
        time.sleep(0.05)  # nothing comes: time for it to come
        assert not third.done() and not second.done()
        host.go_on.set()
        held = [first, second.result(), third.result(), slab, attach(host.socket, second.result().token, 1, 30)]
    assert [lease.reused for lease in (second.result(), third.result())] == [False, False]
    now = status(host.socket, 30)
    assert (now.regions, now.leases, now.users) == (3, 3, 5)
    for one in held:
        one.close()


def test_what_a_coordinator_that_left_meanwhile_has_asked_for_is_free(host: Host) -> None:
    with pytest.raises(HostTierError, match="did not answer"):
        lease(host.socket, "slow", PAGE, [6 * PAGE], 0.3)
    assert status(host.socket, 30).regions == 0
    host.go_on.set()
    wait_for(lambda: status(host.socket, 30).regions == 1, 30, "the memory is there")
    again = lease(host.socket, "slow", PAGE, [6 * PAGE], 30)
    assert again.reused, "it is not reserved a second time"
    assert status(host.socket, 30).regions == 1
    again.close()


def test_memory_that_is_being_reserved_counts(host: Host) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lease, host.socket, "slow", PAGE, [6 * PAGE], 60)
        assert host.asked.wait(30)
        second = pool.submit(lease, host.socket, "quick", PAGE, [6 * PAGE], 60)
        host.go_on.set()
        held = first.result()
        with pytest.raises(HostTierError, match="do not fit"):
            second.result()
        held.close()
