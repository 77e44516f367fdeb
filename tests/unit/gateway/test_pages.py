"""The pages for a browser, without one: their headers, what may be cached, what is not there, what the wheel must hold.
In a browser: tests/integration/test_ui.py."""

import dataclasses
import gzip
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.ui.pages import STATIC, TYPES, static_files
from tandem.configs.schema import GatewaySettings
from tandem.workers.engine.base.stats import OffloadStats
from tests.support.fake_backend import FakeBackend
from tests.support.fake_engine import FakeEngine
from tests.unit.gateway.rig import Rig, error_of, gateway

PAGES = ("/", "/docs")
ASSETS = sorted(name for name in static_files() if not name.endswith(".html"))


class References(HTMLParser):
    """What a page names, and what it holds that a strict policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [value for name in ("src", "href") if (value := given.get(name))]
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []


def references(text: str) -> References:
    parser = References()
    parser.feed(text)
    return parser


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_needs_no_key_and_names_only_what_is_here(path: str) -> None:
    async with gateway(auth=StaticKeys(api_keys=["k"], admin_keys=["a"])) as rig:
        answer = await rig.client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
        page = references(answer.text)
        assert not page.inline and page.found
        for name in page.found:
            assert not re.match(r"\w+:|/", name), "relative, so that a proxy may put the service under any path"
            assert (await rig.client.get(f"/{name.removeprefix('./')}")).status_code == 200, name
        assert (await rig.client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", PAGES)
async def test_the_policy_of_a_page_is_strict(rig: Rig, path: str) -> None:
    headers = (await rig.client.get(path)).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"] and "http" not in headers["content-security-policy"]
    if path == "/":
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ASSETS)
async def test_files_are_kept_by_browsers_if_their_names_bear_a_digest(rig: Rig, name: str) -> None:
    answer = await rig.client.get(f"/ui/{name}")
    assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-type"].startswith(TYPES[f".{name.rpartition('.')[2]}"])
    kept = "no-cache" if name == "LICENSES.txt" else "public, max-age=31536000, immutable"
    assert answer.headers["cache-control"] == kept
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [*PAGES, f"/ui/{ASSETS[0]}"])
async def test_what_a_browser_has_already_is_not_sent_again(rig: Rig, path: str) -> None:
    etag = (await rig.client.get(path)).headers["etag"]
    for given in (etag, etag.removeprefix("W/"), f'"other", {etag}', "*"):
        answer = await rig.client.get(path, headers={"if-none-match": given})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    for given in ('"other"', "", "W/"):
        assert (await rig.client.get(path, headers={"if-none-match": given})).status_code == 200, given
    other = (await rig.client.get("/docs" if path == "/" else "/")).headers["etag"]
    assert other != etag


async def test_files_are_packed_for_who_takes_that(rig: Rig) -> None:
    (script,) = (name for name in ASSETS if name.startswith("app-") and name.endswith(".js"))
    plain = static_files()[script].body
    for given, is_packed in (("gzip", True), ("br, GZIP;q=0.5", True), ("identity", False), ("gzip;q=0", False)):
        request = rig.client.build_request("GET", f"/ui/{script}", headers={"accept-encoding": given})
        answer = await rig.client.send(request, stream=True)
        raw = b"".join([piece async for piece in answer.aiter_raw()])
        assert (answer.headers.get("content-encoding") == "gzip") is is_packed, given
        assert (gzip.decompress(raw) if is_packed else raw) == plain
        assert answer.headers["vary"] == "accept-encoding" and answer.headers["content-length"] == str(len(raw))
        assert not is_packed or len(raw) < len(plain) / 2
    icon = next(name for name in ASSETS if name.endswith(".svg"))
    assert "content-encoding" not in (await rig.client.get(f"/ui/{icon}")).headers, "too small to gain"


async def test_heads_and_what_is_not_there(rig: Rig) -> None:
    for path in (*PAGES, f"/ui/{ASSETS[0]}"):
        assert (await rig.client.head(path)).headers["etag"] == (await rig.client.get(path)).headers["etag"]
        assert (await rig.client.post(path)).status_code == 405
    names = ("nothing.js", "index.html", "docs.html", "..%2fpages.py", "%2e%2e/pages.py", "pages.py", ".", "x/y.js", "")
    for name in names:
        answer = await rig.client.get(f"/ui/{name}")
        assert answer.status_code == 404 and error_of(answer)["code"] == "not_found", name
    for path in ("/docs/", "/ui", "/index.html", "/redoc", "/favicon.ico"):
        assert (await rig.client.get(path)).status_code == 404, path


async def test_the_pages_may_be_left_out() -> None:
    async with gateway(settings=GatewaySettings(disable_ui=True)) as rig:
        for path in (*PAGES, f"/ui/{ASSETS[0]}"):
            answer = await rig.client.get(path)
            assert answer.status_code == 404 and error_of(answer)["code"] == "not_found"
        paths = (await rig.client.get("/openapi.json")).json()["paths"]
        assert not {"/", "/docs", "/ui/{name}"} & paths.keys() and "/v1/models" in paths
    async with gateway(settings=GatewaySettings(disable_fastapi_docs=True)) as rig:
        assert [(await rig.client.get(path)).status_code for path in ("/", "/docs", "/openapi.json")] == [200, 404, 404]


async def test_a_service_that_sleeps_or_has_no_group_still_has_its_pages() -> None:
    for backend in (FakeBackend(sleeps=True), FakeBackend(is_ready=False)):
        async with gateway(backend) as rig:
            assert [(await rig.client.get(path)).status_code for path in PAGES] == [200, 200]


async def test_the_pages_work_under_a_path_that_the_server_takes_away(rig: Rig) -> None:
    """As behind Serve's route_prefix: the path has the prefix, and root_path says so."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/llm/",
        "raw_path": b"/llm/",
        "root_path": "/llm",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": None,
        "server": ("localhost", 80),
    }
    await rig.app(scope, receive, send)
    assert sent[0]["status"] == 200 and b"<title>Tandem" in sent[1]["body"]


