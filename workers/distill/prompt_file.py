"""The prompts of `tandem distill`: a file of text becomes token ids, as the target would read them. Torch-free."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.tokenizer import ModelTokenizer

FLAG: Final = "--prompts"
MOST_JUDGED: Final = 32
"""Prompts, at most, that are kept out of training."""
ROOM: Final = 8
"""Tokens of the context, at least, that a prompt leaves to its answer."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of prompts. learned: whose answers are learned from. judged: others. dropped: how many were too long
    for the context."""

    learned: list[list[int]]
    judged: list[list[int]]
    dropped: int


def read_prompts(file: Path, folder: Path, tokenizer: ModelTokenizer, context: int, seed: int) -> Prompts:
    """Returns the prompts of a file, each once, shuffled by the seed: a tenth of them judges.

    In a .jsonl file a line is an object with `prompt`, a text that the answer continues, or `messages`, a conversation
    that it ends. In any other file a line is a prompt: what a user says, where the model has a chat template, else text
    to continue. SettingsError for a file that is not read, or has fewer than two prompts that fit into the context.
    """
    template = find_chat_template(folder, None, tokenizer)
    found = dict.fromkeys(_texts(file, template))
    ids = [tokenizer.encode(text, add_special_tokens=not is_chat) for text, is_chat in found]
    fitting = [one for one in ids if 0 < len(one) <= context - ROOM]
    if len(fitting) < 2:
        words = f"{file} has {len(fitting)} prompts that fit into the context of {context} tokens"
        raise SettingsError(f"{words}: one to learn from and one to judge by are the least", FLAG)
    random.Random(seed).shuffle(fitting)
    judged = min(MOST_JUDGED, max(1, len(fitting) // 10))
    return Prompts(fitting[judged:], fitting[:judged], len(ids) - len(fitting))


def _texts(file: Path, template: ChatTemplate | None) -> Iterator[tuple[str, bool]]:
    """Yields the text of each prompt, and whether the chat template wrote it, special tokens and all."""
    try:
        lines = file.read_bytes().decode("utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}", FLAG) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8: byte {error.start} is {error.reason}", FLAG) from error
    if not any(line.strip() for line in lines):
        raise SettingsError(f"{file} has no prompt", FLAG)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        given: Any = line
        if file.suffix == ".jsonl":
            given = _entry(line, f"{file}, line {number}")
        elif template is not None:
            given = [{"role": "user", "content": line}]
        if isinstance(given, str):
            yield given, False
            continue
        if template is None:
            raise SettingsError(f"{file}, line {number}: the model has no chat template for `messages`", FLAG)
        try:
            yield template.render(given), True
        except RequestRefused as error:
            raise SettingsError(f"{file}, line {number}: {error}", FLAG) from error


def _entry(line: str, where: str) -> Any:
    """Returns a text, or messages."""
    try:
        read = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON: {error}", FLAG) from error
    entry = read if isinstance(read, dict) else {}
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return messages
    raise SettingsError(f'{where} has neither a text "prompt" nor a list "messages"', FLAG)
