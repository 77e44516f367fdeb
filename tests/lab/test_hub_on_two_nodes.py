"""A model of a hub on a Ray of two nodes: `tandem doctor --cluster`, one download on each node, KV that outlives a
group."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tests.lab.ray_nodes import HTTP_PORT, START_S, RayNodes
from tests.support.hub_server import COMMIT, Hub, hub_server
from tests.support.service import BIN, wait_for
from tools.lab import Lab, Node

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
HUB_PORT = 8090
WALLED = "21504-22015"
"""Ports that a firewall of a node keeps."""
CONVERSATION = [10 + i * 7 % 300 for i in range(400)]


def serve_file(**engine: Any) -> dict[str, Any]:
    """A Serve file for the hub's model, whose gateway is on b."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": HTTP_PORT},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "tandem",
                "route_prefix": "/",
                "import_path": "tandem.cluster.app:build",
                "args": {
                    "model_loading_config": {"model_id": "m", "model_source": "org/name"},
                    "engine_kwargs": {
                        "max_num_seqs": 16, "device": "cpu", "dtype": "float32", "cpu_threads": 1,
                        "port_range": "21000-21999", "label_selector": {"node": "in(a,b)"}, **engine,
                    },
                    "gateway_config": {"auth": "open", "api_server_count": 1, "label_selector": {"node": "b"}},
                },
            }
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def hub(lab: Lab) -> Iterator[Hub]:
    """A hub on the first node's network."""
    first = next(iter(lab.nodes.values()))
    with first.network():
        serving = hub_server((first.address, HUB_PORT))
        hub = serving.__enter__()
    hub.repositories["org/name@main"] = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir()}
    yield hub
    serving.__exit__(None, None, None)


@pytest.fixture(scope="module")
def ray_nodes(lab: Lab, hub: Hub) -> Iterator[RayNodes]:
    """Each node has a cache of its own for the hub's files, in its home folder. There is room for the gateway on b,
    then for a stage of two ranks with the coordinator on a, and one without it on b."""
    cache = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": "~/.cache/huggingface"}
    ray_nodes = RayNodes(lab, environment=cache)
    ray_nodes.leave_cpus({"a": 0.0, "b": 0.1}, {"a": 0.3, "b": 0.2})
    yield ray_nodes
    ray_nodes.close()


