"""`tandem serve --address`: a service in a Ray of others, which others' applications outlive."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.private_redis import private_redis
from tests.support.service import BIN, Service, free_port, wait_for

OTHERS = """
import ray, sys
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    def __call__(self):
        return "still here"

if sys.argv[2] == "deploy":
    serve.start(proxy_location="Disabled")
    serve.run(Other.bind(), name="other", route_prefix="/other")
print(serve.get_app_handle("other").remote().result(timeout_s=60), *sorted(serve.status().applications))
"""


@contextmanager
def ray_head(temp: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray that somebody else runs on this machine: its address, and the environment of who may use it."""
    token = temp / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    address = f"127.0.0.1:{free_port()}"
    options = ("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor", "--num-cpus=4")
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={address.rpartition(':')[2]}", *options]
    log = temp / "ray.out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, f"--temp-dir={temp}", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1"],
            env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: "--block" in log.read_text() or process.poll() is not None, 120, "Ray runs", 0.2)
        assert process.poll() is None, log.read_text()
        yield address, env
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def others(address: str, env: dict[str, str], what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, address, what],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths must be short."""
    service = Service([sys.executable, "-c", ""], 0)
    try:
        service.process.wait(30)
        yield service.temp
    finally:
        service.clean()


def test_a_service_ends_only_its_own_application(short: Path) -> None:
    with ray_head(short) as (address, env), private_redis(("127.0.0.1", free_port(), "word")) as redis:
        assert others(address, env, "deploy") == "still here other"
        port = free_port()
        command = [str(BIN / "tandem"), "serve", "demo", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8"]
        where = ["--address", address, "--redis-url", "env:REDIS_AT", "--port", str(port)]
        service = Service([*command, *where], port, env={**env, "REDIS_AT": redis.url})
        try:
            service.wait_ready()
            answer = service.post("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            said, *apps = others(address, env, "look").split(" other ")
            assert said == "still here" and len(apps) == 1 and apps[0].startswith("tandem-"), apps
            assert service.stop() == 0, service.output
            assert others(address, env, "look") == "still here other", (
                "nothing of the service is left, all of theirs is"
            )
        finally:
            service.clean()
