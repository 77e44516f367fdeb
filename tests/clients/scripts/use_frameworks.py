"""llama-index, haystack and smolagents."""

from calls import OPENAI, call, versions
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from llama_index.core.llms import ChatMessage as IndexMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from smolagents import OpenAIServerModel

versions("llama-index-llms-openai-like", "haystack-ai", "smolagents")


class Report(BaseModel):
    """Reports the weather."""

    is_warm: bool


to = {"api_base": OPENAI, "api_key": "none"}
llm = OpenAILike(model="demo", is_chat_model=True, is_function_calling_model=True, max_tokens=64, **to)
with call("llama-index, chat and stream"):
    turns = [IndexMessage(role="user", content="Hello")]
    assert llm.chat(turns).message.content and list(llm.stream_chat(turns))
with call("llama-index, complete"):
    assert OpenAILike(model="demo", max_tokens=8, **to).complete("Once").text
with call("llama-index, structured"):
    llm.as_structured_llm(Report).complete("Weather?")
with call("llama-index, embeddings"):
    assert OpenAILikeEmbedding(model_name="demo", **to).get_text_embedding("a")
with call("haystack, chat"):
    chat = OpenAIChatGenerator(api_key=Secret.from_token("none"), model="demo", api_base_url=OPENAI,
                               generation_kwargs={"max_tokens": 16})  # fmt: skip
    assert chat.run([ChatMessage.from_user("Hello")])["replies"][0].text
with call("smolagents, generate and stream"):
    model = OpenAIServerModel("demo", max_tokens=16, **to)
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert model.generate(turns).content and list(model.generate_stream(turns))
