"""A client that leaves, or stops reading, at any moment: aborted at once, settled once, nothing leaked."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import pytest

from tandem.cluster.gateway.generation.delivery import Delivery
from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.tenants.tenant_admission import Reservation, Tenancy
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import Usage
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import DEADLINE_S, EOS, Rig, gateway, served

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Caller:
    """One raw ASGI request whose client leaves when told."""

    def __init__(self, rig: Rig, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self._rig = rig
        self._body = json.dumps(body).encode()
        self._path = path
        self._given = False
        self.gone = asyncio.Event()
        self.sent: list[Message] = []
        self.first_body = asyncio.Event()
        self.block_sends = False

    async def receive(self) -> Message:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and message["body"]:
            self.first_body.set()
            if self.block_sends:
                await asyncio.Event().wait()

    def start(self) -> "asyncio.Task[None]":
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        return asyncio.create_task(self._rig.app(scope, self.receive, self.send))

    def is_complete(self) -> bool:
        return any(m["type"] == "http.response.body" and not m.get("more_body") for m in self.sent)


def manual() -> FakeBackend:
    return FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)


async def within(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, DEADLINE_S)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued(stream: bool, n: int) -> None:
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": stream, "n": n})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        caller.gone.set()
        await within(rig.backend.aborted.wait())
        await within(call)
        await rig.settle()
        assert not caller.sent
        (row,) = rig.ledger.rows
        assert (row.terminal, row.usage) == ("abort", Usage(0, 0)), "its prompt was never computed"


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_pays_for_a_prompt_that_was_begun(stream: bool, n: int) -> None:
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": stream, "n": n, "add_special_tokens": False})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        rig.backend.begin()
        caller.gone.set()
        await within(call)
        await rig.settle()
        assert not caller.sent
        (row,) = rig.ledger.rows
        assert (row.terminal, row.usage) == ("abort", Usage(3, 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_decoding_bills_what_was_generated(stream: bool) -> None:
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": stream, "n": 2, "max_tokens": 100})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        rig.backend.step(3)
        if stream:
            await within(caller.first_body.wait())
        caller.gone.set()
        await within(rig.backend.aborted.wait())
        await within(call)
        await rig.settle()
        (abort,) = rig.backend.aborts
        assert (abort.choice, abort.keep_positions) == (None, None)
        assert rig.ledger.rows[0].terminal == "abort"
        assert rig.ledger.rows[0].usage.completion_tokens == 6
        assert not caller.is_complete()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_aborts_too(stream: bool) -> None:
    async with gateway(manual()) as rig:
        call = Caller(rig, {"prompt": "abc", "stream": stream}).start()
        await within(rig.backend.submitted.wait())
        rig.backend.step()
        call.cancel()
        await within(rig.backend.aborted.wait())
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "abort"


async def test_a_handler_cancelled_while_its_tenant_is_asked_starts_nothing() -> None:
    class SlowTenancy(Tenancy):
        async def admit(self, *counts: Any, **more: Any) -> Reservation:
            asked.set()
            await go_on.wait()
            return await super().admit(*counts, **more)

    asked, go_on = asyncio.Event(), asyncio.Event()
    async with gateway(manual(), tenancy=SlowTenancy()) as rig:
        call = Caller(rig, {"prompt": ["abc", "def"]}).start()
        await within(asked.wait())
        call.cancel()
        await asyncio.wait({call})
        go_on.set()
        await rig.settle()
        assert not rig.backend.requests
        assert (rig.ledger.rows[0].terminal, rig.ledger.rows[0].usage) == ("abort", Usage(0, 0))


@pytest.mark.parametrize("prompt", ["abc", ["abc", "defg"]])
async def test_a_stream_that_is_refused_midway_is_billed_what_it_delivered(prompt: str | list[str]) -> None:
    """A drain ends live streams with a 503; the tokens before it were used."""
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": prompt, "stream": True, "max_tokens": 50, "add_special_tokens": False})
        call = caller.start()
        while len(rig.backend.streams) < (1 if isinstance(prompt, str) else 2):
            await asyncio.sleep(0)
        rig.backend.step(2)
        await within(caller.first_body.wait())
        for stream in list(rig.backend.streams.values())[:1]:
            stream.put(RequestRefused("The service stops.", code="service_unavailable", status=503))
        await within(call)
        await rig.settle()
        (row,) = rig.ledger.rows
        assert row.terminal == "error"
        assert row.usage.prompt_tokens == len("".join(prompt))
        assert row.usage.completion_tokens == 2 * (1 if isinstance(prompt, str) else 2)


async def test_a_part_that_cannot_be_released_is_settled_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        def abort(self, abort: Any) -> None:
            super().abort(abort)
            raise ValueError("no such thing was expected")

    async with gateway(Broken(manual=True)) as rig:
        caller = Caller(rig, {"prompt": "abc"})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        caller.gone.set()
        await within(call)
        await rig.settle()
        assert len(rig.ledger.rows) == 1
    assert "was not served in order" in caplog.text


async def test_leaving_several_prompts_aborts_each() -> None:
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": ["abc", "def", "ghi"], "stream": True, "max_tokens": 50})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        while len(rig.backend.streams) < 3:
            await asyncio.sleep(0)
        rig.backend.step(2)
        await within(caller.first_body.wait())
        caller.gone.set()
        await within(call)
        await rig.settle()
        assert len({abort.request_id for abort in rig.backend.aborts}) == 3
        assert len(rig.ledger.rows) == 1


async def test_leaving_after_the_end_aborts_nothing() -> None:
    async with gateway() as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 3})
        await within(caller.start())
        caller.gone.set()
        await rig.settle()
        assert caller.is_complete()
        assert not rig.backend.aborts
        assert rig.ledger.rows[0].terminal == "length"


async def test_a_client_that_does_not_read_is_given_up() -> None:
    times = GatewayTimes(keep_alive_s=0.01, stuck_send_s=0.02)
    async with gateway(manual(), times=times) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 50})
        caller.block_sends = True
        call = caller.start()
        await within(rig.backend.submitted.wait())
        rig.backend.step()
        await within(rig.backend.aborted.wait())
        await within(call)
        await rig.settle()
        assert not caller.is_complete()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_real_client_that_leaves_a_flood_is_noticed(reads: bool) -> None:
    """There is always a step to deliver, or the write of one waits for the client: neither hides that it leaves."""
    async with gateway(manual()) as rig, served(rig.app) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        body = json.dumps({"prompt": "abc", "stream": True, "max_tokens": 500, "n": 16, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        await within(rig.backend.submitted.wait())
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        rig.backend.step(450)
        for _ in range(20):
            await asyncio.sleep(0)
        writer.transport.abort()
        await within(rig.backend.aborted.wait())
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "abort"
        assert rig.ledger.rows[0].usage.completion_tokens == 16 * 450


async def test_a_client_that_does_not_read_the_end_is_given_up() -> None:
    times = GatewayTimes(keep_alive_s=0.01, stuck_send_s=0.02)
    async with gateway(times=times) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 2})
        plain_send = caller.send

        async def send(message: Message) -> None:
            await plain_send(message)
            if message["type"] == "http.response.body" and not message["more_body"]:
                await asyncio.Event().wait()

        caller.send = send  # type: ignore[method-assign]
        await within(caller.start())
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "length", "all was generated"


async def test_a_timeout_of_the_delivery_itself_is_no_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(*_: Any) -> None:
        raise TimeoutError("of something else")

    monkeypatch.setattr(Delivery, "_deliver", late)
    async with gateway(manual()) as rig:
        caller = Caller(rig, {"prompt": "abc"})
        await within(caller.start())
        assert caller.sent[0]["status"] == 500


async def test_idle_streams_get_comments() -> None:
    async with gateway(manual(), times=GatewayTimes(keep_alive_s=0.01)) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 2})
        heard = asyncio.Event()
        plain_send = caller.send

        async def send(message: Message) -> None:
            await plain_send(message)
            if message.get("body", b"").startswith(b":"):
                heard.set()

        caller.send = send  # type: ignore[method-assign]
        call = caller.start()
        await within(rig.backend.submitted.wait())
        rig.backend.step()
        await within(heard.wait())
        rig.backend.step()
        await within(call)
        assert caller.is_complete()


async def test_nothing_is_sent_before_the_first_token() -> None:
    async with gateway(manual(), times=GatewayTimes(keep_alive_s=0.001)) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 1})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not caller.sent
        rig.backend.step()
        await within(call)


async def comment(caller: Caller) -> None:
    """Waits until the client has a comment."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(message.get("body", b"").startswith(b":") for message in caller.sent):
            await asyncio.sleep(0.001)


