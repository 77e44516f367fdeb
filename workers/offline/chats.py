"""Conversations of LLM.chat(): from messages to the prompts that the chat template makes of them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.configs.errors import SettingsError
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.offline.inputs import GivenPrompt
from tandem.workers.text.chat_messages import template_messages, template_tools
from tandem.workers.text.chat_template import THINKING_SWITCHES, ChatTemplate
from tandem.workers.text.tokenizer import ModelTokenizer

log = logging.getLogger("tandem.offline")
Messages = Sequence[Mapping[str, Any]]


class ChatForm(NamedTuple):
    """The form in which conversations are rendered: vLLM's arguments of LLM.chat()."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class Chats:
    """Renders conversations with one form.

    own: the model's template. Raises SettingsError if there is no template, ValueError for arguments that exclude each
    other and for variables that the template does not have.
    """

    def __init__(self, own: ChatTemplate | None, tokenizer: ModelTokenizer, form: ChatForm) -> None:
        template = own if form.chat_template is None else given_template(form.chat_template, tokenizer)
        if template is None:
            raise SettingsError("the model has no chat template", "chat_template")
        if form.continue_final_message and form.add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False")
        self._template = template
        self._tokenizer = tokenizer
        self._form = form
        self._tools = template_tools(form.tools or ())
        self._variables = dict(form.chat_template_kwargs or {})
        for name in form.chat_template_kwargs or ():
            if not template.takes(name):
                self._check_switch(name)

    def prompts(self, conversations: Sequence[Messages]) -> list[GivenPrompt | RequestRefused]:
        """Returns the prompt of each conversation, or why it cannot be rendered."""
        return [self._prompt(conversation) for conversation in conversations]

    def _check_switch(self, name: str) -> None:
        if name not in THINKING_SWITCHES:
            raise ValueError(f"chat_template_kwargs: the chat template has no variable {name!r:.80}")
        log.debug("chat_template_kwargs: %s is ignored: the chat template has no such variable", name)
        del self._variables[name]

    def _prompt(self, conversation: Messages) -> GivenPrompt | RequestRefused:
        if not conversation:
            return RequestRefused("The conversation has no messages.", code="invalid_value", param="messages")
        try:
            text = self._template.render(
                template_messages(conversation),
                tools=self._tools or None,
                add_generation_prompt=self._form.add_generation_prompt,
                continue_final_message=self._form.continue_final_message,
                variables=self._variables,
            )
        except RequestRefused as error:
            return error
        return GivenPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))


def given_template(given: str, tokenizer: ModelTokenizer) -> ChatTemplate:
    """Returns the template that a call names, as in vLLM: the path of a file, or its text. ValueError for what is
    neither, SettingsError for text that is no template."""
    is_text = any(mark in given for mark in "{}\n")
    if not is_text and not Path(given).is_file():
        raise ValueError(f"chat_template: {given!r:.80} is no file, and no text of a template")
    source, name = (given, "given") if is_text else (Path(given).read_text(encoding="utf-8"), Path(given).name)
    return ChatTemplate(source, tokenizer.special_tokens, source_name=name)
