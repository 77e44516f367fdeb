"""Calls of LiteLLM's library, over hosted_vllm, openai and anthropic."""

import litellm
from calls import OPENAI, URL, USER, call, versions

versions("litellm")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
for model in ("hosted_vllm/demo", "openai/demo"):
    asked = {"model": model, "api_base": OPENAI, "api_key": "none", "timeout": 60}
    with call(f"{model}: completion"):
        assert litellm.completion(messages=USER, max_tokens=8, **asked).choices[0].message.content
    with call(f"{model}: tools, streamed, echoed"):
        forced = {"tools": [TOOL], "tool_choice": "required", "stream": True, "max_tokens": 32}
        chunks = list(litellm.completion(messages=USER, **forced, **asked))
        message = litellm.stream_chunk_builder(chunks, messages=USER).choices[0].message
        assert message.tool_calls[0].function.name == "f"
        turns = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a"}]
        litellm.completion(messages=turns, tools=[TOOL], max_tokens=8, **asked)
    with call(f"{model}: embedding"):
        assert litellm.embedding(input=["a"], **asked).data
    with call(f"{model}: responses"):
        litellm.responses(input="Once", max_output_tokens=8, **asked)
with call("anthropic/demo: completion"):
    litellm.completion(model="anthropic/demo", api_base=URL, api_key="none", messages=USER, max_tokens=8)
with call("hosted_vllm/demo: rerank"):
    litellm.rerank(model="hosted_vllm/demo", api_base=URL, api_key="none", query="a", documents=["a", "b"])