def doctor(ray_nodes: RayNodes, *words: str) -> dict[str, Any]:
    """What `tandem doctor --cluster` finds, at the head; its exit status says whether all fits."""
    command = ray_nodes.head.command([str(BIN / "tandem"), "doctor", "--cluster", "--json", *words])
    env = ray_nodes.head._environment(ray_nodes.environment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    assert done.returncode == (0 if found.get("fits") else 1), done.stderr
    return found


def test_the_doctor_sees_each_node_and_what_is_wrong_with_one(ray_nodes: RayNodes, lab: Lab) -> None:
    a, b = lab.nodes.values()
    found = doctor(ray_nodes, "--model", "org/name")
    assert found["fits"], found["misfits"]
    assert [(node["name"], node["address"], node["is_head"]) for node in found["nodes"]] == [
        ("a", a.address, True),
        ("b", b.address, False),
    ]
    assert {node["has_model"] for node in found["nodes"]} == {False} and "the model on a, b" in found["notes"][-1]
    wrong: tuple[tuple[AbstractContextManager[None], str], ...] = (
        (
            changed(b, "mount -o remount,size=32m /dev/shm", "mount -o remount,size=2g /dev/shm"),
            ": /dev/shm has 32 MiB",
        ),
        (
            changed(b, f"mount -t tmpfs tmpfs {DEMO_MODEL.parent}", f"umount {DEMO_MODEL.parent}"),
            ": the model's folder is",
        ),
        (few_open_files(b), ": a process may open 1024 files"),
        (
            changed(b, f"ip rule add dport {WALLED} unreachable", f"ip rule delete dport {WALLED} unreachable"),
            f" does not reach node a ({a.address}): {a.address}:2",
        ),
    )
    for breaking, why in wrong:
        with breaking:
            misfits = doctor(ray_nodes, "--model", str(DEMO_MODEL), "--port-range", WALLED)["misfits"]
        (misfit,) = [words for words in misfits if "ports that the kernel chooses" not in words]
        assert misfit.startswith(f"node b ({b.address}){why}")


@contextmanager
def few_open_files(node: Node) -> Iterator[None]:
    """As with `ulimit -Sn 1024` before `ray start` there."""
    limits = {}
    for pid in node.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            limits[process] = soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
            process.rlimit(psutil.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        yield
    finally:
        for process, limit in limits.items():
            with suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_NOFILE, limit)


@contextmanager
def changed(node: Node, command: str, undo: str) -> Iterator[None]:
    """What a command changes on a node, until another one."""
    node.run(*command.split())
    try:
        yield
    finally:
        node.run(*undo.split())


def get(node: Node, path: str) -> str:
    """The body of an answer of the node's proxy."""
    with node.network(), httpx.Client(timeout=60, trust_env=False) as client:
        return client.get(f"http://127.0.0.1:{HTTP_PORT}{path}").text


def ask(node: Node, max_tokens: int = 24) -> tuple[str, int]:
    """The text, and how many prompt tokens were not computed, from the node's proxy."""
    asked = {"model": "m", "prompt": CONVERSATION, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with node.network(), httpx.Client(timeout=60, trust_env=False) as client:
        answer = client.post(f"http://127.0.0.1:{HTTP_PORT}/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def titled(node: Node, words: str) -> list[psutil.Process]:
    """The node's processes whose titles have these words."""
    found = []
    for pid in node.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if words in " ".join(process.cmdline()):
                found.append(process)
    return found


def listening(process: psutil.Process) -> set[int]:
    """The ports at which a process listens, from its network's table."""
    inodes = set()
    for link in (Path("/proc") / str(process.pid) / "fd").iterdir():
        with suppress(OSError):
            inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.fixture(scope="module")
def wanted() -> str:
    """The text of one process."""
    with LLM("demo", device="cpu", dtype="float32") as llm:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": CONVERSATION}, params, use_tqdm=False)
    return output.outputs[0].text


def test_each_node_downloads_the_model_once(ray_nodes: RayNodes, lab: Lab, hub: Hub, wanted: str) -> None:
    """A group with two ranks on each node; its processes listen where the file says, and are where labels say."""
    a, b = lab.nodes.values()
    ray_nodes.begin_deploy(serve_file(tensor_parallel_size=2, pipeline_parallel_size=2, kv_offloading_size=0.1))
    ray_nodes.free("a", "b")
    wait_for(ray_nodes.is_ready, START_S, "the group serves")
    assert [len(titled(node, "tandem rank ")) for node in (a, b)] == [2, 2]
    assert hub.downloads.count("model.safetensors") == 2
    for node in (a, b):
        snapshot = node.folder / ".cache/huggingface/hub/models--org--name/snapshots" / COMMIT
        assert (snapshot / "model.safetensors").is_file()
    assert not titled(a, "tandem-gateway") and len(titled(b, "tandem-gateway")) == 1
    assert ask(a) == (wanted, 0)
    for process in (*titled(b, "tandem-gateway"), *titled(a, "tandem redis ")):
        assert any(21000 <= port <= 21999 for port in listening(process)), "the file has a range"


def test_a_conversation_finds_its_kv_on_the_nodes_of_a_killed_group(ray_nodes: RayNodes, lab: Lab, wanted: str) -> None:
    """Each node has the KV of its own ranks."""
    a, b = lab.nodes.values()
    assert [len(titled(node, "tandem host-tier")) for node in (a, b)] == [1, 1]
    wait_for(lambda: re.search(r"tandem:kv_host_blocks{.*} 2[5-9]", get(a, "/metrics")), 60, "it is stored")
    old = [*titled(a, "tandem-coordinator"), *titled(a, "tandem rank "), *titled(b, "tandem rank ")]
    assert len(old) == 5
    for process in old:
        process.kill()
    wait_for(lambda: {*titled(b, "tandem rank ")} - {*old}, START_S, "another group is there")
    wait_for(ray_nodes.is_ready, START_S, "it serves")
    assert ask(a) == (wanted, 384), "from the memory of the nodes"
