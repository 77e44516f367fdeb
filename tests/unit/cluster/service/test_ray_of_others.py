"""The Ray of others, seen by the launcher: one that is away is named once, one that stays away ends the service."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tandem.cluster.ray_private.local_node import is_listening
from tandem.cluster.ray_private.ray_facts import gcs_answers
from tandem.cluster.service import ray_node
from tandem.cluster.service.joined_ray import PERIOD_S, JoinedRay
from tandem.configs.bundled import read_switches
from tandem.configs.errors import SettingsError


class Head:
    """What the launcher sees of it. asked: how often."""

    def __init__(self, gives_up_s: float) -> None:
        self.now_s = 100.0
        self.is_there = True
        self.asked = 0
        self.said: list[str] = []
        self.ray = JoinedRay("head:6379", self._answers, gives_up_s, self.said.append, lambda: self.now_s)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.ray.check()

    def _answers(self) -> bool:
        self.asked += 1
        return self.is_there


def test_a_head_that_is_away_for_a_while_is_named_once() -> None:
    head = Head(600)
    head.pass_time(100)
    assert head.asked == 100 / PERIOD_S and not head.said
    for _ in range(2):
        head.is_there = False
        head.pass_time(500)
        head.is_there = True
        head.pass_time(10)
    away, again = head.said[:2]
    assert away.startswith("Ray at head:6379 does not answer; requests go on") and again.endswith("answers again")
    assert head.said == [away, again] * 2


def test_a_head_that_stays_away_ends_the_service_before_ray_ends_the_launcher() -> None:
    head = Head(600)
    head.is_there = False
    with pytest.raises(SettingsError, match=r"head:6379: Ray has not answered for 5[89]. s") as caught:
        head.pass_time(600)
    assert caught.value.flag == "--address"


def test_who_listens_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert is_listening(address)
    assert not is_listening(address)


def test_a_gcs_that_is_stopped_does_not_answer() -> None:
    """Any server of gRPC, and one whose kernel alone takes connections."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert gcs_answers(address, 30)
    server.stop(None).wait()
    assert not gcs_answers(address, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        assert not gcs_answers(f"127.0.0.1:{stopped.getsockname()[1]}", 0.2)


def test_a_private_ray_takes_nothing_of_a_clusters_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RAY_REDIS_ADDRESS": "redis:6379", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5"}
    monkeypatch.setattr(os, "environ", environ)
    ray_node.prepare_environment(None)
    assert environ["RAY_REDIS_ADDRESS"] == "redis:6379" and ray_node.gives_up_s() == 600
    ray_node.prepare_environment(tmp_path / "token")
    assert "RAY_REDIS_ADDRESS" not in environ
    assert environ["RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"] == "5", "a user's own stays"


def test_the_switches_name_each_variable_once() -> None:
    switches = read_switches()
    assert switches["grpc_proxy"] == "" and float(switches["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 120
    assert float(switches["RAY_agent_register_timeout_ms"]) > 30_000, "Ray's own"
    assert all(name.startswith("RAY_") for name in switches if name != "grpc_proxy")
