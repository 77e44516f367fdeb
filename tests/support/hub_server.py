"""A hub of models and adapters on loopback, for huggingface_hub: looking a repository up, listing it, reading files."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MISSING = ("RepoNotFound", "Repository not found")


class Hub:
    """Repositories: files by name, by "organisation/name@revision". gated: names of those that need a token.
    downloads: names of the files that were read whole. before_file: called with the name of one before it is sent."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        self.before_file: Callable[[str], None] = lambda name: None
        self.url = ""

    def files(self, repository: str, revision: str | None) -> dict[str, bytes] | None:
        """Files of a revision; COMMIT is that of main."""
        return self.repositories.get(f"{repository}@{'main' if revision in (None, COMMIT) else revision}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *given: Any) -> None:
        self._hub = hub
        super().__init__(*given)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self._hub, self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/(\w+/\w+)(?:/revision/(\w+))?", path):
            files = hub.files(found[1], found[2])
            if found[1] in hub.gated:
                self._send_error(403, "GatedRepo", "Access to it is restricted")
            elif files is None and hub.files(found[1], None) is not None:
                self._send_error(404, "RevisionNotFound", "Revision not found")
            else:
                self._send_json(None if files is None else {"id": found[1], "sha": COMMIT, "tags": [], "siblings": []})
        elif found := re.fullmatch(r"/api/models/(\w+/\w+)/tree/(\w+)", path):
            files = hub.files(found[1], found[2]) or {}
            self._send_json([{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in files.items()])
        elif found := re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/([\w.-]+)", path):
            self._send_file(found[3], (hub.files(found[1], found[2]) or {})[found[3]])
        else:
            self._send_json(None)

    def _send_json(self, answer: Any) -> None:
        if answer is None:
            self._send_error(404, *MISSING)
        else:
            self._send(200, json.dumps(answer).encode(), {})

    def _send_error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message})

    def _send_file(self, name: str, data: bytes) -> None:
        facts = {"ETag": f'"{name}-{len(data)}"', "X-Repo-Commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            if self.command == "GET":
                self._hub.downloads.append(name)
                self._hub.before_file(name)
            self._send(200, data, facts)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        self._send(206, data[first : last + 1], {**facts, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves an empty hub, and points huggingface_hub at it: it reads HF_ENDPOINT when it is imported, which may have
    been."""
    with hub_server(("127.0.0.1", 0)) as hub:
        point_at(hub.url, monkeypatch)
        yield hub


@contextmanager
def hub_server(address: tuple[str, int]) -> Iterator[Hub]:
    """Serves an empty hub at an address."""
    hub = Hub()
    server = ThreadingHTTPServer(address, lambda *given: Handler(hub, *given))
    server.daemon_threads = True
    hub.url = f"http://{address[0]}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub look at this address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
