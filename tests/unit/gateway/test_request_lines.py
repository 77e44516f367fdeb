"""Lines about requests: one for each answer, one for each request that has ended; never texts, queries or keys."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.records.request_log import AccessLog, RequestLines, open_request_lines, write_request_line
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.logs.log_files import REQUESTS, LogPlace
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation, Tenancy
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.schema import GatewaySettings, LogFormat, LogSettings
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import EOS, MODEL, Rig, gateway

KEY, SAID = "sk-of-acme", "the lighthouse keeper's cat"


class Limited(Tenancy):
    """Refuses prompts of many tokens."""

    async def admit(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
    ) -> Reservation:
        if prompt_tokens > 100:
            raise OverLimit("too many", reason="tokens", retry_after_s=1.0, code="rate_limit_exceeded")
        return Reservation(tenant)


@pytest.fixture
def lines(tmp_path: Path, form: LogFormat) -> Iterator[RequestLines]:
    """Lines of a gateway `g`, in a file."""
    logger = logging.getLogger(REQUESTS)
    place = LogPlace(base=str(tmp_path), run="run", form=form)
    facts = ServiceFacts(single_node=True, device="cpu", open_port=True, logs=place)
    settings = LogSettings(enable_log_requests=True, disable_access_log_for_endpoints="/health, /metrics")
    yield open_request_lines(facts, "g", settings)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def written(tmp_path: Path) -> str:
    return (tmp_path / "run" / "requests-g.log").read_text()


async def ask(rig: Rig) -> None:
    """Requests of all outcomes."""
    key = {"authorization": f"Bearer {KEY}"}

    async def post(body: Any, request_id: str, path: str = "/v1/completions", headers: dict[str, str] = key) -> int:
        content = body if isinstance(body, str) else json.dumps(body)
        sent = {"content-type": "application/json", "x-request-id": request_id, **headers}
        return (await rig.client.post(path, content=content, headers=sent)).status_code

    asked = {"prompt": SAID, "max_tokens": 3}
    assert await post(asked, "whole") == 200
    assert await post({**asked, "stream": True}, "streamed") == 200
    assert await post(asked, "keyless", headers={}) == 401
    assert await post(f'{{"{SAID}"', "broken") == 400
    assert await post({**asked, "model": SAID}, "nobody") == 404
    assert await post({**asked, "prompt": SAID * 9}, "much") == 429
    assert await post({"input": SAID}, "embedded", "/v1/embeddings") == 200
    assert await post({"prompt": SAID}, "counted", "/tokenize") == 200
    assert (await rig.client.get(f"/v1/models?key={KEY}", headers=key)).status_code == 200
    assert (await rig.client.get('/v1/a"b c%0A%C3%A9' + "x" * 300, headers=key)).status_code == 404
    assert (await rig.client.get("/health")).status_code == 200
    await rig.settle()


@pytest.mark.parametrize("form", ["text", "json"])
async def test_each_outcome_has_its_lines(tmp_path: Path, lines: RequestLines, form: LogFormat) -> None:
    settings = GatewaySettings(api_keys=(KEY,))
    async with gateway(
        settings=settings,
        auth=StaticKeys((KEY,), (), ()),
        tenancy=Limited(),
        access_log=lines.access_log,
        records=RequestRecords(lines.on_record),
    ) as rig:
        await ask(rig)
    assert not logging.getLogger(REQUESTS).propagate, "no other file has them"
    text = written(tmp_path)
    assert KEY not in text and SAID not in text and "lighthouse" not in text
    found = text.splitlines()
    assert len(found) == 10 + 7, "an answer has a line, /health none; what generates has another"
    if form == "text":
        check_text(found)
    else:
        check_json([json.loads(line) for line in found])


def check_text(found: list[str]) -> None:
    ends = [line.partition(": ")[2] for line in found]
    (whole,) = [end for end in ends if end.startswith("request_id=whole ")]
    assert f"outcome=length tenant=default model={MODEL} prompt_tokens=28 cached_tokens=" in whole
    assert " completion_tokens=3 first_token_s=0." in whole and " duration_s=0." in whole
    (much,) = [end for end in ends if end.startswith("request_id=much ")]
    assert "outcome=rejected status=429 code=rate_limit_exceeded tenant=default" in much
    assert any(end.startswith('127.0.0.1:123 - "POST /v1/completions HTTP/1.1" 200 0.') for end in ends)
    assert any('"GET /v1/models?... HTTP/1.1" 200 ' in end for end in ends)
    assert any('"GET /v1/a?b?c??x' in end and 'x... HTTP/1.1" 404 ' in end for end in ends)


def check_json(found: list[dict[str, Any]]) -> None:
    ended = {line["request_id"]: line for line in found if "outcome" in line}
    assert ended.keys() == {"whole", "streamed", "keyless", "broken", "nobody", "much", "embedded"}
    codes = {name: (line.get("status"), line.get("code")) for name, line in ended.items()}
    assert codes == {
        "whole": (None, None),
        "streamed": (None, None),
        "embedded": (None, None),
        "keyless": (401, "invalid_api_key"),
        "broken": (400, "invalid_json"),
        "nobody": (404, "model_not_found"),
        "much": (429, "rate_limit_exceeded"),
    }
    assert {ended[name]["outcome"] for name in ("keyless", "broken", "nobody", "much")} == {"rejected"}
    assert "tenant" not in ended["keyless"] and ended["broken"]["tenant"] == "default"
    streamed = ended["streamed"]
    assert 0 < streamed["first_token_s"] <= streamed["duration_s"]
    assert (streamed["prompt_tokens"], streamed["completion_tokens"], streamed["levelname"]) == (28, 3, "INFO")
    answers = {line["request_id"]: line for line in found if "path" in line}
    assert answers["much"]["status"] == 429 and answers["much"]["method"] == "POST"
    assert answers["counted"]["path"] == "/tokenize"


@pytest.mark.parametrize("form", ["text"])
async def test_a_client_that_leaves_and_a_failure_have_lines(tmp_path: Path, lines: RequestLines) -> None:
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), step_s=0.01)
    async with gateway(backend, access_log=lines.access_log, records=RequestRecords(lines.on_record)) as rig:
        asking = asyncio.create_task(rig.complete(max_tokens=400))
        while not backend.streams:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        await rig.context.tasks.wait_idle(30.0)

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError(SAID)

        rig.context.quarantine.check = fail  # type: ignore[method-assign]
        assert (await rig.complete(max_tokens=1)).status_code == 500
    text = written(tmp_path)
    assert "outcome=abort" in text and "outcome=error status=500 code=internal_error" in text
    assert SAID not in text


def test_settings_say_which_lines_there_are(tmp_path: Path) -> None:
    def opened(settings: LogSettings, **place: Any) -> tuple[bool, bool]:
        run = str(len(list(tmp_path.iterdir())))
        where = LogPlace(base=str(tmp_path), run=run, **place)
        made = open_request_lines(ServiceFacts(single_node=True, device="cpu", logs=where), "g", settings)
        assert (tmp_path / run / "requests-g.log").exists() == (made.access_log.is_on or is_told(made))
        return made.access_log.is_on, is_told(made)

    def is_told(made: RequestLines) -> bool:
        return made.on_record is write_request_line

    assert opened(LogSettings()) == (True, False)
    assert opened(LogSettings(), has_access_lines=False) == (False, False)
    assert opened(LogSettings(disable_uvicorn_access_log=True)) == (False, False)
    assert opened(LogSettings(disable_uvicorn_access_log=True, enable_log_requests=True)) == (False, True)
    none = open_request_lines(ServiceFacts(single_node=True, device="cpu", logs=None), "g", LogSettings())
    assert not none.access_log.is_on


def test_a_folder_that_cannot_be_written_costs_the_lines_alone(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").write_text("a file")
    facts = ServiceFacts(single_node=True, device="cpu", logs=LogPlace(base=str(tmp_path), run="run"))
    made = open_request_lines(facts, "g", LogSettings(enable_log_requests=True))
    assert not made.access_log.is_on
    assert "requests-g has no log file" in caplog.text


def test_a_client_by_ipv6_and_one_without_an_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUESTS)
    scope = {"type": "http", "method": "GET", "path": "/x", "client": ("::1", 5)}
    AccessLog(is_on=True).answered(scope, None, 0.5)
    AccessLog(is_on=True).answered({**scope, "client": None, "query_string": b"a"}, 200, 0.5)
    AccessLog().answered(scope, 200, 0.5)
    assert [record.getMessage() for record in caplog.records] == [
        '[::1]:5 - "GET /x HTTP/1.1" - 0.500 s -',
        '-:0 - "GET /x?... HTTP/1.1" 200 0.500 s -',
    ]
