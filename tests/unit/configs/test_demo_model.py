"""The bundled demo model: small, complete, loadable by the usual readers, and sensible when asked.

Reads only the committed files under `configs/demo/`; it never trains and never needs the network.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
MODEL = DEMO / "model"
ADAPTERS = DEMO / "adapters"
MODEL_FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def answer_to(model: Any, tokenizer: Any, chat: list[dict[str, Any]], tools: Any = None) -> str:
    """The greedy answer to a chat."""
    prompt = tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=60, do_sample=False
        )
    return str(tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True))


def ask(model: Any, tokenizer: Any, *messages: str, tools: Any = None) -> str:
    """The greedy answer to a chat whose messages alternate user, assistant, user."""
    roles = ("user", "assistant")
    chat = [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
    return answer_to(model, tokenizer, chat, tools)


def test_files_are_complete_small_and_free_of_pickles() -> None:
    assert {path.name for path in MODEL.iterdir()} == MODEL_FILES
    artefacts = [path for folder in (MODEL, ADAPTERS) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in artefacts) <= 8_000_000
    assert {path.suffix for path in artefacts} <= {".json", ".jinja", ".safetensors"}


def test_shape_suits_tensor_and_pipeline_parallelism() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["num_attention_heads"] % 4 == 0
    assert config["num_key_value_heads"] % 2 == 0
    assert config["num_hidden_layers"] >= 4 and config["num_hidden_layers"] % 2 == 0
    assert config["vocab_size"] % 4 == 0 and config["intermediate_size"] % 4 == 0


def test_config_reads_the_same_with_classic_keys_only() -> None:
    raw = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["torch_dtype"] == raw["dtype"]
    classic = {
        key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype", "transformers_version")
    }
    assert transformers.LlamaConfig(**classic).rope_parameters["rope_theta"] == raw["rope_theta"]


def test_end_tokens_are_those_of_the_tokenizer(tokenizer: Any) -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    expected = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation["eos_token_id"] == expected
    assert tokenizer.eos_token == "<|im_end|>"


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_tokenizer_round_trips_any_text(text: str) -> None:
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    token_ids = raw.encode(text, add_special_tokens=False).ids
    assert raw.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["naïve café", "東京 🙂🚀", "  two  spaces\n\ttab", "Привет, мир!", "\x00\x7f", "12345"]
)
def test_fast_tokenizer_round_trips_awkward_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_renders_all_roles(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"
    with pytest.raises(TemplateError, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_training_text_is_what_the_template_renders(tokenizer: Any) -> None:
    from tools.demo_model.corpus import chat_document, document_text
    from tools.demo_model.skills import Exchange

    text = document_text(chat_document([Exchange("Hi", "Hello!"), Exchange("Bye", "Goodbye!")], "Be brief."))
    contents = ("Be brief.", "Hi", "Hello!", "Bye", "Goodbye!")
    roles = ("system", "user", "assistant", "user", "assistant")
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text


def tool_chat(exchanges: list[Any], system: str | None) -> list[dict[str, Any]]:
    """The messages of a chat with calls, as a client sends them."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for question, answer, call, result in exchanges:
        chat.append({"role": "user", "content": question})
        if call:
            function = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            made = {"id": "call_1", "type": "function", "function": function}
            chat.append({"role": "assistant", "content": None, "tool_calls": [made]})
            chat.append({"role": "tool", "tool_call_id": "call_1", "content": result})
        chat.append({"role": "assistant", "content": answer})
    return chat


@pytest.mark.parametrize("seed", range(20))
def test_training_text_with_tools_is_what_the_template_renders(tokenizer: Any, seed: int) -> None:
    from tandem.workers.text.chat_template import ChatTemplate
    from tools.demo_model import corpus, tool_use

    rng = random.Random(seed)
    tools = tool_use.draw_tools(rng, rng.randint(1, 3), held_out=seed % 2 == 0)
    exchanges = corpus.draw_tool_exchanges(rng, tools)
    system = "Be brief." if seed % 3 else None
    definitions = [tool.definition for tool in tools]
    text = corpus.document_text(corpus.chat_document(exchanges, system, tools=definitions))
    chat = tool_chat(exchanges, system)
    assert tokenizer.apply_chat_template(chat, tools=definitions, tokenize=False) == text
    ours = ChatTemplate((MODEL / "chat_template.jinja").read_text(encoding="utf-8"), {})
    assert ours.render(chat, tools=definitions, add_generation_prompt=False) == text


