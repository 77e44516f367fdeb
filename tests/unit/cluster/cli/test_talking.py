"""`tandem complete` and `tandem chat` against a real gateway over a fake engine, and against what is no service."""

import asyncio
import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from tandem.cluster.cli.client.dialogue import Dialogue
from tandem.cluster.cli.client.endpoint import Endpoint, EndpointError, event_data
from tandem.cluster.process.run_files import RunFile, write_run_file
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.support.verbs import invoked
from tests.unit.gateway.rig import EOS, Rig, gateway, served

KEYS = GatewaySettings(api_keys=("sk-one",))


def saying(text: str, **options: Any) -> FakeBackend:
    """A backend that says `text` whatever it is asked."""
    return FakeBackend(script=fixed_script([*text.encode(), EOS]), eos_token_ids=frozenset({EOS}), **options)


@asynccontextmanager
async def service(backend: FakeBackend | None = None, **options: Any) -> AsyncIterator[tuple[Rig, str]]:
    """A gateway on a port of its own."""
    async with gateway(backend, **options) as rig, served(rig.app) as url:
        yield rig, url


async def tandem(*arguments: str, typed: str = "") -> typer.testing.Result:
    """Runs a verb in this process with `typed` on its standard input."""
    return await asyncio.to_thread(invoked, arguments, input=typed)


def problem(result: typer.testing.Result) -> str:
    """The message that a verb ended with."""
    assert isinstance(result.exception, TandemError), result
    return str(result.exception)


async def test_complete_prints_the_text_and_sends_what_was_asked() -> None:
    async with service(saying("of old\u2028ü 😀")) as (rig, url):
        done = await tandem("complete", "Once", "--url", url, "--max-tokens", "40", "--temperature", "0")
        assert (done.exit_code, done.stdout) == (0, "of old\u2028ü 😀\n")
        (asked,) = rig.backend.requests
        assert (asked.sampling.max_tokens, asked.sampling.temperature) == (40, 0)
        assert bytes(asked.prompt_token_ids[1:]) == b"Once"


async def test_complete_reads_standard_input_and_takes_a_url_with_v1() -> None:
    async with service(saying("yes\n")) as (rig, url):
        done = await tandem("complete", "-", "--url", url + "/v1/", typed="two\nlines\n")
        assert (done.exit_code, done.stdout) == (0, "yes\n")
        assert bytes(rig.backend.requests[0].prompt_token_ids[1:]) == b"two\nlines\n"


def prompts(rig: Rig) -> list[str]:
    """What the model was given, turn by turn; the rig's template marks turns with id 258."""
    return ["".join(chr(i) if i < 256 else "|" for i in request.prompt_token_ids) for request in rig.backend.requests]


async def test_chat_keeps_the_conversation_until_reset() -> None:
    async with service(saying("ok")) as (rig, url):
        done = await tandem(
            "chat", "--url", url, "--system", "Be brief.", typed="a\n\nb\n/reset\n/nonsense\nc\n/exit\nd\n"
        )
        assert (done.exit_code, done.stdout) == (0, "ok\nok\nok\n")
        assert "new conversation" in done.stderr and "/nonsense is no command" in done.stderr
        assert prompts(rig) == [
            "|system:Be brief.|user:a|",
            "|system:Be brief.|user:a|assistant:ok|user:b|",
            "|system:Be brief.|user:c|",
        ]


async def test_the_end_of_input_ends_the_chat() -> None:
    async with service(saying("ok")) as (rig, url):
        done = await tandem("chat", "--url", url, typed="no line feed at the end")
        assert (done.exit_code, done.stdout) == (0, "ok\n")
        assert prompts(rig) == ["|user:no line feed at the end|"]


