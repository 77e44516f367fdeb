"""Two groups of one node each, with more streams than rows: a node of one vanishes without a word, with the coordinator
that has requests without a row; later the other's is drained, with a gateway on it. No stream fails."""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tandem.cluster.wire.service_facts import GATEWAY
from tests.lab.many_streams import ManyStreams
from tests.lab.ray_nodes import START_S, RayNodes, demo, ranks_on
from tests.support.service import wait_for
from tools.lab import Lab, Node

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
ROWS, WAITING = 8, 24
"""Of a group, and requests of both that have none."""
PROMPTS = [f"In the year {1900 + number} a" for number in range(2 * ROWS + WAITING)]
TOKENS = 700
SLOTS = {"a": 0.3, "b": 0.2, "c": 0.2, "d": 0.2}
"""Of a group and a gateway, and of a group three times."""
HEALED_S = 300.0


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    """Gateways are on a, the head, and on c, as no other has room; then there is room for groups on b and c."""
    with Lab(*SLOTS) as lab:
        ray_nodes = RayNodes(lab)
        ray_nodes.leave_cpus({"a": 0.1, "b": 0.0, "c": 0.1, "d": 0.0}, SLOTS)
        config = demo({"max_num_seqs": ROWS}, groups=2)
        config["applications"][0]["args"]["gateway_config"]["api_server_count"] = 2
        ray_nodes.begin_deploy(config)
        wait_for(lambda: gateways_on(lab.nodes["c"]), START_S, "the gateways have their places")
        ray_nodes.free("b")
        wait_for(ray_nodes.is_ready, START_S, "the first group serves")
        ray_nodes.free("c")
        wait_for(lambda: groups(ray_nodes) == 2, START_S, "the second group serves")
        yield ray_nodes
        ray_nodes.close()


@pytest.fixture(scope="module")
def texts(ray_nodes: RayNodes) -> list[str]:
    """What the streams say when nothing happens."""
    return ManyStreams(ray_nodes.head, PROMPTS, TOKENS).result()


def groups(ray_nodes: RayNodes) -> int:
    load = ray_nodes.get("/load")
    return -1 if load is None else int(load["groups_serving"])


def gateways_on(node: Node) -> int:
    """The number of gateways among its processes."""
    found = 0
    for pid in node.pids():
        with suppress(psutil.Error):  # it has ended meanwhile
            found += GATEWAY in " ".join(psutil.Process(pid).cmdline())
    return found


def test_the_node_of_a_coordinator_vanishes(ray_nodes: RayNodes, texts: list[str]) -> None:
    """For good, and nobody says so: calls to it would wait for seven minutes. Some requests have a row there, some wait
    for one, some are sent there before anybody knows."""
    gone = ray_nodes.lab.nodes["b"]
    assert ranks_on(gone)
    streams = ManyStreams(ray_nodes.head, PROMPTS, TOKENS)
    streams.wait_for_tokens(1, of=ROWS + 2)  # of both groups
    assert streams.silent > WAITING // 2, "some of those that wait do so in the group that is lost"
    gone.cut()
    cut_s = time.monotonic()
    late = ManyStreams(ray_nodes.head, PROMPTS[:ROWS], TOKENS)
    assert streams.result() == texts and late.result() == texts[:ROWS]
    print(f"all {len(PROMPTS) + ROWS} have ended {time.monotonic() - cut_s:.1f} s after the cut, by one group")


def test_a_node_with_a_coordinator_and_a_gateway_is_drained(ray_nodes: RayNodes, texts: list[str]) -> None:
    """Both are elsewhere before they end there."""
    head, going = ray_nodes.head, ray_nodes.lab.nodes["c"]
    ray_nodes.free("d")
    wait_for(lambda: groups(ray_nodes) == 2, HEALED_S, "a group in place of the lost one")
    ray_nodes.free("a")
    assert ranks_on(going) and gateways_on(going) == 1
    streams = ManyStreams(head, PROMPTS, TOKENS), ManyStreams(going, PROMPTS[:ROWS], TOKENS)
    for some in streams:
        some.wait_for_tokens(1, of=1)
    ray_nodes.drain(going, deadline_s=3600)
    told_s = time.monotonic()
    assert [some.result() for some in streams] == [texts, texts[:ROWS]]
    wait_for(lambda: not ranks_on(going) and not gateways_on(going), HEALED_S, "nothing runs there")
    print(f"nothing runs there {time.monotonic() - told_s:.1f} s after the notice")
    assert groups(ray_nodes) == 2 and gateways_on(head) == 2
