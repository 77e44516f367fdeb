"""Services that ask for keys: TLS on the port, secrets by reference, and no secret in any line that a service logs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem.cluster.gateway.http.tls import client_context
from tests.support.certificates import Authority
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


def test_under_serve_run_arguments_and_logs_hold_references_only(tmp_path: Path) -> None:
    """At INFO, at which Serve logs the arguments of the application that it builds."""
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
        service = Service([str(BIN / "serve"), "run", str(file)], port, env={**env, "REDIS_AT": redis.url})
        try:
            service.wait_ready()
            with httpx.Client(base_url=service.url, timeout=60) as client:
                ask_with_keys(client)
            assert any("REDIS_AT" in text for text in logged(service).values()), (
                "the arguments are logged, as references"
            )
            assert_unsaid(service, (API, ADMIN, METRICS, SENT, PASSWORD))
            service.stop()
        finally:
            service.clean()