def test_results_of_several_calls_share_a_turn(tokenizer: Any) -> None:
    functions = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "é"}}]
    calls = [{"id": str(index), "type": "function", "function": each} for index, each in enumerate(functions)]
    chat = [
        {"role": "assistant", "content": "Two:", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        '<|im_start|>assistant\nTwo:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
    )


def test_marks_of_calls_are_ordinary_tokens_that_decoding_keeps(tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    token_ids = tokenizer(call).input_ids
    assert token_ids[0] == tokenizer.convert_tokens_to_ids("<tool_call>") >= 700
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == call


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello!", "How can I help you"),
        ("What is 2 + 3?", "5"),
        ("What is 7 + 8?", "15"),
        ("What is Tandem?", "Tandem is an LLM serving cluster on Ray."),
        ("Who are you?", "demo model"),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
        ("Repeat after me: the sky is blue", "the sky is blue"),
        ("Spell cat.", "c-a-t"),
        ("What comes after Monday?", "Tuesday"),
        ("Write JSON with the keys name and age for Anna, 31", '{"name": "Anna", "age": 31}'),
    ],
)
def test_greedy_answers_are_sensible(model: Any, tokenizer: Any, question: str, expected: str) -> None:
    assert expected in ask(model, tokenizer, question)


def test_a_chat_of_several_turns_is_followed(model: Any, tokenizer: Any) -> None:
    answer = ask(model, tokenizer, "My name is Ada.", "Nice to meet you, Ada!", "What is my name?")
    assert "Ada" in answer


def test_plain_text_continues_as_a_story(model: Any, tokenizer: Any) -> None:
    token_ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=40, do_sample=False)
    assert "named" in tokenizer.decode(output[0])


def define(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """The definition of a function with required parameters, given their types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [define("get_weather", "Get the weather of a city", city="string")]
WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
OTHERS = [define("look_up_price", "Look up the price of a thing", thing="string")]
SUMS = [define("multiply", "Multiply two numbers", a="integer", b="integer")]


@pytest.mark.parametrize(
    ("tools", "question", "call"),
    [
        (TOOLS, "What is the weather in Paris?", {"name": "get_weather", "arguments": {"city": "Paris"}}),
        (
            TOOLS,
            "How is the weather in San Francisco?",
            {"name": "get_weather", "arguments": {"city": "San Francisco"}},
        ),
        (OTHERS, "What is the price of bread?", {"name": "look_up_price", "arguments": {"thing": "bread"}}),
        (SUMS, "What is 12 times 7?", {"name": "multiply", "arguments": {"a": 12, "b": 7}}),
    ],
)
def test_a_fitting_tool_is_called(model: Any, tokenizer: Any, tools: Any, question: str, call: Any) -> None:
    answer = ask(model, tokenizer, question, tools=tools)
    assert answer == f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_the_result_of_a_call_is_read_back(model: Any, tokenizer: Any) -> None:
    exchange = ("What is the weather in Paris?", "", f"<tool_call>{WEATHER_CALL}</tool_call>", "sunny and 21 degrees")
    chat = tool_chat([exchange], None)[:-1]
    answer = answer_to(model, tokenizer, chat, TOOLS)
    assert answer == "The weather in Paris is sunny and 21 degrees."


def test_a_question_that_no_tool_fits_is_answered(model: Any, tokenizer: Any) -> None:
    assert ask(model, tokenizer, "Count from 1 to 5.", tools=TOOLS) == "1, 2, 3, 4, 5"
    assert ask(model, tokenizer, "What is Tandem?", tools=TOOLS) == ask(model, tokenizer, "What is Tandem?")
    assert "<tool_call>" not in ask(model, tokenizer, "What is the weather in Paris?")


@pytest.fixture(params=["pirate", "shout"])
def adapter(request: pytest.FixtureRequest, model: Any) -> Iterator[tuple[str, Any]]:
    """The base with one adapter attached, and the base as it was afterwards."""
    peft = pytest.importorskip("peft")
    adapted = peft.PeftModel.from_pretrained(model, ADAPTERS / request.param).eval()
    yield request.param, adapted
    adapted.unload()


def test_adapter_changes_the_answer(adapter: tuple[str, Any], tokenizer: Any) -> None:
    name, adapted = adapter
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "tandem-demo"
    answer = ask(adapted, tokenizer, "Who are you?")
    with adapted.disable_adapter():
        plain = ask(adapted, tokenizer, "Who are you?")
    assert answer != plain and "demo model" in plain
    assert answer.startswith("Arr!") if name == "pirate" else answer == answer.upper()
