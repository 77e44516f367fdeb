"""Keys of every kind, requests that carry them, and a look through all that a service has written for their words."""

from collections.abc import Iterable
from pathlib import Path

import httpx

from tests.support.service import Service

API, ADMIN, METRICS, SENT = "sk-of-the-api", "root-of-the-house", "who-scrapes", "sk-that-nobody-has"
PASSWORD = "word-of-redis"
ASKED = {"model": "demo", "prompt": "Once", "max_tokens": 4, "temperature": 0}


def logs_in(folder: Path) -> dict[str, str]:
    """Every log of Ray and Serve below the temp folder; GCS's tables, which have names that end so too, are data."""
    files = [file for end in ("log", "out", "err") for file in folder.rglob(f"*.{end}")]
    logs = [file for file in files if file.is_file() and "gcs" not in file.relative_to(folder).parts]
    return {str(file): file.read_text(errors="replace") for file in logs}


def logged(service: Service) -> dict[str, str]:
    """All that the service has written where people look: its terminal, its log files, and every log of Ray and
    Serve."""
    return {str(service.log): service.output} | service.log_files() | logs_in(service.temp)


def assert_unsaid(service: Service, secrets: Iterable[str]) -> None:
    found = logged(service)
    assert len(found) > 5 and any(found.values())
    for secret in secrets:
        said = [(name, line) for name, text in found.items() for line in text.splitlines() if secret in line]
        assert not said, said[:3]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask_with_keys(client: httpx.Client) -> None:
    """Requests of all outcomes, with keys of every kind."""
    for key, status in ((None, 401), (SENT, 401), (API, 200), (ADMIN, 200)):
        headers = {} if key is None else bearer(key)
        assert client.post("/v1/completions", json=ASKED, headers=headers).status_code == status
    for key, status in ((None, 401), (API, 401), (METRICS, 200), (ADMIN, 200)):
        headers = {} if key is None else bearer(key)
        assert client.get("/metrics", headers=headers).status_code == status
    for key, status in ((None, 401), (API, 403), (METRICS, 401), (ADMIN, 200)):
        headers = {} if key is None else bearer(key)
        assert client.get("/admin/groups", headers=headers).status_code == status
    for path in ("/", "/docs"):  # without any
        page = client.get(path)
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert client.post("/v1/completions", content=f'{{"key": "{API}"', headers={}).status_code == 401
