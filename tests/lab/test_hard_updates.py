"""Updates that have it hard: an only group without room for another one beside it, and a version that does not start.
Streams run meanwhile, and none notices."""

import time
from collections.abc import Iterator

import pytest

from tests.lab.ray_nodes import START_S, RayNodes, demo, ranks_on
from tests.lab.steady_streams import SteadyStreams
from tests.support.service import BIN, wait_for
from tools.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(1800)]
PROMPTS = [f"In the year {1900 + number} a" for number in range(4)]
CLIENTS, SECONDS, RATE = 12, (5.0, 20.0), 20.0
ENDED_S = 90.0
"""For 5 s of --shutdown-timeout, on a busy machine; streams may take 600 s when their gateway is replaced."""
SLOT = 0.2
"""CPUs of one group."""


class Deployed:
    """One group on the one node, which has room for `groups`."""

    def __init__(self, lab: Lab) -> None:
        self.ray_nodes = RayNodes(lab)
        self.config = demo({"shutdown_timeout": 5})
        (self._application,) = self.config["applications"]
        self._first = self._application["args"]["engine_kwargs"]

    def change(self, **engine: object) -> None:
        """Deploys the first version with these settings beside its own."""
        self._application["args"]["engine_kwargs"] = self._first | engine
        self.ray_nodes.begin_deploy(self.config)

    def groups(self) -> set[str]:
        return {group for group, _ in ranks_on(self.ray_nodes.head).values()}

    def status(self) -> str:
        """The first line of `tandem status`."""
        said = self.ray_nodes.head.run(
            str(BIN / "tandem"), "status", "--app", "tandem", env=self.ray_nodes.environment, timeout_s=START_S
        )
        print(said.splitlines()[0], flush=True)
        return said.splitlines()[0]

    def holds(self) -> bool:
        """Whether /load counts requests that are held."""
        load = self.ray_nodes.get("/load")
        return load is not None and load["requests_held"] > 0

    def until_status_has(self, word: str) -> str:
        """The first line of `tandem status` that has the word."""

        def found() -> str:
            line = self.status()
            return line if word in line else ""

        return wait_for(found, START_S, f"{word!r} in the status", 0.5)


@pytest.fixture
def deployed() -> Iterator[Deployed]:
    with Lab("a") as lab:
        deployed = Deployed(lab)
        deployed.ray_nodes.deploy(deployed.config)
        yield deployed
        deployed.ray_nodes.close()


@pytest.fixture
def streams(deployed: Deployed) -> Iterator[SteadyStreams]:
    streams = SteadyStreams(deployed.ray_nodes.head, "", PROMPTS, CLIENTS, SECONDS, RATE)
    try:
        wait_for(lambda: streams.running >= CLIENTS // 2, START_S, "streams run", 0.5)
        yield streams
    finally:
        streams.stop()
    print(streams.counts(), flush=True)
    assert not streams.bad()


def test_requests_are_held_where_there_is_no_room(deployed: Deployed, streams: SteadyStreams) -> None:
    (old,) = deployed.groups()
    deployed.ray_nodes.leave_cpus({"a": SLOT + 0.11})  # for the group and two gateways, not for another group
    deployed.change(max_num_seqs=32)
    wait_for(lambda: old not in deployed.groups(), 120, "the only group goes", 0.5)
    wait_for(deployed.holds, 120, "requests are held", 0.1)
    wait_for(lambda: deployed.groups() and deployed.ray_nodes.is_ready(), START_S, "the new one serves", 0.5)
    wait_for(lambda: deployed.status() == "application tandem", 300, "it is over", 1.0)


def test_a_version_that_does_not_start_takes_no_traffic(deployed: Deployed, streams: SteadyStreams) -> None:
    before = deployed.groups()
    deployed.change(kv_cache_memory_bytes=1)
    said = deployed.until_status_has("did not start: ")
    assert said.endswith("; the one before serves on")
    assert deployed.groups() == before
    deployed.change()
    wait_for(lambda: deployed.status() == "application tandem", 300, "as before", 1.0)
    assert deployed.groups() == before, "the version that runs was not started again"


def test_the_end_of_the_service_does_not_wait_for_long_streams(deployed: Deployed) -> None:
    """`serve.delete`: they have --shutdown-timeout, and an error as their last event. (`serve shutdown` ends Serve's
    proxies at once, and with them every stream.)"""
    streams = SteadyStreams(deployed.ray_nodes.head, "", PROMPTS, CLIENTS, (200.0, 300.0), RATE)
    wait_for(lambda: streams.running == CLIENTS, START_S, "all streams run", 0.5)
    streams.begin_no_more()
    began_s = time.monotonic()
    deployed.ray_nodes.delete()
    streams.stop()
    took_s = time.monotonic() - began_s
    print(f"ended in {took_s:.1f} s: {streams.counts()}", flush=True)
    assert {stream.end for stream in streams.streams} <= {"ok", "failed"} and took_s < ENDED_S
    assert any("shutting down" in stream.why for stream in streams.streams)
