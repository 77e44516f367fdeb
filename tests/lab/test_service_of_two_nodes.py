"""A service deployed on a Ray of two nodes, with a group whose ranks are on both."""

from collections.abc import Iterator

import httpx
import pytest

from tandem import LLM, SamplingParams
from tests.lab.ray_nodes import HTTP_PORT, RayNodes
from tools.lab import Lab, Node

PROMPTS = ["Once upon a time", "The quick brown fox"]
DEMO = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "127.0.0.1", "port": HTTP_PORT},
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    "applications": [
        {
            "name": "tandem",
            "route_prefix": "/",
            "import_path": "tandem.cluster.app:build",
            "args": {
                "single_node": False,
                "model_loading_config": {"model_id": "demo", "model_source": "demo"},
                "engine_kwargs": {
                    "tensor_parallel_size": 2,
                    "devices_per_node": 1,
                    "max_num_seqs": 16,
                    "device": "cpu",
                    "dtype": "float32",
                    "cpu_threads": 1,
                },
                "gateway_config": {"auth": "open"},
            },
        }
    ],
}


@pytest.fixture(scope="module")
def ray_nodes(lab: Lab) -> Iterator[RayNodes]:
    """No node has room for both bundles of the group: 0.2 and 0.1 of a CPU."""
    ray_nodes = RayNodes(lab)
    ray_nodes.leave_cpus(0.25)
    ray_nodes.deploy(DEMO)
    yield ray_nodes
    ray_nodes.close()


def ranks_on(node: Node) -> list[str]:
    """What the titles of its ranks say of their place in the group."""
    titles = node.run("ps", "ax", "-o", "args").splitlines()
    return [title.split()[3] for title in titles if title.startswith("tandem rank ")]


def test_a_group_serves_from_both_nodes(ray_nodes: RayNodes, lab: Lab) -> None:
    """Texts are those of one process, asked at the proxy of either node."""
    assert sorted(ranks_on(node) for node in lab.nodes.values()) == [["tp0"], ["tp1"]]
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
