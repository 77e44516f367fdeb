"""A service deployed on a Ray of two nodes, with a group whose ranks are on both."""

from collections.abc import Iterator

import httpx
import pytest

from tandem import LLM, SamplingParams
from tests.lab.ray_nodes import HTTP_PORT, START_S, RayNodes, demo, ranks_on
from tests.support.service import wait_for
from tools.lab import Lab

PROMPTS = ["Once upon a time", "The quick brown fox"]


@pytest.fixture(scope="module")
def ray_nodes(lab: Lab) -> Iterator[RayNodes]:
    """No node has room for both bundles of the group: 0.2 and 0.1 of a CPU. The gateway is on the second node, as Serve
    has a proxy on the head and on the nodes of replicas only."""
    ray_nodes = RayNodes(lab)
    ray_nodes.leave_cpus(dict.fromkeys(lab.nodes, 0.25))
    config = demo({"tensor_parallel_size": 2})
    _, second = lab.nodes.values()
    config["applications"][0]["args"]["gateway_config"]["label_selector"] = {"node": second.name}
    ray_nodes.deploy(config)
    wait_for(lambda: ray_nodes.get("/readyz", at=second) is not None, START_S, "the second node's proxy is ready")
    yield ray_nodes
    ray_nodes.close()


def test_a_group_serves_from_both_nodes(ray_nodes: RayNodes, lab: Lab) -> None:
    """Texts are those of one process, asked at the proxy of either node."""
    places = sorted([place for _, place in ranks_on(node).values()] for node in lab.nodes.values())
    assert places == [["tp0 pp0"], ["tp1 pp0"]]
    on_head = ray_nodes.head.run("ps", "ax", "-o", "args")
    assert "ray::ServiceIdentity" in on_head and "tandem redis " in on_head, "they live as long as the cluster"
    with LLM("demo", device="cpu", dtype="float32") as llm:
        params = SamplingParams(max_tokens=40, temperature=0)
        wanted = [output.text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    for node in lab.nodes.values():
        with (
            node.network(),
            httpx.Client(base_url=f"http://127.0.0.1:{HTTP_PORT}", timeout=60, trust_env=False) as client,
        ):
            asked = {"model": "demo", "prompt": PROMPTS, "max_tokens": 40, "temperature": 0}
            answer = client.post("/v1/completions", json=asked)
        assert [choice["text"] for choice in answer.json()["choices"]] == wanted, answer.text
