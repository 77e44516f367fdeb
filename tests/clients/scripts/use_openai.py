"""Calls of openai's Python client: what must work, and what must be refused by name."""

import asyncio
from typing import Literal

import openai
from calls import OPENAI, USER, call, refused, versions
from pydantic import BaseModel, ConfigDict

versions("openai")
client = openai.OpenAI(base_url=OPENAI, api_key="none", max_retries=0, timeout=60)


class Report(BaseModel):
    """Reports the weather."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["rain", "sun"]
    is_warm: bool


CHAT = {"model": "demo", "messages": USER, "max_tokens": 16}
ASKED = {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 16}
TOOL = {"type": "function", "function": {"name": "Report", "parameters": Report.model_json_schema()}}
FLAT = {"type": "function", "name": "Report", "parameters": Report.model_json_schema()}

with call("chat"):
    assert client.chat.completions.create(**CHAT).choices[0].message.content
with call("chat, stream with usage"):
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens
with call("chat, stream helper"):
    with client.chat.completions.stream(model="demo", messages=USER, max_tokens=16) as stream:
        assert stream.get_final_completion is not None
        for _ in stream:
            pass
with call("chat, parse"):
    said = client.chat.completions.parse(model="demo", messages=USER, response_format=Report)
    assert said.choices[0].message.parsed.sky in ("rain", "sun")
for choice in ("auto", "required", {"type": "function", "function": {"name": "Report"}}):
    with call(f"chat, tools {choice if isinstance(choice, str) else 'named'}"):
        said = client.chat.completions.create(**{**CHAT, "max_tokens": 64}, tools=[TOOL], tool_choice=choice)
        made = said.choices[0].message.tool_calls
        assert choice == "auto" or Report.model_validate_json(made[0].function.arguments)
with call("chat, tools strict, streamed, echoed with its indices"):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    deltas = client.chat.completions.create(
        **{**CHAT, "max_tokens": 64}, tools=[strict], tool_choice="required", stream=True
    )
    parts = [part for chunk in deltas for part in (chunk.choices[0].delta.tool_calls or ())]
    arguments = "".join(part.function.arguments or "" for part in parts)
    function = {"name": "Report", "arguments": arguments}
    echoed = {"role": "assistant", "tool_calls": [{"index": 0, "id": "a", "type": "function", "function": function}]}
    turns = [*USER, echoed, {"role": "tool", "tool_call_id": "a", "content": "sun"}]
    raw = client.chat.completions.with_raw_response.create(
        **{**CHAT, "messages": turns}, tools=[strict], tool_choice="none"
    )
    assert "messages[].tool_calls[].index" in raw.headers["x-tandem-ignored"], raw.headers
with call("chat, json_object"):
    client.chat.completions.create(**CHAT, response_format={"type": "json_object"})
with call("chat, logprobs and n"):
    said = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, n=2)
    assert len(said.choices) == 2 and len(said.choices[0].logprobs.content[0].top_logprobs) == 3
with call("chat, store, metadata and verbosity ignored by name"):
    raw = client.chat.completions.with_raw_response.create(**CHAT, store=True, metadata={"a": "b"}, verbosity="low")
    assert {"store", "verbosity"} <= set(raw.headers["x-tandem-ignored"].split(", ")), raw.headers
with call("completions, echo and logprobs"):
    said = client.completions.create(model="demo", prompt="Once", max_tokens=4, echo=True, logprobs=2)
    assert said.choices[0].text.startswith("Once") and said.choices[0].logprobs.token_logprobs[0] is None
with call("completions, beam search"):
    client.completions.create(model="demo", prompt="Once", max_tokens=4, n=2, extra_body={"use_beam_search": True})
with call("embeddings, base64 by default"):
    made = client.embeddings.create(model="demo", input=["a whale", "the sea"])
    assert len(made.data) == 2 and isinstance(made.data[0].embedding[0], float)
with call("models"):
    assert [one.id for one in client.models.list()] == ["demo"]
with call("responses, stored, continued, listed, deleted"):
    first = client.responses.create(**ASKED)
    second = client.responses.create(**ASKED, previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert list(client.responses.input_items.list(second.id))
    client.responses.delete(second.id)
with call("responses, stream with tools"):
    events = list(client.responses.create(**{**ASKED, "max_output_tokens": 64}, tools=[FLAT], tool_choice="required",
                                          stream=True))  # fmt: skip
    assert events[-1].type == "response.completed" and events[-1].response.output[0].type == "function_call"
with call("responses, parse"):
    assert client.responses.parse(model="demo", input="Weather?", text_format=Report).output_parsed
with call("responses, include, truncation, top_logprobs, custom tool"):
    client.responses.create(**ASKED, include=["reasoning.encrypted_content"], truncation="auto", top_logprobs=2,
                            tools=[{"type": "custom", "name": "shell"}])  # fmt: skip
with call("responses, input_tokens"):
    assert client.responses.input_tokens.count(model="demo", input="Tell me a story.").input_tokens > 0
with call("50 chats at once"):

    async def many() -> None:
        async with openai.AsyncOpenAI(base_url=OPENAI, api_key="none", max_retries=0) as several:
            said = await asyncio.gather(*(several.chat.completions.create(**CHAT) for _ in range(50)))
            assert all(one.choices[0].message.content for one in said)

    asyncio.run(many())
picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
with refused("chat, image_url", "image_url"):
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [picture]}])
with refused("chat, audio", "audio"):
    client.chat.completions.create(**CHAT, audio={"voice": "alloy", "format": "wav"})
with refused("chat, custom tools", "tools[0].type"):
    client.chat.completions.create(**CHAT, tools=[{"type": "custom", "custom": {"name": "a"}}])
with refused("completions, suffix", "suffix"):
    client.completions.create(model="demo", prompt="Once", suffix="end")
with refused("responses, background", "background"):
    client.responses.create(**ASKED, background=True)
with refused("unknown model", "no-such"):
    client.chat.completions.create(**{**CHAT, "model": "no-such"})
for name, absent in {
    "files": lambda: client.files.list(),
    "batches": lambda: client.batches.list(),
    "moderations": lambda: client.moderations.create(input="a"),
    "conversations": lambda: client.conversations.create(),
}.items():
    with refused(name, name):
        absent()
