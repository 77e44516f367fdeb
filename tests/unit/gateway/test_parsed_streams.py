"""However an answer with thinking and calls is cut into steps, its stream says what the whole answer says."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.workers.text.format_list import REASONING_FORMATS, TOOL_FORMATS
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.unit.gateway.rig import EOS, TURN
from tests.unit.gateway.test_tool_calls import TOOLS, gathered, tooled

PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '\n{"name": "weather", "arguments": ',
        '{"city": "Löw 😀"}',
        "}",
        '{"name": "clock"}',
        "[TOOL_CALLS]",
        "[",
        "]",
        "weather",
        "[ARGS]",
        "ä",
        "\n",
        " ",
        "word",
        "\x00turn",
        "\x00half",
    ]
)


def tokens_of(pieces: list[str]) -> list[int]:
    """Bytes; a special token and half a character among them."""
    odd = {"\x00turn": [TURN], "\x00half": [0xC3]}
    return [token for piece in pieces for token in odd.get(piece, list(piece.encode()))]


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    pieces=st.lists(PIECES, max_size=14),
    at_once=st.integers(1, 9),
    ends=st.booleans(),
    asked=st.fixed_dictionaries(
        {},
        optional={
            "stop": st.sampled_from(["ö", "</tool", "cit"]),
            "parallel_tool_calls": st.just(False),
            "include_reasoning": st.just(False),
            "skip_special_tokens": st.just(False),
            "logprobs": st.just(True),
            "n": st.just(2),
        },
    ),
)
async def test_a_stream_says_what_the_whole_answer_says(
    name: str, pieces: list[str], at_once: int, ends: bool, asked: dict[str, Any]
) -> None:
    script = [*tokens_of(pieces), *([EOS] if ends else [])] or [EOS]
    backend = FakeBackend(script=fixed_script(script), eos_token_ids=frozenset({EOS}), tokens_per_step=at_once)
    formats = {"tool_format": TOOL_FORMATS[name], "reasoning_format": REASONING_FORMATS["qwen3"]}
    async with tooled(backend, max_model_len=4096, **formats) as rig:
        whole = (await rig.chat(tools=TOOLS, max_tokens=300, **asked)).json()
        streamed = gathered((await rig.chat(tools=TOOLS, max_tokens=300, stream=True, **asked)).text)
    for choice in whole["choices"]:
        message, stream = choice["message"], streamed[choice["index"]]
        calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())]
        assert stream["calls"] == calls
        assert stream["content"] == (message["content"] or "")
        assert stream["reasoning"] == message.get("reasoning", "")
        assert stream["finish"] == choice["finish_reason"]
        if asked.get("skip_special_tokens") is None:
            assert "<turn>" not in stream["content"] + stream["reasoning"]
