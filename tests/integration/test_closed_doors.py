"""Services that ask for keys: TLS on the port, secrets by reference, and no secret in any line that a service logs; and
services that are refused because they ask others for too little."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.cli.client.running_service import with_redis
from tandem.cluster.gateway.http.tls import client_context
from tests.support.certificates import Authority
from tests.support.doors import ADMIN, API, METRICS, PASSWORD, SENT, ask_with_keys, assert_unsaid, logs_in
from tests.support.private_redis import private_redis
from tests.support.ray_head import ray_head, short_folder
from tests.support.service import BIN, Service, free_port, run_tandem, wait_for
from tests.support.verbs import run_verb_of

SMALL = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_service_with_tls_and_keys_by_reference(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("tandem.example")
    (tmp_path / "keys").write_text(f"{API}\n")
    with private_redis(("127.0.0.1", free_port(), PASSWORD)) as redis:
        port = free_port()
        doors = ("--ssl-certfile", issued.certfile, "--ssl-keyfile", issued.keyfile, "--redis-url", "env:REDIS_AT")
        keys = (
            "--api-key",
            f"file:{tmp_path / 'keys'}",
            "--admin-api-key",
            "env:ROOT",
            "--metrics-api-key",
            "env:SCRAPE",
        )
        lines = ("--enable-log-requests", "--log-level", "debug")
        command = [str(BIN / "tandem"), "serve", "demo", *SMALL, *doors, *keys, *lines, "--port", str(port)]
        env = {"REDIS_AT": redis.url, "ROOT": ADMIN, "SCRAPE": METRICS}
        service = Service(command, port, env=env)
        service.url = f"https://127.0.0.1:{port}"
        context = client_context(Path(issued.certfile).read_text())

        def serves() -> bool:
            assert service.process.poll() is None, service.output
            return f"on {service.url}/v1" in service.output

        try:
            wait_for(serves, 120, "serving")
            service.descendants()
            with httpx.Client(base_url=service.url, verify=context, timeout=60) as client:
                ask_with_keys(client)
            shown = run_verb_of(service.temp, "status")
            assert service.url in shown.stdout, shown
            for url in ((), ("--url", f"https://localhost:{port}")):
                asked = ("Once", *url, "--max-tokens", "4", "--api-key", f"file:{tmp_path / 'keys'}")
                done = run_verb_of(service.temp, "complete", *asked)
                assert done.returncode == 0 and done.stdout.strip(), done
            assert_unsaid(service, (API, ADMIN, METRICS, SENT, PASSWORD))
            asked = "".join(text for name, text in service.log_files().items() if name.startswith("requests-"))
            assert "code=invalid_api_key" in asked and '"GET /metrics HTTP/1.1" 401' in asked
            commands = [" ".join(process.cmdline()) for process in service.descendants()]
            assert not [line for line in commands if API in line or ADMIN in line or PASSWORD in line]
            assert service.stop() == 0, service.output
            assert API not in service.output and PASSWORD not in service.output
            service.check_gone()
        finally:
            service.clean()


def test_certificates_that_do_not_fit_end_the_start_before_anything_runs(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    done = run_tandem("serve", "demo", "--ssl-certfile", one.certfile, "--ssl-keyfile", other.keyfile, temp=tmp_path)
    assert done.returncode == 2 and "--ssl-keyfile" in done.stderr, done
    assert "is not the key of the certificate" in done.stderr
    assert "starting" not in done.stdout + done.stderr


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
