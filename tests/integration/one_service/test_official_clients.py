"""The clients that applications use, against the shared service: what each sends is served, and what it gets it reads.

Imports of these libraries take seconds, and some would call home: they are imported inside the tests, with tracing and
telemetry off, and nothing may leave the loopback meanwhile.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.service import REPOSITORY, Service

pytestmark = pytest.mark.cluster

QUIET = {
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
}
USER: list[Any] = [{"role": "user", "content": "Tell me a short story about a whale."}]
GREEDY = {"temperature": 0, "max_tokens": 24}


class Report(BaseModel):
    """Reports the weather."""

    model_config = ConfigDict(extra="forbid")  # else any other field may follow

    sky: Literal["rain", "sun"]
    is_warm: bool
    wind: Literal[1, 2, 3]


SCHEMA = Report.model_json_schema()
FUNCTION: dict[str, Any] = {"name": "Report", "description": "Reports the weather.", "parameters": SCHEMA}
HOT: dict[str, Any] = {"model": "demo", "temperature": 1.5}
"""So hot that the model alone would not write a report."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing leaves the loopback, and nothing tries to."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    tried: list[Any] = []
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def guarded(own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6) and not ipaddress.ip_address(address[0]).is_loopback:
            tried.append(address)
            raise OSError("not the loopback")
        connect(own, address)

    def resolved(host: Any, *rest: Any, **named: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1", "localhost", "::1", None):
            tried.append(host)
            raise OSError("not the loopback")
        return resolve(host, *rest, **named)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    yield
    assert not tried, "a client called somebody else"


@pytest.fixture
def expected(service: Service) -> str:
    """What the model answers to USER, as the oldest of the APIs says it."""
    import openai

    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="demo", messages=USER, **GREEDY)  # type: ignore[call-overload]
        text: str = answer.choices[0].message.content
        return text


def test_responses_of_openais_client(service: Service, expected: str) -> None:
    import openai

    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(**asked, input=USER[0]["content"])
        assert first.output_text == expected and first.store is True  # type: ignore[attr-defined]
        with client.responses.stream(**asked, input=USER) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == expected
        second = client.responses.create(**asked, input="And then?", previous_response_id=first.id)
        turns = [*USER, {"role": "assistant", "content": expected}, {"role": "user", "content": "And then?"}]
        whole = client.responses.create(**asked, input=turns, store=False)
        assert second.output_text == whole.output_text
        assert second.usage is not None and whole.usage is not None
        assert second.usage.input_tokens == whole.usage.input_tokens
        assert client.responses.retrieve(second.id).output_text == second.output_text
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**asked, input="x", previous_response_id=second.id)


