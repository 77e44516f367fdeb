"""A service whose only group is on four nodes: two stages of two ranks, a rank on each node."""

from collections.abc import Iterator

import pytest

from tandem import LLM, SamplingParams
from tests.lab.many_streams import ManyStreams
from tests.lab.ray_nodes import START_S, RayNodes, demo, ranks_on
from tests.support.service import wait_for
from tools.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
PROMPTS = [f"In the year {1900 + number} a" for number in range(16)]
TOKENS = 40
SLOTS = {"a": 0.2, "b": 0.1, "c": 0.1, "d": 0.1}


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    """The gateway is on the head, as no other node has room for it; then there is just room for each bundle."""
    with Lab(*SLOTS) as lab:
        ray_nodes = RayNodes(lab)
        ray_nodes.leave_cpus({"a": 0.1, "b": 0, "c": 0, "d": 0}, SLOTS)
        ray_nodes.begin_deploy(demo({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))
        ray_nodes.free(*SLOTS)
        wait_for(ray_nodes.is_ready, START_S, "the group serves")
        yield ray_nodes
        ray_nodes.close()


def test_a_group_of_four_nodes_writes_the_texts_of_one_process(ray_nodes: RayNodes) -> None:
    """Asked at the head: Serve has proxies on the head and where its replicas are."""
    nodes = ray_nodes.lab.nodes.values()
    places = [place for node in nodes for _, place in ranks_on(node).values()]
    assert sorted(places) == ["tp0 pp0", "tp0 pp1", "tp1 pp0", "tp1 pp1"]
    assert [len(ranks_on(node)) for node in nodes] == [1, 1, 1, 1]
    with LLM("demo", device="cpu", dtype="float32") as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        wanted = [output.text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert ManyStreams(ray_nodes.head, PROMPTS, TOKENS).result() == wanted
