"""Services that are refused because they ask others for too little. test_two_gateways.py has one that asks for keys."""

import json
import os
import subprocess
import sys
from typing import Any

from tandem.cluster.cli.client.running_service import with_redis
from tests.support.doors import PASSWORD, logs_in
from tests.support.private_redis import private_redis
from tests.support.ray_head import ray_head, short_folder
from tests.support.service import free_port, wait_for

OPEN: dict[str, Any] = {
    "model_loading_config": {"model_id": "demo", "model_source": "demo"},
    "engine_kwargs": {"device": "cpu", "max_num_seqs": 16},
    "gateway_config": {"auth": "open"},
    "redis_config": {"redis_url": "env:REDIS_AT"},
    "deployment_config": {"num_replicas": 1},
}
DRIVER = """
import json, sys, ray
from ray import serve
from tandem.cluster.app import build
from tandem.configs.errors import SettingsError

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
args = json.loads(sys.argv[4])
try:
    build(args)
except SettingsError as error:
    print(error)
app = build(args | {"allow_unauthenticated_ray": True})
serve.start(http_options={"host": sys.argv[2], "port": int(sys.argv[3])}, logging_config={"log_level": "DEBUG"})
serve.run(app, name="tandem")
"""


def test_a_ray_without_tokens_and_an_open_service_that_others_reach_are_refused() -> None:
    """The second also where Serve was not running when the application was built. The application of this driver has
    its Redis by reference."""
    with (
        private_redis(("127.0.0.1", free_port(), PASSWORD)) as redis,
        short_folder() as temp,
        ray_head(temp, asks_for_token=False) as (address, env),
    ):
        # an address that other machines do not reach either, only Serve does not know that
        command = [sys.executable, "-c", DRIVER, address, "127.0.0.2", str(free_port()), json.dumps(OPEN)]
        env = {**os.environ, **env, "REDIS_AT": redis.url}
        done = subprocess.run(command, env=env, cwd=temp, capture_output=True, text=True, timeout=240)
        assert "asks nobody for a token" in done.stdout and "`allow_unauthenticated_ray: true`" in done.stdout
        assert done.returncode != 0
        logs = logs_in(temp)
        assert any("on loopback only, and http_options has host 127.0.0.2" in text for text in logs.values())
        wait_for(lambda: with_redis(redis.url, lambda client: client.command("DBSIZE")), 60, "this Redis is used", 0.2)
        outputs = logs_in(temp) | {"stdout": done.stdout, "stderr": done.stderr}
        assert any("DEBUG " in text for text in outputs.values())
        assert not [name for name, text in outputs.items() if PASSWORD in text]
