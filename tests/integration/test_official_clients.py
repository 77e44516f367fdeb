"""The clients that applications use, against the shared service: what each sends is served, and what it gets it reads.

Imports of these libraries take seconds, and some would call home: they are imported inside the tests, with tracing and
telemetry off, and nothing may leave the loopback meanwhile.
"""

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service import Service

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
