"""docs/serving/ lists the fields that are refused: all that the gateway knows by name, and others of clients."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.gateway.anthropic.messages_hints import HINTS as MESSAGES
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.schemas.generation_body import CompletionBody, read_completion
from tandem.cluster.gateway.schemas.ignored_fields import Ignorables, IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import CHAT_HINTS, HINTS, THOUGHTS
from tandem.cluster.gateway.schemas.reading import NEUTRAL
from tandem.cluster.gateway.serving.sampling_fields import checked_beams
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.unit.gateway.rig import MODEL, events, gateway

PAGES = Path(__file__).resolve().parents[3] / "docs" / "serving"
SECTION = (PAGES / "openai.md").read_text().partition("## Refused fields")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| [^|]+ \| (.*?) \| ?(.*?) ?\|$", SECTION, re.MULTILINE)[1:]
REFUSED = sorted({name for cell, _ in ROWS for name in re.findall(r"`([a-z_]+)`", cell)})
BODIES: list[dict[str, Any]] = [
    json.loads(body)
    for page in sorted(PAGES.glob("*.md"))
    for body in re.findall(r"/v1/completions -H [^{]*?-d '(\{.*?\})'", page.read_text(), re.DOTALL)
]
IN_CHAT = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
IN_CHAT |= {"chat_template_kwargs", "chat_template", "documents"}
"""Served in chat; some are accepted in completions too, with a value that asks for nothing."""
SERVED = IN_CHAT | set(HINTS)
"""Not refused."""


def refused_param(body: dict[str, object], *, completion: bool = False) -> str | None:
    """The `param` of the 400 for an unsupported parameter; None when the body is accepted."""
    try:
        if completion:
            read_completion({"prompt": "x", "skip_special_tokens": False, **body}, GatewaySettings(), IgnoredFields())
        else:
            read_chat(
                {"messages": [{"role": "user", "content": "x"}], "skip_special_tokens": False, **body},
                GatewaySettings(),
                IgnoredFields(),
            )
    except RequestRefused as refusal:
        return refusal.param if (refusal.status, refusal.code) == (400, "unsupported_parameter") else refusal.code
    return None


def ignored_table(section: str) -> dict[str, set[str]]:
    """A page's table of ignored fields: names by place, those that --strict-fields accepts with a *."""
    found: dict[str, set[str]] = {}
    table = section.partition("| in | ignored |")[2].partition("\n\n")[0]
    for places, names in re.findall(r"^\| (.*?) \| (`.*`\*?) ?\|$", table, re.MULTILINE):
        for place in re.findall(r"`([a-z_.\[\]]+)`", places) or [""]:
            found[place] = set(re.findall(r"`[a-z_]+`\*?", names))
    return found


def shown(table: Ignorables) -> dict[str, set[str]]:
    return {
        place: {f"`{name}`{'*' if entry.is_usual else ''}" for name, entry in entries.items() if not entry.is_kept}
        for place, entries in table.items()
    }


def test_the_ignored_fields_are_those_of_the_gateway() -> None:
    listed = ignored_table((PAGES / "openai.md").read_text())
    beside = {f"`{name}`" for name in (*THOUGHTS[""], "reasoning", "reasoning_content")}
    assert beside <= listed["messages[]"]
    listed["messages[]"] -= beside
    listed[""] -= {"`x-request-id`"}
    assert listed == shown(CHAT_HINTS)
    page = (PAGES / "responses-and-messages.md").read_text().partition("## Anthropic's Messages API")[2]
    assert {**ignored_table(page), "": set()} == {**shown(MESSAGES), "": set()}
    assert ignored_table(page)[""] - {"`count_tokens`"} == shown(MESSAGES)[""]


def test_every_field_that_is_known_and_not_served_is_listed() -> None:
    listed = {name for cells in ROWS for name in re.findall(r"`([a-z_]+)`", " ".join(cells))}
    assert set(NEUTRAL) - SERVED <= listed
    assert len(REFUSED) > 15


def test_they_are_refused_by_name() -> None:
    value: object = {"x": 1}
    for name in REFUSED:
        assert refused_param({name: value}) == name
        assert refused_param({name: None}) in (None, name)  # null: of known fields only
        if name != "echo":
            assert refused_param({name: value}, completion=True) == name


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "parallel_tool_calls": True},
        {"reasoning_effort": "none", "separate_reasoning": True, "stream_reasoning": True},
        {"chat_template_kwargs": {}, "chat_template": None, "documents": [], "logits_processors": []},
        {"suffix": "", "echo": False, "verbosity": "medium"},
        {"spaces_between_special_tokens": True, "modalities": ["text"], "store": False, "service_tier": "auto"},
        {"metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y"},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(body: dict[str, object]) -> None:
    assert refused_param(body) is None
    assert set(body) <= set(REFUSED) | SERVED


def test_parts_of_messages_and_fields_of_chat_are_refused_as_the_page_says() -> None:
    assert refused_param({"chat_template_kwargs": {"a": False}}, completion=True) == "chat_template_kwargs"
    assert refused_param({"reasoning_effort": "low"}, completion=True) == "reasoning_effort"
    assert refused_param({"tools": []}, completion=True) == "tools"
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert refused_param({"messages": picture}) == "messages[0].content[0]"
    assert refused_param({"echo": True, "logprobs": 1, "stream": True}, completion=True) == "logprobs"
    assert refused_param({"prompt_logprobs": 1, "stream": True}) == "prompt_logprobs"
    assert refused_param({"best_of": 3, "n": 2, "stream": True}, completion=True) == "best_of"


def test_no_served_field_is_listed_as_refused() -> None:
    served = set(ChatBody.__struct_fields__) & set(CompletionBody.__struct_fields__)
    assert not served & set(REFUSED)


def test_the_bodies_on_the_page_are_those_that_are_tried_here() -> None:
    assert len(BODIES) == 7
    assert sum("echo" in body for body in BODIES) == 1
    assert sum("use_beam_search" in body for body in BODIES) == 1
    assert sum("stream_options" in body for body in BODIES) == 1


@pytest.mark.parametrize("body", BODIES, ids=lambda body: "-".join(body))
async def test_the_bodies_on_the_page_are_answered(body: dict[str, Any]) -> None:
    checked_beams(read_completion(dict(body), GatewaySettings(), IgnoredFields()), 20)
    async with gateway() as rig:
        asked = {**body, "model": MODEL, "max_tokens": min(1, body.get("max_tokens", 1))}
        answer = await rig.client.post("/v1/completions", json=asked)
        assert answer.status_code == 200
        if body.get("stream"):
            *chunks, done = events(answer.text)
            assert done == "[DONE]"
            assert all(chunk.get("usage") for chunk in chunks) is ("stream_options" in body)
        elif body.get("echo"):
            (choice,) = answer.json()["choices"]
            assert choice["text"] == body["prompt"] == "".join(choice["logprobs"]["tokens"][1:])
            assert choice["logprobs"]["token_logprobs"][0] is None
        else:
            assert len(answer.json()["choices"]) == body.get("n", 1)
