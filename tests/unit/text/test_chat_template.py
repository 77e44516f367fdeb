"""Chat templates against transformers, and the sandbox's limits."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.messages.errors import RequestRefused, SettingsError
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.text.data import SHARED, needs_data, tokenizer_folder

TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja")) if SHARED.is_dir() else []
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello <there> & 'you'"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  Hi 😀 "}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <a> & b", "parameters": {"ü": 1}}}


@cache
def tokenizers(name: str) -> tuple[ModelTokenizer, Any]:
    """Ours and transformers'; rendering changes neither."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder(name)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(path: Path, conversation: list[dict[str, Any]], prompt: bool) -> None:
    import jinja2

    tokenizer, theirs = tokenizers("llama2")
    source = path.read_text()
    ours = ChatTemplate(source, tokenizer.special_tokens)
    try:
        expected = theirs.apply_chat_template(
            conversation, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
    except jinja2.TemplateError:
        with pytest.raises(RequestRefused) as refusal:
            ours.render(conversation, add_generation_prompt=prompt)
        assert refusal.value.param == "messages"
        return
    assert ours.render(conversation, add_generation_prompt=prompt) == expected


@needs_data
@pytest.mark.parametrize("name", ["qwen2.5", "minimind"])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_the_models_own_templates_and_tokens(name: str, tools: list[dict[str, Any]] | None) -> None:
    tokenizer, theirs = tokenizers(name)
    template = find_chat_template(tokenizer_folder(name), None, tokenizer)
    assert template is not None
    for conversation in CONVERSATIONS:
        text = template.render(conversation, tools=tools)
        assert text == theirs.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


@needs_data
def test_a_final_message_can_be_continued() -> None:
    tokenizer, theirs = tokenizers("qwen2.5")
    template = find_chat_template(tokenizer_folder("qwen2.5"), None, tokenizer)
    assert template is not None
    conversation = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "Once upon"}]
    expected = theirs.apply_chat_template(conversation, tokenize=False, continue_final_message=True)
    got = template.render(conversation, add_generation_prompt=False, continue_final_message=True)
    assert got == expected
    assert conversation[-1]["content"] == "Once upon"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{% include 'other' %}",
    ],
)
def test_what_a_template_may_not_do_is_refused(source: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        ChatTemplate(source, {}).render(CONVERSATIONS[0])
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_value")


def test_output_is_capped() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}", {}, max_chars=5000)
    with pytest.raises(RequestRefused, match="5000 characters"):
        template.render([{"role": "user", "content": "x" * 100}])


def test_time_is_capped() -> None:
    ticks = iter(range(1000))
    template = ChatTemplate(
        "{% for i in range(1000) %}{{ i }}{% endfor %}", {}, timeout_s=10, clock=lambda: float(next(ticks))
    )
    with pytest.raises(RequestRefused, match="longer than 10"):
        template.render(CONVERSATIONS[0])


def test_the_pieces_of_the_dialect() -> None:
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}{{ strftime_now('%Y') }}"
        "{{ {'b': '<ü>', 'a': 1} | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2031, 5, 1))
    assert template.render(CONVERSATIONS[2]) == '<s>2031{"b": "<ü>", "a": 1}1'


def test_a_broken_template_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="chat template"):
        ChatTemplate("{% if %}", {})


@needs_data
def test_where_the_template_comes_from(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("gpt2"))
    assert find_chat_template(tmp_path, None, tokenizer) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = find_chat_template(tmp_path, None, tokenizer)
    assert found is not None and found.render([]) == "plain" and found.render([], tools=[{"type": "x"}]) == "tools"
    found = find_chat_template(tmp_path, "tool_use", tokenizer)
    assert found is not None and found.render([]) == "tools"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{**named[0], "name": "rag"}, named[0]]})
    )
    with pytest.raises(SettingsError, match="several chat templates and no default; the model has rag, tool_use"):
        find_chat_template(tmp_path, None, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("beside")
    found = find_chat_template(tmp_path, None, tokenizer)
    assert found is not None and found.render([]) == "beside"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools beside")
    found = find_chat_template(tmp_path, None, tokenizer)
    assert found is not None and found.render([], tools=[{"type": "x"}]) == found.for_tools.source == "tools beside"
    (tmp_path / "mine.jinja").write_text("mine")
    found = find_chat_template(tmp_path, str(tmp_path / "mine.jinja"), tokenizer)
    assert found is not None and found.render([]) == "mine" and found.source_name == "mine.jinja"
    with pytest.raises(SettingsError):
        find_chat_template(tmp_path, str(tmp_path / "absent.jinja"), tokenizer)


PLAIN_ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
DEVELOPER = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
AS_SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        (PLAIN_ROLES, False),
        ('{# the developer role #}a "developer" wrote this: ' + PLAIN_ROLES, False),
        ("{% if messages[0].role == 'developer' %}D{% endif %}" + PLAIN_ROLES, True),
        ("{% if messages[0]['role'] in ['system', 'developer'] %}D{% endif %}" + PLAIN_ROLES, True),
    ],
)
def test_the_developer_role_is_system_where_a_template_does_not_name_it(source: str, knows: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.knows_developer is knows
    role = "developer" if knows else "system"
    assert template.render(DEVELOPER).endswith(f"[{role}]Be brief.[user]Hi")
    assert DEVELOPER[0]["role"] == "developer", "the caller's messages stay as they are"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_real_templates_take_developer_messages_as_system_ones(path: Path) -> None:
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    assert not template.knows_developer
    try:
        expected = template.render(AS_SYSTEM)
    except RequestRefused:  # a template with no place for a system message has none for this one
        with pytest.raises(RequestRefused):
            template.render(DEVELOPER)
        return
    assert template.render(DEVELOPER) == expected
