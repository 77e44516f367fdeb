"""A newcomer's terminal: `make serve`, the first of README.md's two commands, on an installed virtual environment.
Every phase is printed, `tandem complete` and `chat` find the service, the last line is true. Before that, in the same
service: what README.md and docs/serving/ tell to paste, pasted (only the port is another); and who waits longer than
--queue-timeout is told so.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.plain_http import plain_http
from tests.support.service import BIN, REPOSITORY, Service, free_port, wait_for
from tests.support.verbs import run_verb_of

PASTED = [
    ("README.md", "2 + 3 = 5"),
    ("docs/serving/openai.md", "data: [DONE]"),
    ("docs/serving/ui.md", '"state":"serving"'),
]
DEFAULT_URL = "http://127.0.0.1:8000"
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def vllm_named() -> Iterator[Service]:
    """A service whose metrics are called as vLLM's, of few rows and little patience, which parses calls."""
    few = ("--max-num-seqs", "4", "--queue-timeout", "4")
    parsers = ("--enable-auto-tool-choice", "--reasoning-parser", "qwen3")
    own = ("--metrics-prefix", "vllm", "--device", "cpu", "--dtype", "float32", *few, *parsers)
    port, venv = free_port(), BIN.parent
    assert (venv / ".runtime-installed").exists(), "make dev has made this environment"
    command = ["make", "serve", f"VENV={venv}", f"ARGS={shlex.join((*own, '--port', str(port)))}"]
    service = Service(command, port, cwd=REPOSITORY)
    try:
        yield service.wait_ready()
    finally:
        service.clean()


