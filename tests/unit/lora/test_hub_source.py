"""Adapters from a hub (hf://organisation/repository): through huggingface_hub to a server on loopback that answers as a
hub does, the three requests that reading a file takes."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.lora.peft.adapter_source import local_folder
from tandem.workers.lora.peft.peft_folder import CONFIG_FILE, WEIGHT_FILE, adapter_digest
from tandem.workers.messages.errors import AdapterUnreadable
from tandem.workers.messages.request import AdapterRef
from tandem.workers.models.spec.families import load_spec

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE = DEMO / "adapters" / "pirate"
DIGEST = adapter_digest(PIRATE)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories: files by name, by "organisation/name@revision"."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.url = ""

    def files(self, repository: str, revision: str | None) -> dict[str, bytes] | None:
        return self.repositories.get(f"{repository}@{revision or 'main'}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *given: Any) -> None:
        self._hub = hub
        super().__init__(*given)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/(\w+/\w+)(?:/revision/(\w+))?", path):
            files = self._hub.files(found[1], found[2])
            self._send_json(None if files is None else {"id": found[1], "sha": COMMIT, "tags": [], "siblings": []})
        elif found := re.fullmatch(r"/api/models/(\w+/\w+)/tree/(\w+)", path):
            files = self._hub.files(found[1], found[2]) or {}
            self._send_json([{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in files.items()])
        elif found := re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/([\w.]+)", path):
            self._send_range((self._hub.files(found[1], found[2]) or {})[found[3]])
        else:
            self._send_json(None)

    def _send_json(self, answer: Any) -> None:
        missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        if answer is None:
            self._send(404, b'{"error": "Repository not found"}', missing)
        else:
            self._send(200, json.dumps(answer).encode(), {})

    def _send_range(self, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert wanted is not None, self.headers
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        self._send(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With the pirate as team/pirate. HF_ENDPOINT is read when huggingface_hub is imported, which may have been."""
    hub = Hub()
    hub.repositories["team/pirate@main"] = {name: (PIRATE / name).read_bytes() for name in (CONFIG_FILE, WEIGHT_FILE)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(hub, *given))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join(10)


def ref(source: str) -> AdapterRef:
    return AdapterRef(name="pirate", digest=DIGEST, source=source)


def test_a_repository_is_listed_and_read_by_ranks(hub: Hub, tmp_path: Path) -> None:
    check = AdapterChecker(load_spec(DEMO / "model"), 16, DEMO / "model", tmp_path / "gateway")
    assert check("hf://team/pirate") == DIGEST
    assert local_folder(ref("hf://team/pirate"), tmp_path / "rank") == tmp_path / "rank" / DIGEST


def test_a_revision_is_the_one_that_is_named(hub: Hub, tmp_path: Path) -> None:
    shout = {name: (PIRATE.parent / "shout" / name).read_bytes() for name in (CONFIG_FILE, WEIGHT_FILE)}
    hub.repositories["team/pirate@v2"] = shout
    check = AdapterChecker(load_spec(DEMO / "model"), 16, DEMO / "model", tmp_path)
    assert check("hf://team/pirate@v2") == adapter_digest(PIRATE.parent / "shout")
    assert check("hf://team/pirate") == DIGEST


def test_what_is_not_there_is_said_and_found_once_it_is(hub: Hub, tmp_path: Path) -> None:
    weights = hub.repositories["team/pirate@main"].pop(WEIGHT_FILE)
    with pytest.raises(AdapterUnreadable, match=f"there is no team/pirate/{WEIGHT_FILE}"):
        local_folder(ref("hf://team/pirate"), tmp_path)
    with pytest.raises(AdapterUnreadable, match=r"there is no team/other.* \(repository not found\)"):
        local_folder(ref("hf://team/other"), tmp_path)
    hub.repositories["team/pirate@main"][WEIGHT_FILE] = weights
    hub.repositories["team/other@main"] = hub.repositories["team/pirate@main"]
    assert local_folder(ref("hf://team/other"), tmp_path) == tmp_path / DIGEST, "nothing remembers what was missing"
