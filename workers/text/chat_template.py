"""Renders chat messages to prompt text with a model's own Jinja template, as transformers renders it.

Templates come from the operator (--chat-template) or the model folder, never from a request. They still run in jinja2's
ImmutableSandboxedEnvironment, with limits on the output's size and on rendering time. Independent of HTTP; `render` may
be called from any thread.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tandem.workers.messages.errors import RequestRefused, SettingsError
from tandem.workers.text.tokenizer import ModelTokenizer
from tandem.workers.text.vocabulary.vocabulary_files import read_json

_CONTINUE_MARK = "\x00continue-here\x00"
ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables that render() sets, or stands for, itself."""
THINKING_SWITCHES = frozenset(("enable_thinking", "thinking", "thinking_mode", "reasoning_effort", "thinking_budget"))
"""Variables of templates that think. A template without them has nothing to switch."""


class GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}` (marks the assistant's text for training) as plain content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's form is jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template with the model's special tokens. `source_name`: its origin, for the log.

    source: its text. knows_developer: the template mentions OpenAI's role `developer`. Otherwise such messages are
    rendered as `system`. variables: the names that it uses and does not set itself. has_short_call_ids: it refuses ids
    of tool calls that have not 9 characters, as Mistral's do.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        source_name: str = "given",
        with_tools: "ChatTemplate | None" = None,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = 32 * 2**20,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compiles `source`. SettingsError when it is not a valid template.

        with_tools: renders in its place where there are tools. now: the clock of `strftime_now`. max_chars, timeout_s:
        limits of one rendering. clock: seconds, for the timeout.
        """
        self.source = source
        self._with_tools = with_tools
        self.source_name = source_name
        self.has_short_call_ids = re.search(r"length\s*!=\s*9\b", source) is not None
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._clock = clock
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # each rendering copies them: a ChainMap slowly
            parsed = environment.parse(source)
            self.knows_developer = _names(parsed, "developer")
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        except jinja2.TemplateError as error:
            raise SettingsError(f"chat template ({source_name}): {error}", "--chat-template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt text. RequestRefused when the template rejects the messages or a limit is exceeded.

        tools, documents, variables: passed to the template as they are; variables replace none that it always has.
        add_generation_prompt: the text ends with the assistant's header.
        continue_final_message: the text ends inside the last message, so that the model continues it.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        conversation = [self._in_known_role(message) for message in messages]
        if continue_final_message:
            conversation[-1]["content"] = _final_text(conversation) + _CONTINUE_MARK
        names: dict[str, Any] = {
            **(variables or {}),
            **self._special_tokens,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(names)
        return _cut_at_mark(text) if continue_final_message else text

    @property
    def for_tools(self) -> "ChatTemplate":
        """The template that renders where there are tools."""
        return self if self._with_tools is None else self._with_tools

    def takes(self, name: str) -> bool:
        """Returns whether a variable of this name may be passed to render(): the template uses it, and it is not one
        that it always has."""
        return name in self.variables | self.for_tools.variables and name not in (*ALWAYS_GIVEN, *self._special_tokens)

    def _in_known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message.get("role") == "developer" and not self.knows_developer:
            return {**message, "role": "system"}
        return dict(message)

    def _run(self, variables: dict[str, Any]) -> str:
        deadline = self._clock() + self._timeout_s
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self._template.generate(**variables):
                pieces.append(piece)
                chars += len(piece)
                if chars > self._max_chars:
                    raise _refused(f"the rendered prompt exceeds {self._max_chars} characters")
                if self._clock() > deadline:
                    raise _refused(f"rendering took longer than {self._timeout_s} s")
        except RequestRefused:
            raise
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise _refused(f"{type(error).__name__} while rendering") from error
        return "".join(pieces)


def find_chat_template(folder: Path, override: str | None, tokenizer: ModelTokenizer) -> ChatTemplate | None:
    """Returns the model's template, with the one for tools inside it where the model has one of its own; None when
    there is none. SettingsError as in chosen_templates(), and when the template is invalid."""
    found = chosen_templates(folder, override)
    if found is None:
        return None
    specials, main, tools = tokenizer.special_tokens, found.main, found.with_tools
    with_tools = None if tools is None else ChatTemplate(tools.text, specials, source_name=tools.origin)
    return ChatTemplate(main.text, specials, source_name=main.origin, with_tools=with_tools)


class NamedTemplate(NamedTuple):
    """A template that is not compiled, and the file that it comes from."""

    text: str
    origin: str


class Chosen(NamedTuple):
    """The templates for conversations, and for those with tools where that is another."""

    main: NamedTemplate
    with_tools: NamedTemplate | None = None

    @property
    def of_tools(self) -> str:
        """The text of the template that shows tools."""
        return (self.with_tools or self.main).text


def chosen_templates(folder: Path, override: str | None) -> Chosen | None:
    """Returns what --chat-template names (a file, or one of the model's templates), else the model's only template or
    its `default`, with `tool_use` for tools, as transformers chooses them. None when the model has none. SettingsError
    when `override` is neither, or none is the default of several."""
    if override is not None and Path(override).is_file():
        return Chosen(NamedTemplate(_text(Path(override)), Path(override).name))
    named = model_templates(folder)
    if override is not None:
        if override not in named:
            raise SettingsError(f"{override}: no such file{_or_names(named)}", "--chat-template")
        return Chosen(named[override])
    if not named:
        return None
    if "default" not in named and len(named) > 1:
        raise SettingsError(f"the model has several chat templates and no default{_or_names(named)}", "--chat-template")
    main = named.get("default") or next(iter(named.values()))
    tools = named.get("tool_use")
    return Chosen(main, None if tools == main else tools)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise SettingsError(f"chat template ({path.name}): {error}", "--chat-template") from error


def _or_names(named: Mapping[str, NamedTemplate]) -> str:
    return f"; the model has {', '.join(named)}" if named else ""


def model_templates(folder: Path) -> dict[str, NamedTemplate]:
    """Returns the templates in a model's folder by name: of chat_template.jinja (default) and the files of
    additional_chat_templates, else of chat_template.json, else of tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    named = {name: NamedTemplate(_text(path), path.name) for name, path in files.items() if path.is_file()}
    for file in ("chat_template.json", "tokenizer_config.json"):
        if "default" in named:
            break
        given = read_json(folder / file).get("chat_template")
        entries = [{"name": "default", "template": given}] if isinstance(given, str) else given
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                named.setdefault(str(entry.get("name")), NamedTemplate(entry["template"], file))
    return named


def _names(template: jinja2.nodes.Template, role: str) -> bool:
    """Returns whether an expression of the template holds the role as a string; comments and plain text do not
    count."""
    return any(constant.value == role for constant in template.find_all(jinja2.nodes.Const))


def _refused(reason: str) -> RequestRefused:
    return RequestRefused(f"The chat template refused the messages: {reason}", code="invalid_value", param="messages")


def _final_text(conversation: list[dict[str, Any]]) -> str:
    content = conversation[-1].get("content")
    if not isinstance(content, str):
        raise RequestRefused(
            "continue_final_message needs a last message with text.", code="invalid_value", param="messages"
        )
    return content


def _cut_at_mark(text: str) -> str:
    """Drops the text after the last message's content. A template that trims the content drops its trailing spaces
    too."""
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise _refused("it does not show the last message, which continue_final_message needs")
    return text[:at]


def _environment(now: Callable[[], datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["range"] = _capped_range
    return environment


def _capped_range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > 100_000:
        raise jinja2.TemplateError("range too large")
    return values


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as chat templates expect it: without HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