EARLY = GatewayTimes(keep_alive_s=0.01, early_keep_alive=True)


async def test_a_stream_that_waits_gets_comments_if_asked_for() -> None:
    """--sse-keep-alive-interval: the headers go out with the first one, and all else is as without."""
    async with gateway(manual(), times=EARLY) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": True, "max_tokens": 1})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        await within(comment(caller))
        assert [message["status"] for message in caller.sent if "status" in message] == [200]
        rig.backend.step()
        await within(call)
        assert caller.is_complete()
        said = b"".join(message.get("body", b"") for message in caller.sent)
        assert said.startswith(b": keep-alive\n\n") and said.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_what_fails_after_a_comment_is_an_event_and_a_status_otherwise(stream: bool) -> None:
    async with gateway(manual(), times=EARLY) as rig:
        caller = Caller(rig, {"prompt": "abc", "stream": stream, "max_tokens": 1})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        if stream:
            await within(comment(caller))
        (held,) = rig.backend.streams.values()
        held.put(RequestRefused("no worker group became ready", code="service_unavailable", status=503))
        await within(call)
        said = b"".join(message.get("body", b"") for message in caller.sent)
        assert caller.sent[0]["status"] == (200 if stream else 503)
        assert b'"no worker group became ready"' in said and said.endswith(b"data: [DONE]\n\n") == stream