def test_messages_of_anthropics_client(service: Service, expected: str) -> None:
    import anthropic

    asked: dict[str, Any] = {"model": "demo", "max_tokens": 24, "messages": USER, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        assert whole.content[0].type == "text" and whole.content[0].text == expected
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == expected
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        counted = client.messages.count_tokens(model="demo", messages=USER)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_chat_models_of_langchain(service: Service, expected: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    given: dict[str, Any] = {"model": "demo", "base_url": f"{service.url}/v1", "api_key": SecretStr("none")}
    for by_responses in (False, True):
        model = ChatOpenAI(**given, temperature=0, max_tokens=24, max_retries=0, use_responses_api=by_responses)
        assert model.invoke(USER).text == expected
        assert "".join(chunk.text for chunk in model.stream(USER)) == expected


def test_litellm(service: Service, expected: str) -> None:
    import litellm

    to: dict[str, Any] = {"api_base": f"{service.url}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(model="openai/demo", messages=USER, **GREEDY, **to)
    assert answer.choices[0].message.content == expected
    response = litellm.responses(
        model="openai/demo", input=USER[0]["content"], temperature=0, max_output_tokens=24, **to
    )
    assert response.output[0].content[0].text == expected
    message = litellm.completion(
        model="anthropic/demo", messages=USER, **GREEDY, api_base=service.url, api_key="none", num_retries=0
    )
    assert message.choices[0].message.content == expected


def test_forms_and_calls_of_openais_client(service: Service) -> None:
    import openai

    tool: Any = {"type": "function", **FUNCTION}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.parse(**HOT, messages=USER, response_format=Report, max_tokens=100)
        assert isinstance(chat.choices[0].message.parsed, Report)
        parsed = client.responses.parse(**HOT, input="Report.", text_format=Report, max_output_tokens=100)
        assert isinstance(parsed.output_parsed, Report)
        with client.responses.stream(**HOT, input="Report.", text_format=Report, max_output_tokens=100) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_response().output_parsed, Report)
        asked: dict[str, Any] = {**HOT, "input": "Report.", "tools": [tool], "max_output_tokens": 100}
        for choice in ("required", {"type": "function", "name": "Report"}):
            called = client.responses.create(**asked, tool_choice=choice, parallel_tool_calls=False)
            (call,) = called.output
            assert (call.type, call.name, called.status) == ("function_call", "Report", "completed")
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Thanks."}
        asked |= {"input": [result], "tool_choice": "none", "previous_response_id": called.id}
        assert client.responses.create(**asked).usage.input_tokens > called.usage.input_tokens


def test_calls_and_forms_of_anthropics_client(service: Service) -> None:
    import anthropic

    tool: Any = {"name": "Report", "description": "Reports.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": USER, "extra_body": {"temperature": 1.5}}
    with anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Report"}):
            with client.messages.stream(**asked, tools=[tool], tool_choice=choice) as stream:
                streamed = stream.get_final_message()
            for answer in (streamed, client.messages.create(**asked, tools=[tool], tool_choice=choice)):
                (call,) = answer.content
                assert call.type == "tool_use" and call.name == "Report" and answer.stop_reason == "tool_use"
                jsonschema.validate(call.input, SCHEMA)
        parsed = client.messages.parse(**asked, output_format=Report)
        assert isinstance(parsed.parsed_output, Report)


def test_tools_and_forms_of_langchain(service: Service) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    given: dict[str, Any] = {"model": "demo", "base_url": f"{service.url}/v1", "api_key": SecretStr("none")}
    for by_responses in (False, True):
        model = ChatOpenAI(**given, temperature=1.5, max_tokens=100, max_retries=0, use_responses_api=by_responses)
        (call,) = model.bind_tools([Report], tool_choice="any", parallel_tool_calls=False).invoke(USER).tool_calls
        assert call["name"] == "Report" and Report(**call["args"])
        for method in ("json_schema", "function_calling"):
            found = model.with_structured_output(Report, method=method).invoke(USER)  # type: ignore[arg-type]
            assert isinstance(found, Report)


def test_tools_and_forms_of_litellm(service: Service) -> None:
    import litellm

    to: dict[str, Any] = {"api_base": f"{service.url}/v1", "api_key": "none", "num_retries": 0, "temperature": 1.5}
    asked: dict[str, Any] = {"model": "openai/demo", "messages": USER, "max_tokens": 100, **to}
    tool = {"type": "function", "function": FUNCTION}
    answer = litellm.completion(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert Report(**json.loads(call.function.arguments))
    answer = litellm.completion(**asked, response_format=Report)
    assert Report(**json.loads(answer.choices[0].message.content))


def test_models_of_instructor(service: Service) -> None:
    import instructor
    import openai

    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            asking = instructor.from_openai(client, mode=mode)
            found = asking.chat.completions.create(**HOT, messages=USER, response_model=Report, max_tokens=100)
            assert isinstance(found, Report)


PAGE = (REPOSITORY / "docs" / "serving" / "openai.md").read_text()
SECTION = PAGE.partition("## LangChain, LiteLLM, instructor\n")[2].partition("\n## ")[0]
PROGRAMS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["langchain", "litellm", "instructor"])
def test_the_programs_of_the_guide(service: Service, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.count("http://127.0.0.1:8000/v1") == 1
    exec(program.replace("http://127.0.0.1:8000", service.url), {})
    printed = capsys.readouterr().out
    assert len(re.findall("rain|sun", printed)) == (2 if "langchain" in program else 1)
