"""Services that ask for keys: TLS on the port, secrets by reference, and no secret in any line that a service logs."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem.cluster.gateway.http.tls import client_context
from tandem.workers.messages.channel import new_secret
from tests.support.certificates import Authority
from tests.support.plain_http import plain_http
from tests.support.private_redis import private_redis
from tests.support.service import BIN, REPOSITORY, Service, free_port, run_tandem, wait_for

API, ADMIN, METRICS, SENT = "sk-of-the-api", "root-of-the-house", "who-scrapes", "sk-that-nobody-has"
PASSWORD = "word-of-redis"
ASKED = {"model": "demo", "prompt": "Once", "max_tokens": 4, "temperature": 0}
SMALL = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8")


def logged(service: Service) -> dict[str, str]:
    """All that the service has written where people look: its terminal, and every log of Ray and Serve."""
    files = [service.log, *service.temp.rglob("*.log"), *service.temp.rglob("*.out"), *service.temp.rglob("*.err")]
    return {str(file): file.read_text(errors="replace") for file in files if file.is_file()}


def assert_unsaid(service: Service, secrets: Iterable[str]) -> None:
    found = logged(service)
    assert len(found) > 5 and any(found.values())
    for secret in secrets:
        said = [(name, line) for name, text in found.items() for line in text.splitlines() if secret in line]
        assert not said, said[:3]


def ask_with_keys(client: httpx.Client) -> None:
    """Requests of all outcomes, with keys of every kind."""
    for key, status in ((None, 401), (SENT, 401), (API, 200), (ADMIN, 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert client.post("/v1/completions", json=ASKED, headers=headers).status_code == status
    for key, status in ((None, 401), (API, 401), (METRICS, 200), (ADMIN, 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert client.get("/metrics", headers=headers).status_code == status
    assert client.post("/v1/completions", content=f'{{"key": "{API}"', headers={}).status_code == 401


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
        command = [str(BIN / "tandem"), "serve", "demo", *SMALL, *doors, *keys, "--port", str(port)]
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
            shown = run_tandem("status", temp=service.temp)
            assert service.url in shown.stdout, shown
            for url in ((), ("--url", f"https://localhost:{port}")):
                asked = ("Once", *url, "--max-tokens", "4", "--api-key", f"file:{tmp_path / 'keys'}")
                done = run_tandem("complete", *asked, temp=service.temp)
                assert done.returncode == 0 and done.stdout.strip(), done
            assert_unsaid(service, (API, ADMIN, METRICS, SENT, PASSWORD))
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


LOOK_INSIDE = """
import json, sys
import ray