GROUP = GroupRecord(
    group="g1", life=1, model="digest", state="serving", host="node", pid=7, waiting=1, running=2, kv_used=0.5
)


async def test_groups_are_for_admins(rig: Rig) -> None:
    counts = ("block_bytes", "host_slots", "host_blocks", "failed_blocks", "swapped_out", "recomputed", "loaded_tokens")
    offload = OffloadStats(**dict.fromkeys(counts, 0), blocks={}, copy_s={}, disk_disabled="full")
    stats = msgspec.msgpack.encode(dataclasses.replace(FakeEngine(None).stats(), offload=offload))
    report = GroupReport(group="g1", model="echo", stats=stats, rank_pids=[8, 9])
    young = msgspec.structs.replace(GROUP, group="g2", state="loading", loaded_bytes=1, total_bytes=4)
    backend = FakeBackend(fleet=((GROUP, report), (young, None)))
    async with gateway(backend, auth=StaticKeys(api_keys=["k"], admin_keys=["a"])) as closed:
        statuses = [
            (await closed.client.get("/admin/groups", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("", "k", "a")
        ]
        assert statuses == [401, 403, 200]
        answer = await closed.client.get("/admin/groups", headers={"authorization": "Bearer a"})
    serving, loading = answer.json()["data"]
    assert (serving["id"], serving["state"], serving["node"], serving["pid"]) == ("g1", "serving", "node", 7)
    assert (serving["running"], serving["waiting"], serving["kv_usage"]) == (2, 1, 0.5)
    assert serving["ranks"] == [{"rank": 0, "pid": 8}, {"rank": 1, "pid": 9}]
    assert serving["disk_disabled"] == "full"
    assert (loading["state"], loading["ranks"], loading["disk_disabled"]) == ("loading", [], None)
    assert (loading["loaded_bytes"], loading["total_bytes"]) == (1, 4)
    assert (await rig.client.get("/admin/groups")).json() == {"object": "list", "data": []}


def test_licences_are_beside_what_was_built() -> None:
    text = static_files()["LICENSES.txt"].body.decode()
    for words in ("preact 1", "marked 1", "swagger-ui-dist 5", "MIT License", "Apache License", "DOMPurify", "React"):
        assert words in text, words
