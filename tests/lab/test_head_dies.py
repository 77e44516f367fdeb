"""A head that dies and comes back a minute later: who asks at another node notices nothing."""

import sys
import time
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import psutil
import pytest

from tandem.cluster.process.redis_server import find_binary
from tandem.cluster.ray_private.local_node import is_listening
from tests.lab.many_streams import URL, ManyStreams
from tests.lab.ray_nodes import START_S, RayNodes, demo, ranks_on
from tests.support import tls_front
from tests.support.certificates import Authority
from tests.support.service import BIN, wait_for
from tools.lab import Lab, Node

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
AWAY_S = 60
TLS_PORT = 6380
NEW, TOKENS = 20, 150
PROMPTS = [f"In the year {1900 + number} a" for number in range(32)]
WORD = "a-word"
USERS = f"""
user default off
user ray on >{WORD} ~RAYlab@* ~DUMMY +@all -@admin -@dangerous +info +keys
user tandem on >{WORD} ~tandem:* &tandem:* +@all -@admin -@dangerous +info
"""
"""As in docs/serving/cluster.md."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("head", "far") as lab:
        yield lab


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def far(lab: Lab, authority: Authority) -> Iterator[Node]:
    """The other node, with a Redis behind TLS in which Ray and Tandem have a user and a prefix each."""
    node = lab.nodes["far"]
    config = node.folder / "redis.conf"
    config.write_text(f"bind {node.address}\nport 6379\ndir {node.folder}\nlogfile {node.folder}/redis.log\n{USERS}")
    issued = authority.issue("redis", address=node.address)
    front = [sys.executable, tls_front.__file__, node.address, str(TLS_PORT), issued.certfile, issued.keyfile, "6379"]
    started = [node.start([find_binary(), str(config)]), node.start(front)]
    with node.network():
        for port in (6379, TLS_PORT):
            wait_for(lambda port=port: is_listening(f"{node.address}:{port}"), 60, "Redis listens")
    yield node
    for process in started:
        (inside,) = psutil.Process(process.pid).children()
        inside.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def ray_nodes(lab: Lab, far: Node, authority: Authority) -> Iterator[RayNodes]:
    """The head has no CPU, so that gateway and group are on the other node."""
    kept = {
        "RAY_REDIS_ADDRESS": f"rediss://{far.address}:{TLS_PORT}",
        "RAY_REDIS_CA_CERT": authority.certfile,
        "RAY_external_storage_namespace": "lab",
    }
    ray_nodes = RayNodes(lab, ["--redis-username=ray", f"--redis-password={WORD}", "--num-cpus=0"], kept)
    config = demo({})
    (application,) = config["applications"]
    application["args"]["redis_config"] = {
        "redis_url": f"rediss://tandem:{WORD}@{far.address}:{TLS_PORT}/0?ssl_ca_certs={quote(authority.certfile)}"
    }
    ray_nodes.begin_deploy(config)
    wait_for(lambda: ray_nodes.get("/readyz", far) is not None, START_S, "the service is ready")
    yield ray_nodes
    ray_nodes.close()


def ask(node: Node) -> int:
    """The status of a new request at a node's proxy."""
    asked = {"model": "demo", "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
    with node.network():
        return httpx.post(URL, json=asked, timeout=60, trust_env=False).status_code


def test_who_asks_at_another_node_notices_nothing(ray_nodes: RayNodes, far: Node) -> None:
    texts = ManyStreams(far, PROMPTS, TOKENS).result()
    before = ranks_on(far)
    streams = ManyStreams(far, PROMPTS, TOKENS)
    streams.wait_for_tokens(5)
    ray_nodes.kill_head()
    died_s, rounds, answers = time.monotonic(), 1, list[int]()
    for number in range(NEW):
        answers.append(ask(far))
        if streams.is_over:
            assert streams.result() == texts
            streams, rounds = ManyStreams(far, PROMPTS, TOKENS), rounds + 1
        over_s = died_s + (number + 1) * AWAY_S / NEW
        time.sleep(max(0.0, over_s - time.monotonic()))  # how long the head is away is what is tested
    assert answers == [200] * NEW
    print(f"{rounds * len(PROMPTS)} streams and {NEW} requests within {time.monotonic() - died_s:.0f} s without a head")
    ray_nodes.start_head()
    wait_for(lambda: far.address in ray_nodes.ids() and len(ray_nodes.ids()) == 2, START_S, "both nodes are there")
    assert streams.result() == texts
    assert ranks_on(far) == before, "nothing was replaced"
    check_that_groups_are_replaced_again(ray_nodes, far, next(iter(before)))


def check_that_groups_are_replaced_again(ray_nodes: RayNodes, far: Node, rank: int) -> None:
    """The new head has taken up what the old one knew; `tandem status` finds the service there."""
    psutil.Process(rank).kill()
    wait_for(lambda: {*ranks_on(far)} - {rank}, START_S, "the group is replaced")
    wait_for(lambda: ray_nodes.get("/readyz", far) is not None, START_S, "and serves")
    assert ask(far) == 200
    said = far.run(str(BIN / "tandem"), "status", "--app", "tandem", timeout_s=START_S, env=ray_nodes.environment)
    ((group, _),) = ranks_on(far).values()
    assert f"group {group}  serving" in said and f"node {far.address} " in said, said
