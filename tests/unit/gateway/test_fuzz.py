"""Bodies made up by hypothesis: never a 5xx, every refusal in the contract's shape, the service alive afterwards."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.cluster.gateway.schemas.chat_body import ChatBody
from tandem.cluster.gateway.schemas.generation_body import CompletionBody
from tandem.cluster.gateway.schemas.reading import NEUTRAL
from tests.unit.gateway.rig import ALL, CHAT, COMPLETE, MINIMAL, USER, error_of, gateway
from tests.unit.gateway.test_tool_calls import CALL, THINKING, TOOLS, TURNS, saying, tooled

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 600),
    st.floats(),
    st.floats(-3, 3),
    st.text(max_size=20),
    st.sampled_from(["text", "user", "assistant", "none", "auto", "echo", "\x00", "\ud800", "😀"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["type", "text", "role", "content", "1", "x"]), inner, max_size=4),
    ),
    max_leaves=8,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *NEUTRAL, "tokens", "bogus", ""})
MUTATIONS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
JSON = {"content-type": "application/json"}
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def check(status: int, answer: Any) -> None:
    assert status < 500, answer.text
    if status != 200:
        error_of(answer)


@RELAXED
@given(st.sampled_from(ALL), st.lists(MUTATIONS, min_size=1, max_size=8))
async def test_mutated_bodies_never_hurt(path: str, mutations: list[dict[str, Any]]) -> None:
    async with gateway() as rig:
        for mutation in mutations:
            body = json.dumps({**MINIMAL[path], "max_tokens": 3, **mutation}).encode()
            answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
            check(answer.status_code, answer)
        alive = await rig.client.post(CHAT, json={"messages": USER, "max_tokens": 2})
        assert alive.status_code == 200


@RELAXED
@given(st.sampled_from(ALL), st.lists(st.binary(max_size=200), min_size=1, max_size=8))
async def test_random_bytes_never_hurt(path: str, bodies: list[bytes]) -> None:
    async with gateway() as rig:
        for body in bodies:
            answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            check(answer.status_code, answer)


@RELAXED
@given(st.text(), st.lists(st.text(max_size=5), max_size=4), st.booleans())
async def test_any_prompt_text_is_served_or_refused(prompt: str, stop: list[str], stream: bool) -> None:
    async with gateway() as rig:
        body = json.dumps({"prompt": prompt, "stop": stop, "stream": stream, "max_tokens": 40}).encode()
        answer = await rig.client.post(COMPLETE, content=body, headers={"content-type": "application/json"})
        check(answer.status_code, answer)


@RELAXED
@given(st.dictionaries(st.sampled_from(["x-request-id", "authorization", "content-length-x"]), st.text(max_size=50)))
async def test_any_header_is_survived(headers: dict[str, str]) -> None:
    async with gateway() as rig:
        raw = [(name, value.encode("utf-8", "replace")) for name, value in headers.items()]
        answer = await rig.client.get("/livez", headers=raw)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"].isascii()


PLACES: tuple[tuple[str | int, ...], ...] = (
    ("tools", 0),
    ("tools", 0, "function"),
    ("tools", 0, "function", "name"),
    ("tools", 0, "function", "parameters"),
    ("tools", 0, "function", "parameters", "properties"),
    ("tool_choice",),
    ("chat_template_kwargs",),
    ("chat_template_kwargs", "enable_thinking"),
    ("reasoning_effort",),
    ("messages", 1),
    ("messages", 1, "reasoning"),
    ("messages", 1, "tool_calls", 0),
    ("messages", 1, "tool_calls", 0, "function", "arguments"),
    ("messages", 2, "tool_call_id"),
)


@settings(RELAXED, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=8), st.booleans())
async def test_mutated_tools_never_hurt(mutations: list[tuple[tuple[str | int, ...], Any]], stream: bool) -> None:
    base = {"messages": TURNS, "tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": True}}
    async with tooled(saying(CALL), **THINKING) as rig:
        for path, value in mutations:
            body = json.loads(json.dumps({**base, "stream": stream, "max_tokens": 60}))
            place: Any = body
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            answer = await rig.client.post(CHAT, content=json.dumps(body).encode(), headers=JSON)
            check(answer.status_code, answer)
