"""`tandem serve --address`: a service in a Ray of others, which others' applications outlive."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.private_redis import private_redis
from tests.support.ray_head import ray_head, short_folder
from tests.support.service import BIN, Service, free_port

OTHERS = """
import ray, sys, time
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    def __call__(self):
        return "still here"

if sys.argv[2] == "deploy":
    serve.start(proxy_location="Disabled")
    serve.run(Other.bind(), name="other", route_prefix="/other")
while sys.argv[2] == "alone" and len(serve.status().applications) > 1:
    time.sleep(0.5)
print(serve.get_app_handle("other").remote().result(timeout_s=60), *sorted(serve.status().applications))
"""
"""Run with "alone" it waits until theirs is the only application."""


def others(address: str, env: dict[str, str], what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, address, what],
        env={**os.environ, **env, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"},  # it has no event loop
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def short() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


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
            # on a busy machine Serve goes on with the deletion after the launcher has ended
            assert others(address, env, "alone") == "still here other"
        finally:
            service.clean()
