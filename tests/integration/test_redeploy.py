"""A new version of an application under Ray Serve: every replica is replaced, the service stays what it was."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.plain_http import plain_http
from tests.support.ray_head import ray_head, short_folder
from tests.support.service import free_port, wait_for

ADMIN = {"authorization": "Bearer root"}
ARGS: dict[str, Any] = {
    "model_loading_config": {"model_id": "demo", "model_source": "demo"},
    "engine_kwargs": {"batch_invariant": True, "device": "cpu", "max_num_seqs": 16, "shutdown_timeout": 20},
    "gateway_config": {"admin_api_key": "root"},
    "deployment_config": {"num_replicas": 1},
}
DRIVER = """
import json, sys, ray
from ray import serve
from tandem.cluster.app import build

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
app = build(json.loads(sys.argv[4]))
serve.start(http_options={"host": sys.argv[2], "port": int(sys.argv[3])}, logging_config={"log_level": "WARNING"})
serve.run(app, name="tandem")
"""
DEPLOY_S = 240.0


class Cluster:
    """A Ray with Serve in it. temp: its folder."""

    def __init__(self, address: str, env: dict[str, str], temp: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.temp = temp
        self._address = address
        self._env = {**os.environ, **env}

    def deploy(self, args: dict[str, Any], host: str = "127.0.0.1") -> subprocess.CompletedProcess[str]:
        """Returns when the version runs, or why it does not."""
        command = [sys.executable, "-c", DRIVER, self._address, host, str(self.port), json.dumps(args)]
        return subprocess.run(command, env=self._env, cwd=self.temp, capture_output=True, text=True, timeout=DEPLOY_S)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with short_folder() as temp, ray_head(temp) as (address, env):
        yield Cluster(address, env, temp)


def groups(cluster: Cluster) -> set[str]:
    """The groups that the gateway which answers knows."""
    lines = plain_http.get(cluster.url + "/metrics", timeout=30).text.splitlines()
    found = (line for line in lines if line.startswith("tandem:num_requests_running{"))
    return {line.partition('engine="')[2].partition('"')[0] for line in found}


class Streams:
    """Greedy streams of one prompt, one after the other on threads of their own, and requests without a key beside
    them, until stop(). ends: when each began and ended, and its last line; texts: what those said that ended well."""

    def __init__(self, cluster: Cluster, key: str, threads: int) -> None:
        self.ends: list[tuple[float, float, str]] = []
        self.texts: set[str] = set()
        self.keyless: list[int] = []
        self._cluster = cluster
        self._key = key
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(threads + 1)
        self._loops = [self._pool.submit(self._stream_on) for _ in range(threads)]
        self._loops.append(self._pool.submit(self._knock))

    def stop(self) -> None:
        self._stop.set()
        for loop in self._loops:
            loop.result(120)
        self._pool.shutdown()

    def _stream_on(self) -> None:
        asked = {
            "model": "demo",
            "prompt": "Once",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {self._key}"}
        while not self._stop.is_set():
            began_s, last, pieces = time.monotonic(), "", list[str]()
            try:
                with plain_http.stream(
                    "POST", self._cluster.url + "/v1/completions", json=asked, headers=headers, timeout=90
                ) as answer:
                    for line in answer.iter_lines():
                        last = line or last
                        if "error" in line or answer.status_code != 200:
                            last = f"{answer.status_code}: {line}"
                            break
                        if line.startswith("data: {"):
                            pieces += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
                    else:
                        self.texts.add("".join(pieces))
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
            self.ends.append((began_s, time.monotonic(), last))

    def _knock(self) -> None:
        asked = {"model": "demo", "prompt": "Once", "max_tokens": 1}
        while not self._stop.wait(0.1):
            self.keyless.append(
                plain_http.post(self._cluster.url + "/v1/completions", json=asked, timeout=90).status_code
            )


def changed(**engine: Any) -> dict[str, Any]:
    return ARGS | {"engine_kwargs": ARGS["engine_kwargs"] | engine}


def test_a_redeploy_keeps_tenants_keys_and_running_streams(cluster: Cluster) -> None:
    done = cluster.deploy(ARGS)
    assert done.returncode == 0, done.stderr
    made = plain_http.post(cluster.url + "/admin/tenants", json={"name": "acme"}, headers=ADMIN, timeout=60)
    assert made.status_code == 201, made.text
    key = made.json()["key"]
    (old,) = groups(cluster)
    streams = Streams(cluster, key, 1)
    try:
        wait_for(lambda: streams.ends, 120, "streams run")
        began_s = time.monotonic()
        done = cluster.deploy(changed(max_num_seqs=8))
        assert done.returncode == 0, done.stderr
        ended_s = time.monotonic()
        wait_for(lambda: old not in groups(cluster) and len(groups(cluster)) == 1, 60, "the group is another")
    finally:
        streams.stop()
    print(f"redeployed in {ended_s - began_s:.1f} s, {len(streams.ends)} streams")
    assert {end for _, _, end in streams.ends} == {"data: [DONE]"}
    assert len(streams.texts) == 1, "a stream that moved says what all say"
    assert any(began < began_s < end for began, end, _ in streams.ends), "one ran when the redeploy began"
    assert streams.keyless and set(streams.keyless) == {401}, "keys are required all the time"
    asked = {"model": "demo", "prompt": "Once", "max_tokens": 4}
    answer = plain_http.post(
        cluster.url + "/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, "the tenant and its key are there"


def test_a_ray_without_tokens_and_an_open_service_that_others_reach_are_refused() -> None:
    """The second also where Serve was not running when the application was built."""
    args = ARGS | {"gateway_config": {"auth": "open"}}
    with short_folder() as temp, ray_head(temp, asks_for_token=False) as (address, env):
        cluster = Cluster(address, env, temp)
        done = cluster.deploy(args)
        assert done.returncode != 0
        assert "asks nobody for a token" in done.stderr and "`allow_unauthenticated_ray: true`" in done.stderr
        # an address that other machines do not reach either, only Serve does not know that
        done = cluster.deploy(args | {"allow_unauthenticated_ray": True}, host="127.0.0.2")
        assert done.returncode != 0
        logs = [file.read_text(errors="replace") for file in temp.rglob("*.log") if file.is_file()]
        assert any("on loopback only, and http_options has host 127.0.0.2" in text for text in logs)
