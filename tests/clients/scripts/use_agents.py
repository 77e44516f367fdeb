"""Agents of OpenAI's SDK and of pydantic-ai, and structured output of instructor and LangChain."""

import asyncio
from typing import Literal

import agents
import anthropic
import instructor
import openai
from calls import OPENAI, URL, USER, call, versions
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

versions("openai-agents", "pydantic-ai-slim", "instructor", "langchain-openai")


class Report(BaseModel):
    """Reports the weather."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["rain", "sun"]


plain = openai.OpenAI(base_url=OPENAI, api_key="none", max_retries=0)


def fresh() -> openai.AsyncOpenAI:
    """A client for one event loop."""
    return openai.AsyncOpenAI(base_url=OPENAI, api_key="none", max_retries=0)


agents.set_tracing_disabled(True)
FEW = agents.ModelSettings(max_tokens=64)


@agents.function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "sun"


for name, kind in {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}.items():

    def agent(kind: type = kind, **options: object) -> agents.Agent:
        return agents.Agent("a", model=kind(model="demo", openai_client=fresh()), model_settings=FEW, **options)

    for what, options in {"plain": {}, "tool": {"tools": [weather]}, "output_type": {"output_type": Report}}.items():
        with call(f"openai-agents, {name}: {what}"):
            said = asyncio.run(agents.Runner.run(agent(**options), "How is the weather?", max_turns=2))
            assert what != "output_type" or said.final_output.sky
    with call(f"openai-agents, {name}: streamed"):

        async def streamed(made: agents.Agent) -> None:
            events = agents.Runner.run_streamed(made, "Weather?", max_turns=2).stream_events()
            assert [event async for event in events]

        asyncio.run(streamed(agent(tools=[weather])))
for name, kind in {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}.items():
    for what, form in {"plain": str, "ToolOutput": ToolOutput(Report), "NativeOutput": NativeOutput(Report)}.items():
        with call(f"pydantic-ai, {name}: {what}"):
            own = Agent(kind("demo", provider=OpenAIProvider(openai_client=fresh())), output_type=form)
            said = asyncio.run(own.run("How is the weather?", model_settings={"max_tokens": 64}))
            assert form is str or said.output.sky
for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    whose, why = ("model", "nothing but the prompt asks for the schema") if mode == "JSON" else ("ours", "")
    with call(f"instructor, {mode}", whose, why):
        wrapped = instructor.from_openai(plain, mode=instructor.Mode[mode])
        assert wrapped.chat.completions.create(model="demo", messages=USER, response_model=Report, max_retries=0).sky
with call("instructor, anthropic"):
    wrapped = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0))
    wrapped.chat.completions.create(model="demo", messages=USER, response_model=Report, max_tokens=64, max_retries=0)
chat = ChatOpenAI(model="demo", base_url=OPENAI, api_key="none", max_tokens=64, max_retries=0)
with call("langchain, invoke and stream"):
    assert chat.invoke("Hello").content and list(chat.stream("Hello"))
for method in ("json_schema", "function_calling"):
    with call(f"langchain, structured by {method}"):
        assert chat.with_structured_output(Report, method=method, strict=True).invoke("Weather?").sky
with call("langchain, Responses API"):
    assert ChatOpenAI(model="demo", base_url=OPENAI, api_key="none", use_responses_api=True).invoke("Hello").content
with call("langchain, embeddings with check_embedding_ctx_length=False"):
    made = OpenAIEmbeddings(model="demo", base_url=OPENAI, api_key="none", check_embedding_ctx_length=False)
    assert made.embed_query("a")
