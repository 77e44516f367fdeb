"""`tandem doctor --cluster`: one thing wrong at a time, from faked reports; connections between real sockets; its
output."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tandem.cluster.cli.base import cluster_report
from tandem.cluster.deploy.cluster_misfits import (
    UNEXPECTED_TERMINATION,
    NodeReport,
    cluster_misfits,
    cluster_notes,
    lost_nodes,
)
from tandem.cluster.deploy.node_probe import first_refusal, memory_threshold, with_reach
from tandem.configs.limits import Ports
from tests.support.verbs import invoked
from tests.unit.cluster.deploy.test_doctor import CPU_BOX, GPU_BOX

RANGE = Ports(20_000, 20_999)
HEAD = NodeReport(
    node_id="a",
    name="a",
    address="10.0.0.1",
    is_head=True,
    cpus=2.0,
    gpus=0.0,
    object_store_bytes=80 * 2**20,
    facts=CPU_BOX,
    open_files=2**20,
    threshold=0.95,
    kernel_ports=RANGE,
)
OTHER = replace(HEAD, node_id="b", name="b", address="10.0.0.2", is_head=False)


def test_nodes_that_were_lost_and_are_not_back_are_named() -> None:
    from ray.core.generated.common_pb2 import NodeDeathInfo

    assert NodeDeathInfo.UNEXPECTED_TERMINATION == UNEXPECTED_TERMINATION
    why = {"DeathReason": UNEXPECTED_TERMINATION, "DeathReasonMessage": "health check failed"}
    told = [
        {"NodeManagerAddress": f"10.0.0.{at}", "NodeManagerHostname": name, "Alive": alive, **more}
        for at, name, alive, more in (
            (1, "a", True, {}),
            (2, "b", False, why),
            (2, "b", True, {}),
            (3, "c", False, why),
            (3, "c", False, why),
            (4, "d", False, {"DeathReason": NodeDeathInfo.EXPECTED_TERMINATION}),
            (5, "e", False, {**why, "DeathReasonMessage": ""}),
        )
    ]
    assert lost_nodes(told) == [
        "c (10.0.0.3) is lost: health check failed; once it can be reached, `ray start` there again",
        "e (10.0.0.5) is lost: Ray does not say why; once it can be reached, `ray start` there again",
    ]


def test_equal_nodes_fit_and_what_ray_kills_is_noted() -> None:
    without_redis = replace(CPU_BOX, redis=None)
    nodes = [HEAD, replace(OTHER, facts=without_redis)]
    assert not cluster_misfits(nodes) and not cluster_misfits(nodes, RANGE)
    (note,) = cluster_notes(nodes)
    assert "once 95% of its memory are used (a, b)" in note and "RAY_memory_usage_threshold" in note
    assert not cluster_notes([replace(HEAD, threshold=None)])
    (note,) = cluster_notes([replace(HEAD, threshold=None, facts=without_redis)])
    assert "on a, the head: `serve run` needs `redis_url`" in note


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(OTHER, facts=replace(CPU_BOX, tandem="0.2.0")), "has tandem 0.2.0, and node a (10.0.0.1) 0.1.0"),
        (replace(OTHER, facts=replace(CPU_BOX, python="3.12.1")), "has Python 3.12.1, and node a (10.0.0.1) 3.11.7"),
        (replace(OTHER, facts=replace(CPU_BOX, torch="2.9.0")), "has torch 2.9.0, and node a (10.0.0.1) 2.13.0"),
        (replace(OTHER, facts=replace(CPU_BOX, ray="2.59.0")), "has Ray 2.59.0, and node a (10.0.0.1) 2.60.0"),
        (replace(OTHER, facts=None, error="no answer in 60 s"), "does not answer: no answer in 60 s"),
        (with_reach(OTHER, ("nonce", []), TimeoutError("no answer in 60 s")), ": no answer in 60 s"),
        (with_reach(OTHER, RuntimeError("Traceback\nOSError: none is free\n"), {}), ": OSError: none is free"),
        (replace(OTHER, unreached={"a": "10.0.0.1:33000: no answer in 3 s"}),
         "does not reach node a (10.0.0.1): 10.0.0.1:33000: no answer in 3 s"),
        (replace(OTHER, facts=replace(CPU_BOX, shm_bytes=64 * 2**20)), ": /dev/shm has 64 MiB, and Ray's object store"),
        (replace(OTHER, gpus=8.0, facts=GPU_BOX), ": Ray counts 8 GPU(s), and the CUDA driver offers 2"),
        (replace(OTHER, cpus=64.0), ": Ray counts 64 CPUs, and a process may use 2 core(s)"),
        (replace(OTHER, open_files=1024), ": a process may open 1024 files, of which each connection of Serve's proxy"),
        (replace(OTHER, facts=replace(CPU_BOX, available_bytes=2**28)), ": 97% of its memory (8.0 GiB) are used"),
        (replace(OTHER, has_model=False), ": the model's folder is not there"),
        (replace(OTHER, kernel_ports=Ports(32_768, 60_999)), "32768-60999, of which some are outside of 20000-20999"),
    ],
)  # fmt: skip
def test_each_thing_that_does_not_fit_is_said_with_its_node(wrong: NodeReport, words: str) -> None:
    (found,) = cluster_misfits([HEAD, wrong], RANGE, model_is_local=True)
    assert found.startswith("node b (10.0.0.2)") and words in found


def test_a_model_of_the_hub_that_is_not_there_is_downloaded() -> None:
    nodes = [replace(HEAD, has_model=True), replace(OTHER, has_model=False)]
    assert not cluster_misfits(nodes)
    assert cluster_notes(nodes)[-1] == "not there yet, and downloaded at the start: the model on b"


def test_the_threshold_is_what_the_environment_says() -> None:
    assert memory_threshold({}) == 0.95
    assert memory_threshold({"RAY_memory_usage_threshold": "0.98"}) == 0.98
    assert memory_threshold({"RAY_memory_monitor_refresh_ms": "0"}) is None


@contextmanager
def saying(words: bytes) -> Iterator[tuple[str, int]]:
    """A listener on loopback that says the words to the first who connects; the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            connection.sendall(words)
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()
        thread.join(10)