@pytest.mark.parametrize("verb", [("complete", "x"), ("chat",)])
async def test_a_key_is_asked_for_refused_or_accepted(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    async with service(saying("ok"), settings=KEYS) as (_, url):
        assert "asks for a key; give --api-key" in problem(await tandem(*verb, "--url", url, typed="x\n"))
        wrong = await tandem(*verb, "--url", url, "--api-key", "sk-two", typed="x\n")
        assert "does not accept this key" in problem(wrong) and "sk-two" not in problem(wrong)
        right = await tandem(*verb, "--url", url, "--api-key", "sk-one", typed="x\n")
        assert (right.exit_code, right.stdout) == (0, "ok\n")
        monkeypatch.setenv("TANDEM_API_KEY", "sk-one")
        right = await tandem(*verb, "--url", url, typed="x\n")
        assert (right.exit_code, right.stdout) == (0, "ok\n")
        wrong = await tandem(*verb, "--url", url, "--api-key", "sk-two", typed="x\n")
        assert "does not accept this key" in problem(wrong), "the flag comes first"


async def test_a_refusal_is_the_services_own_words() -> None:
    async with service() as (_, url):
        assert "answered 400: max_tokens" in problem(await tandem("complete", "x", "--url", url, "--max-tokens", "0"))
        assert "answered 404" in problem(await tandem("complete", "x", "--url", url, "--model", "other"))
        assert "context is 512" in problem(await tandem("chat", "--url", url, typed="x" * 600 + "\n"))


async def test_an_error_in_the_stream_comes_after_what_was_said() -> None:
    async with service(saying("Hello there", fail_at_position=5)) as (_, url):
        done = await tandem("complete", "x", "--url", url)
        assert done.stdout == "Hello\n"
        assert problem(done).startswith("the answer broke off: ")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of run files of this test's own."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


async def test_without_a_url_the_running_service_is_found(runtime: Path) -> None:
    assert "no service of this user runs" in problem(await tandem("complete", "x"))
    async with service(saying("found")) as (_, url):
        for pid, address in ((os.getpid(), url), (os.getppid(), "http://127.0.0.1:1")):
            started_at = 2.0 if address == url else 1.0
            write_run_file(
                RunFile(pid=pid, started_at=started_at, url=address, model="m", service_id="s", redis_url="unix:///r")
            )
        done = await tandem("complete", "x")
        assert (done.exit_code, done.stdout) == (0, "found\n")
        assert f"2 services run here; using the newest, {url}" in done.stderr


async def test_where_nothing_listens_the_url_is_named() -> None:
    for verb in (("complete", "x"), ("chat",)):
        said = problem(await tandem(*verb, "--url", "http://127.0.0.1:1", typed="x\n"))
        assert said.startswith("nothing answers on http://127.0.0.1:1: ") and "refused" in said


@pytest.mark.parametrize(
    ("url", "key", "flag"),
    [
        ("127.0.0.1:8000", None, "--url"),
        ("ftp://h", None, "--url"),
        ("http://", None, "--url"),
        ("http://h", "ü", "--api-key"),
    ],
)
def test_what_is_no_url_or_key_is_refused(url: str, key: str | None, flag: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        Endpoint(url, key)
    assert refusal.value.flag == flag


@contextmanager
def answering(write: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[Endpoint]:
    """An HTTP server whose POSTs and GETs do what `write` does, and its Endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            write(self)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with Endpoint(f"http://127.0.0.1:{server.server_port}") as endpoint:
            yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def body(status: int, content: bytes) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(content)

    return write


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, b'data: {"choices":[{"text":"a"}]}\n\n', "connection was closed before its end"),
        (200, b"data: <html>\n\n", "no chunk of an answer"),
        (200, b"<html></html>", "connection was closed before its end"),
        (502, b"<html>bad gateway</html>", "answered 502: is it an OpenAI-compatible service?"),
        (503, b'{"error":{"message":"no worker group is ready"}}', "answered 503: no worker group is ready"),
        (302, b"", "answered 302"),
    ],
)
def test_servers_that_are_none_of_ours(status: int, content: bytes, words: str) -> None:
    with answering(body(status, content)) as endpoint:
        with pytest.raises(EndpointError) as failure:
            list(endpoint.stream("/v1/completions", {}))
        assert words in str(failure.value)


@pytest.mark.parametrize("content", [b"hello", b'{"data":[]}', b"{}"])
def test_a_list_of_models_that_is_none(content: bytes) -> None:
    with answering(body(200, content)) as endpoint:
        with pytest.raises(EndpointError, match="lists no model"):
            endpoint.first_model()


def test_a_connection_that_breaks_is_told() -> None:
    def cut(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')

    with answering(cut) as endpoint:
        pieces = endpoint.stream("/v1/chat/completions", {})
        assert next(pieces) == "a"
        with pytest.raises(EndpointError, match=r"the connection to .* broke"):
            next(pieces)


def test_lone_surrogates_are_refused_before_they_are_sent() -> None:
    with Endpoint("http://127.0.0.1:1") as endpoint:
        with pytest.raises(EndpointError, match="UTF-8"):
            list(endpoint.stream("/v1/completions", {"prompt": "\udcff"}))


def test_events_survive_any_cut_and_any_line_break_inside_them() -> None:
    texts = ["a", "b\u2028c\x85d", ""]
    raw = b": keep-alive\n\n" + b"".join(
        b"data: %b\r\n\r\n" % json.dumps(t, ensure_ascii=False).encode() for t in texts
    )
    for size in (1, 2, 7, len(raw)):
        chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
        assert [json.loads(data) for data in event_data(chunks)] == texts


async def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    """A real process: the first answer hangs after three tokens, the next one is finished."""
    async with service(FakeBackend(manual=True)) as (rig, url):
        command = [str(Path(sys.executable).parent / "tandem"), "chat", "--url", url]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(b"first\n")
            child.stdin.flush()
            await asyncio.wait_for(rig.backend.submitted.wait(), 60)
            rig.backend.step(3)
            said = await asyncio.to_thread(child.stdout.read, 2)
            child.send_signal(signal.SIGINT)
            await asyncio.wait_for(rig.backend.aborted.wait(), 60)
            rig.backend.submitted.clear()
            child.stdin.write(b"second\n")
            child.stdin.flush()
            await asyncio.wait_for(rig.backend.submitted.wait(), 60)
            assert "|assistant:" in prompts(rig)[1] and prompts(rig)[1].endswith("|user:second|")
            while rig.backend.streams:
                rig.backend.step(8)
                await asyncio.sleep(0)
            rest, errors = await asyncio.to_thread(child.communicate, timeout=60)
            assert said and child.returncode == 0
            assert b"the answer was stopped" in errors and b"Traceback" not in errors
            assert rest
        finally:
            child.kill()
            await asyncio.to_thread(child.wait)


def read_until(terminal: int, wanted: str, timeout_s: float = 60.0) -> str:
    """What the terminal shows until `wanted` is there."""
    shown, deadline_s = "", time.monotonic() + timeout_s
    while wanted not in shown:
        assert time.monotonic() < deadline_s, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown


async def test_on_a_terminal_there_is_a_prompt_and_only_ctrl_d_ends_it() -> None:
    async with service(saying("o\x1b[31mk")) as (rig, url):
        outer, inner = pty.openpty()
        command = [str(Path(sys.executable).parent / "tandem"), "chat", "--url", url]
        child = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        try:
            shown = await asyncio.to_thread(read_until, outer, "> ")
            assert f"talking to echo on {url}" in shown
            os.write(outer, b"hi\n")
            answered = await asyncio.to_thread(read_until, outer, "31mk\r\n> ")
            assert "o�[31mk" in answered, "escapes are shown, not obeyed"
            assert child.poll() is None
            assert prompts(rig) == ["|user:hi|"]
            os.write(outer, b"\x04")
            assert await asyncio.to_thread(child.wait, 60) == 0
        finally:
            child.kill()
            child.wait()
            os.close(outer)
            os.close(inner)


def test_ctrl_c_at_the_prompt_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt, "/exit"])

    def type_next(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_next)
    with Endpoint("http://127.0.0.1:1") as endpoint:
        Dialogue(endpoint, {}, None, interactive=True).run()
    assert next(typed, None) is None


async def test_an_answer_that_fails_does_not_end_a_chat_on_a_terminal() -> None:
    async with service(saying("ok", refuse=QueueFull("too many"))) as (rig, url):
        with Endpoint(url) as endpoint:
            talk = Dialogue(endpoint, {"model": "echo"}, None, interactive=True)
            await asyncio.to_thread(talk._answer, "one")
            rig.backend.refuse = None
            await asyncio.to_thread(talk._answer, "two")
        assert prompts(rig)[1:] == ["|user:two|"], "the turn that failed is not part of the conversation"