def secrets_of(_):
    import gc
    ours = [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("tandem.")]
    fields = [(name, value) for thing in ours for name, value in getattr(thing, "__dict__", {}).items()]
    values = [value if name.endswith("secret") else getattr(value, "secret", None) for name, value in fields]
    return [value for value in values if isinstance(value, str)]

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
names = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "tandem" in actor["name"]]
asked = [ray.get_actor(**name).__ray_call__.remote(secrets_of) for name in names]
found = sorted({secret for secrets in ray.get(asked, timeout=60) for secret in secrets})
print(json.dumps([found, ray._private.worker.global_worker.node.address_info["webui_url"]]))
"""
"""Asks the processes of a service for the secrets of its channels, over Ray, as only who may use this Ray can."""


def look_inside(service: Service) -> tuple[list[str], str]:
    """The secrets of the channels, and the address of Ray's REST API."""
    words = [word for process in service.descendants() for word in process.cmdline()]
    address = next(word.partition("=")[2] for word in words if re.match(r"--gcs-address=.", word))
    command = [sys.executable, "-c", LOOK_INSIDE, address]
    done = subprocess.run(command, env=service.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    secrets, dashboard = json.loads(done.stdout.splitlines()[-1])
    return secrets, f"http://{dashboard}"


def make_tenants(client: httpx.Client) -> list[str]:
    """Two keys of a new tenant, both of which were used."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    made = client.post("/admin/tenants", json={"name": "acme", "tokens_per_minute": 100_000}, headers=headers)
    assert made.status_code == 201, made.text
    rotated = client.post("/admin/tenants/acme/rotate-key", json={"grace_s": 600}, headers=headers)
    keys = [made.json()["key"], rotated.json()["key"]]
    for key in keys:
        sent = {"authorization": f"Bearer {key}"}
        assert client.post("/v1/completions", json=ASKED, headers=sent).status_code == 200
        assert client.get("/admin/tenants", headers=sent).status_code == 403
    return keys


class Rest:
    """Serve's REST API, asked with the token of its Ray."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {token}"}

    def text(self) -> str:
        """What it says of the applications: their whole configuration, among other things."""
        answer = plain_http.get(f"{self.url}/api/serve/applications/", headers=self._headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.text

    def deployed(self) -> tuple[str, float]:
        """The state of the application, and when it was deployed."""
        (application,) = json.loads(self.text())["applications"].values()
        return application["status"], application["last_deployed_time_s"]


def assert_nowhere(service: Service, rest: Rest, secrets: Collection[str]) -> None:
    """No line of a log, no command line and no answer of Serve's REST API has a secret."""
    assert_unsaid(service, secrets)
    commands = [" ".join(process.cmdline()) for process in service.descendants()]
    assert any(line.startswith("ray::ServeReplica:tandem:") for line in commands)
    shown = rest.text()
    assert "env:ROOT" in shown
    for secret in secrets:
        assert secret not in shown
        assert not [line for line in commands if secret in line]


def test_under_serve_run_no_secret_is_logged_or_shown(tmp_path: Path) -> None:
    """At INFO, at which Serve logs the arguments of the application that it builds, and deployed anew at DEBUG."""
    (tmp_path / "keys").write_text(f"{API}\n")
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs" / "serve" / "demo.yaml").read_text())
    config["logging_config"] = {"log_level": "INFO", "enable_access_log": True}
    (application,) = config["applications"]
    application["args"]["engine_kwargs"] |= {"dtype": "float32", "device": "cpu"}
    application["args"]["gateway_config"] = {
        "api_key": f"file:{tmp_path / 'keys'}", "admin_api_key": "env:ROOT", "metrics_api_key": "env:SCRAPE"
    }  # fmt: skip
    application["args"]["redis_config"] = {"redis_url": "env:REDIS_AT"}
    with private_redis(("127.0.0.1", free_port(), PASSWORD)) as redis:
        config["http_options"]["port"] = port = free_port()
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", "ROOT": ADMIN, "SCRAPE": METRICS}
        env |= {"REDIS_AT": redis.url, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
        (tmp_path / "token").write_text(token := new_secret())
        service = Service([str(BIN / "serve"), "run", str(file)], port, env=env)
        try:
            service.wait_ready()
            with httpx.Client(base_url=service.url, timeout=60) as client:
                ask_with_keys(client)
                secrets = {API, ADMIN, METRICS, SENT, PASSWORD, *make_tenants(client)}
                secrets.add(token)
                channels, dashboard = look_inside(service)
                rest = Rest(dashboard, token)
                assert channels and all(len(secret) == 64 for secret in channels)
                assert any("REDIS_AT" in text for text in logged(service).values()), (
                    "the arguments are logged, as references"
                )
                assert_nowhere(service, rest, {*secrets, *channels})

                config["logging_config"]["log_level"] = "DEBUG"
                application["args"]["engine_kwargs"]["max_num_seqs"] = 32
                file.write_text(yaml.safe_dump(config))
                _, before_s = rest.deployed()
                command = [str(BIN / "serve"), "deploy", str(file), "--address", dashboard]
                done = subprocess.run(command, env=service.environment, capture_output=True, text=True, timeout=60)
                assert done.returncode == 0, done.stderr
                wait_for(lambda: (now := rest.deployed())[0] == "RUNNING" and now[1] > before_s, 90, "it runs", 0.5)
                wait_for(lambda: client.get("/readyz").status_code == 200, 60, "it serves")
                ask_with_keys(client)
                assert any(" DEBUG " in text or "DEBUG " in text for text in logged(service).values())
                assert_nowhere(service, rest, {*secrets, *look_inside(service)[0]})
            service.stop()
        finally:
            service.clean()