def test_a_connection_is_to_the_process_that_is_meant() -> None:
    with saying(b"abcd") as address:
        assert first_refusal("abcd", [address]) is None
    with saying(b"HTTP") as address:
        assert first_refusal("abcd", [address]) == f"127.0.0.1:{address[1]}: another process answers"
    assert first_refusal("abcd", [address]) == f"127.0.0.1:{address[1]}: Connection refused"


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("other", [OTHER, replace(OTHER, open_files=1024)])
def test_the_report_and_its_exit_status(other: NodeReport, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def answered(*given: Any) -> tuple[list[NodeReport], list[str], list[str]]:
        asked.append(given)
        return [replace(HEAD, has_model=True), replace(other, has_model=True)], [], ["c is lost"]

    monkeypatch.setattr(cluster_report, "_asked", answered)
    words = ["doctor", "--cluster", "--address", "h:1", "--model", "demo", "--port-range", "20000-20999"]
    done = invoked([*words, *(["--json"] if as_json else [])])
    fits = other == OTHER
    assert done.exit_code == (0 if fits else 1), done.output
    ((address, ports, model),) = asked
    assert (address, ports, model.model) == ("h:1", RANGE, "demo")
    if as_json:
        found = json.loads(done.stdout)
        assert found["notes"][0] == "c is lost" and found["fits"] is fits and len(found["misfits"]) == (not fits)
        assert [node["facts"]["cores"] for node in found["nodes"]] == [2, 2]
    else:
        table = done.stdout.partition("\n\n")[0].splitlines()
        assert len(table) == 3 and "a (head)" in table[1] and table[2].endswith("there")
        assert "  - c is lost\n" in done.stdout
        assert ("every node reaches every other one" in done.stdout) is fits


@pytest.mark.parametrize("words", [["--model", "demo"], ["--cluster", "--port-range", "5-1"]])
def test_flags_that_mean_nothing_are_refused(words: list[str]) -> None:
    done = invoked(["doctor", *words])
    assert done.exit_code == 1 and words[-2] in str(done.exception) and words[-1] in str(done.exception)