def tandem(service: Service, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """A verb of the same user as the service's, so that it finds the run file."""
    env = {**os.environ, "TMPDIR": str(service.temp), "XDG_RUNTIME_DIR": ""}
    return subprocess.run(
        [BIN / "tandem", *arguments], env=env, input=typed, capture_output=True, text=True, timeout=60
    )


def pasted(page: str, service: Service) -> str:
    """The page with the service's address instead of the default one."""
    return (REPOSITORY / page).read_text().replace(DEFAULT_URL, service.url)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize(("page", "answer"), PASTED)
def test_the_curl_commands(vllm_named: Service, page: str, answer: str) -> None:
    commands = re.findall(r"^    (curl .*\\\n.*)$", pasted(page, vllm_named), re.MULTILINE)
    assert commands
    assert answer in run(["bash", "-c", 'curl() { command curl --silent --no-buffer "$@"; }\n' + commands[0]])


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_embeddings_command(vllm_named: Service) -> None:
    page = pasted("docs/serving/embeddings.md", vllm_named)
    (command,) = re.findall(r"^    (curl .*\\\n.*)$", page, re.MULTILINE)
    answer = json.loads(run(["bash", "-c", command.replace("curl ", "curl --silent ", 1)]))
    assert [item["index"] for item in answer["data"]] == [0, 1] and answer["usage"]["completion_tokens"] == 0
    assert all(abs(sum(x * x for x in item["embedding"]) - 1) < 1e-5 for item in answer["data"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_command_with_a_tool(vllm_named: Service) -> None:
    page = pasted("docs/serving/tool-calling.md", vllm_named)
    (command,) = re.findall(r"^    (curl .*?}}}\]}')$", page, re.MULTILINE | re.DOTALL)
    (choice,) = json.loads(run(["bash", "-c", command.replace("curl ", "curl --silent ", 1)]))["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("get_weather", '{"city": "Paris"}')]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_the_example_with_a_tool(vllm_named: Service, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", pasted("docs/serving/tool-calling.md", vllm_named), re.DOTALL)
    example = next(block for block in blocks if "tool_calls" in block)
    exec(example, {})
    call, answer = capsys.readouterr().out.splitlines()
    assert call == "get_weather {'city': 'Paris'}"
    assert "sunny" in answer


def test_forced_calls_are_valid_whatever_the_model_would_say(vllm_named: Service) -> None:
    """By the official client, whole and streamed; hot, so that the model alone would not do it. The prompt ends inside
    thinking, so that the model may not begin any: this one would not end it."""
    kinds = {"type": "string", "enum": ["rain", "sun"]}
    parameters = {
        "type": "object",
        "properties": {"sky": kinds, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["sky", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("look", "tell")]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
    inside = {"continue_final_message": True, "add_generation_prompt": False, "thinking_token_budget": 4}
    asked: Any = {"model": "demo", "messages": messages, "tools": tools, "temperature": 1.5, "extra_body": inside}
    named = {"type": "function", "function": {"name": "tell"}}
    with openai.OpenAI(base_url=vllm_named.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        for choice, reason in (("required", "tool_calls"), (named, "stop")):
            whole = client.chat.completions.create(
                **asked, tool_choice=choice, n=2, max_tokens=200, parallel_tool_calls=False
            )
            for answer in whole.choices:
                assert (answer.finish_reason, answer.message.content) == (reason, None)
                (call,) = answer.message.tool_calls
                assert call.function.name in ("look", "tell") if choice == "required" else call.function.name == "tell"
                jsonschema.validate(json.loads(call.function.arguments), parameters)
        stream = client.chat.completions.create(**asked, tool_choice=named, stream=True, max_tokens=200)
        deltas = [chunk.choices[0].delta.tool_calls or [] for chunk in stream]
    functions = [call.function for calls in deltas for call in calls]
    assert [function.name for function in functions if function.name] == ["tell"]
    jsonschema.validate(json.loads("".join(function.arguments for function in functions)), parameters)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_ends_by_its_budget_and_the_form_begins_behind_it(vllm_named: Service, stream: bool) -> None:
    """The prompt ends inside thinking, which this model would never end by itself."""
    sky = {"sky": {"enum": ["rain", "sun"]}}
    schema = {"type": "object", "properties": sky, "required": ["sky"], "additionalProperties": False}
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "<think>"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "thinking_token_budget": 9,
        "max_tokens": 120,
        "temperature": 0,
        "stream": stream,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}},
    }
    if not stream:
        answer = vllm_named.post("/v1/chat/completions", asked).json()
        message, count = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
    else:
        message = {"reasoning": "", "content": ""}
        asked["stream_options"] = {"include_usage": True}
        with plain_http.stream("POST", vllm_named.url + "/v1/chat/completions", json=asked, timeout=60) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
            message = {name: text + (delta.get(name) or "") for name, text in message.items()}
        count = chunks[-1]["usage"]["completion_tokens_details"]
    assert message["reasoning"].strip() and "think>" not in message["reasoning"]
    assert count == {"reasoning_tokens": 9}
    jsonschema.validate(json.loads(message["content"]), schema)


def test_the_openai_example(vllm_named: Service, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", pasted("README.md", vllm_named), re.DOTALL)
    example = next(block for block in blocks if "from openai" in block)
    exec(example, {})
    assert capsys.readouterr().out == "1, 2, 3, 4, 5, 6, 7, 8, 9"


def test_the_bench_commands(vllm_named: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": at, "input_length": 600, "output_length": 96, "hash_ids": [0, at]} for at in range(1, 4)]
    Path("conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    commands = re.findall(r"^    .venv/bin/tandem (bench serve .*)$", pasted("docs/benchmarking.md", vllm_named), re.M)
    assert len(commands) == 3
    for command, count in zip(commands, (20, 20, 3), strict=True):
        done = run_verb_of(vllm_named.temp, *shlex.split(command), "--url", vllm_named.url)
        assert done.returncode == 0, done.stderr
        assert f"Successful requests:                     {count} " in done.stdout
    (found,) = Path("out/bench").glob("openai-20qps-demo-*.json")
    assert json.loads(found.read_text())["request_goodput"] >= 0 and Path("out/bench/load.png").stat().st_size > 1000


def test_top_in_a_pipe_and_as_json(vllm_named: Service) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    once, as_json, _ = re.findall(r"^    .venv/bin/tandem (top .*?) *(?:#.*)?$", page, re.M)
    shown = run_verb_of(vllm_named.temp, *shlex.split(once))
    assert shown.returncode == 0 and re.search(r"^\w+ +serving +0 +0 ", shown.stdout, re.M), shown
    told = run_verb_of(vllm_named.temp, *shlex.split(as_json), "--url", vllm_named.url)
    found = json.loads(told.stdout)
    assert found["generation_tokens_per_s"] == 0 and [group["state"] for group in found["groups"]] == ["serving"]


def test_who_waits_too_long_for_a_first_step_gets_a_503_and_others_go_on(vllm_named: Service) -> None:
    """A hundred choices over four rows last longer than the timeout, at any speed; none of them waits for a first step
    of its request."""
    asked = {"model": "demo", "prompt": "The", "max_tokens": 1000, "ignore_eos": True}
    many = {**asked, "n": 100, "stream": True}
    with plain_http.stream("POST", vllm_named.url + "/v1/completions", json=many, timeout=60) as long:
        assert long.status_code == 200
        lines = long.iter_lines()
        next(lines)
        with ThreadPoolExecutor(2) as pool:
            bodies = ({**asked, "max_tokens": 4, "stream": stream} for stream in (False, True))
            late = list(pool.map(lambda body: vllm_named.post("/v1/completions", body), bodies))
        for answer in late:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable"), answer.text
            assert "waited" in answer.json()["error"]["message"] and 1 <= int(answer.headers["retry-after"]) <= 60
        assert [line for line in (next(lines) for _ in range(4)) if line.startswith("data: {")], "it goes on"
    wait_for(lambda: vllm_named.get("/load").json()["num_requests_running"] == 0, 10, "its client has left")
    assert vllm_named.post("/v1/completions", {**asked, "max_tokens": 4}).status_code == 200


def test_a_terminal_from_start_to_end(vllm_named: Service) -> None:
    service = vllm_named
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    text = service.post("/v1/completions", asked).json()["choices"][0]["text"]
    done = tandem(service, "complete", "Once upon a time", "--max-tokens", "20", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == text + ("" if text.endswith("\n") else "\n")
    done = tandem(service, "chat", "--temperature", "0", typed="What is 2 + 3?\n/reset\nCount from 3 to 9.\n")
    assert done.returncode == 0, done.stderr
    assert "5" in done.stdout and "3, 4, 5, 6, 7, 8, 9" in done.stdout

    names = {line.partition("{")[0] for line in service.get("/metrics").text.splitlines() if line[0] != "#"}
    assert {"vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:http_requests_total"} <= names
    assert not [name for name in names if name.startswith("tandem")]

    service.stop(signal.SIGINT)  # the status is make's
    service.check_gone()
    lines = [line.removeprefix("tandem: ") for line in service.output.splitlines() if line.startswith("tandem: ")]
    begun = [line for line in lines if line.endswith(" ...")]
    assert "tool calls are parsed as hermes, by the chat template" in lines
    assert begun == [
        "starting Redis ...",
        "starting Ray ...",
        "starting Ray Serve ...",
        "starting the gateway and 1 group, loading weights ...",
    ]
    assert [line for line in lines if re.fullmatch(r"group \w+: \d+\.\d MiB of weights loaded in \d+\.\d s", line)], (
        lines
    )
    assert "loading weights:" not in service.output, "its output is no terminal"
    serving = f"serving demo with 1 group on {service.url}/v1, and a page to try it on {service.url}"
    assert lines.index(begun[-1]) < lines.index(serving)
    assert re.fullmatch(r"stopped: nothing is left running \(took \d+\.\d s\)", lines[-1]), service.output
