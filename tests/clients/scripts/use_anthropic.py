"""Calls of Anthropic's Python client."""

import anthropic
from calls import URL, USER, call, refused, versions

versions("anthropic")
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["rain", "sun"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
TOOL = {"name": "report", "description": "Reports the weather.", "input_schema": SCHEMA}
ASKED = {"model": "demo", "max_tokens": 32, "messages": USER}

with call("create"):
    assert client.messages.create(**ASKED).content[0].text
with call("stream, tool_choice any, tool_result"):
    with client.messages.stream(**ASKED, tools=[TOOL], tool_choice={"type": "any"}) as stream:
        made = stream.get_final_message()
    use = next(block for block in made.content if block.type == "tool_use")
    assert use.input["sky"] in ("rain", "sun")
    turns = [
        *USER,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"}]},
    ]
    client.messages.create(**{**ASKED, "messages": turns}, tools=[TOOL])
with call("count_tokens"):
    assert client.messages.count_tokens(model="demo", messages=USER, tools=[TOOL]).input_tokens > 0
with call("cache_control, system blocks"):
    mark = {"cache_control": {"type": "ephemeral"}}
    told = [{"role": "user", "content": [{"type": "text", "text": "Hello", **mark}]}]
    system = [{"type": "text", "text": "Be kind.", **mark}]
    client.messages.create(model="demo", max_tokens=4, system=system, messages=told, tools=[{**TOOL, **mark}])
for kind in ("adaptive", "disabled"):
    with call(f"thinking {kind}"):
        client.messages.create(**ASKED, thinking={"type": kind})
with call("thinking enabled with a budget"):
    client.messages.create(**{**ASKED, "max_tokens": 1100}, stop_sequences=["."],
                           thinking={"type": "enabled", "budget_tokens": 1024})  # fmt: skip
with call("output_config, effort"):
    client.messages.create(**ASKED, extra_body={"output_config": {"effort": "low"}})
with call("output_config, json_schema"):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert "sky" in client.messages.create(**ASKED, extra_body={"output_config": form}).content[0].text
with call("beta, context_management ignored by name"):
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    raw = client.beta.messages.with_raw_response.create(
        **ASKED, betas=["context-management-2025-06-27"], context_management=edits
    )
    assert "context_management" in raw.headers["x-tandem-ignored"], raw.headers
with call("tool with eager_input_streaming"):
    client.messages.create(**ASKED, tools=[{**TOOL, "eager_input_streaming": True}])
with call("models"):
    assert client.models.list().data[0].id == "demo"
source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
with refused("image", "image"):
    client.messages.create(model="demo", max_tokens=4,
                           messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])  # fmt: skip
with call("server tools"):
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    raw = client.messages.with_raw_response.create(**ASKED, tools=tools)
    assert raw.headers["x-tandem-ignored"] == "tools[].web_search", raw.headers
with refused("batches", "batches"):
    client.messages.batches.list()