async def test_an_aborted_request_that_never_answers_is_released_in_time() -> None:
    class Deaf(FakeBackend):
        def abort(self, abort: Any) -> None:
            self.aborts.append(abort)
            self.aborted.set()

    async with gateway(Deaf(manual=True), times=GatewayTimes(drain_s=0.01)) as rig:
        caller = Caller(rig, {"prompt": "abc"})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        caller.gone.set()
        await within(call)
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "abort"


async def test_the_bill_of_a_stopped_choice_does_not_wait_for_ever() -> None:
    class Deaf(FakeBackend):
        def abort(self, abort: Any) -> None:
            self.aborts.append(abort)
            self.aborted.set()

    backend = Deaf(manual=True)
    async with gateway(backend, times=GatewayTimes(drain_s=0.01, usage_s=0.01)) as rig:
        caller = Caller(rig, {"prompt": "abX", "add_special_tokens": False, "stop": "X", "max_tokens": 100})
        call = caller.start()
        await within(rig.backend.submitted.wait())
        rig.backend.step(3)
        await within(call)
        answer = json.loads(caller.sent[-1]["body"])
        assert answer["choices"][0]["text"] == "ab"
        assert answer["usage"]["completion_tokens"] == 3
        await rig.settle()
        assert rig.ledger.rows[0].usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_connection_that_closes_aborts(stream: bool) -> None:
    async with gateway(manual()) as rig, served(rig.app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"prompt": "abc", "stream": stream, "max_tokens": 100}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await within(rig.backend.submitted.wait())
            rig.backend.step(2)
            call.cancel()
            await asyncio.wait({call})
        await within(rig.backend.aborted.wait())
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "abort"


async def test_a_half_sent_body_of_a_client_that_left_is_no_error() -> None:
    async with gateway() as rig, served(rig.app) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b'content-length: 100\r\n\r\n{"prompt"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
