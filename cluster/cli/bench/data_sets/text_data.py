"""Prompts from files of texts: ShareGPT's conversations, and JSON lines of one's own."""

import json
import random
from pathlib import Path
from typing import Any

from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Tokens of what is taken of ShareGPT, as in vLLM: of prompts and answers at least, of prompts, of both together."""


def sharegpt_samples(flags: DataFlags, text: SampleText) -> list[Sample]:
    """Takes the first question of each conversation that has an answer. SettingsError for a file of another kind."""
    assert flags.dataset_path is not None
    own = flags.sharegpt_output_len if flags.output_len is None else flags.output_len
    samples: list[Sample] = []
    for prompt, answer in _shuffled(_questions(Path(flags.dataset_path)), flags):
        if len(samples) == flags.num_prompts:
            break
        prompt_len, output_len = text.length(prompt), own or text.length(answer)
        fits = SHORTEST <= prompt_len <= LONGEST_PROMPT and prompt_len + output_len <= LONGEST
        if fits and (own is not None or output_len >= SHORTEST):
            samples.append(Sample(prompt, prompt_len, output_len))
    return samples


def _questions(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            turns = [entry.get("conversations", ()) for entry in json.load(file)]
        return [(each[0]["value"], each[1]["value"]) for each in turns if len(each) >= 2]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        what = 'a JSON list of {"conversations": [{"value": TEXT}, ...]}'
        raise SettingsError(f"{path} is not ShareGPT's, {what}: {error}", "--dataset-path") from error


def custom_samples(flags: DataFlags, text: SampleText, *, as_chat: bool) -> list[Sample]:
    """Takes rows {"prompt": TEXT, "output_tokens": N}, a line each. Unless the service renders a chat, or
    --skip-chat-template says no, the tokenizer's template makes the prompts. SettingsError for a row without prompt or
    length, or a tokenizer without template."""
    assert flags.dataset_path is not None
    rows = _shuffled(_rows(Path(flags.dataset_path)), flags)
    template = None if as_chat or flags.skip_chat_template else _template(text)
    samples = []
    for row in rows[: flags.num_prompts]:
        prompt = row["prompt"]
        if template is not None:
            prompt = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        own = row.get("output_tokens") if flags.custom_output_len == -1 else flags.custom_output_len
        if own is None and flags.output_len is None:
            raise SettingsError("-1: a row has no output_tokens", "--custom-output-len")
        samples.append(Sample(prompt, text.length(prompt), flags.answer_len(own or 1)))
    return samples


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise SettingsError(f"{path}, line {number} is no JSON: {error}", "--dataset-path") from error
            if row is not None:
                _check(row, f"{path}, line {number}")
                rows.append(row)
    return rows


def _check(row: Any, where: str) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise SettingsError(f"{where} has no text `prompt`", "--dataset-path")
    length = row.get("output_tokens", 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise SettingsError(f"{where}: output_tokens {length!r} is no number of tokens", "--dataset-path")


def _template(text: SampleText) -> Any:
    from tandem.workers.text.chat_template import find_chat_template

    found = find_chat_template(text.folder, None, text.tokenizer)
    if found is None:
        words = f"{text.folder} has no chat template; --skip-chat-template sends the texts as they are"
        raise SettingsError(words, "--skip-chat-template")
    return found


def _shuffled(rows: list[Any], flags: DataFlags) -> list[Any]:
    if not flags.disable_shuffle:
        random.Random(flags.seed).shuffle(rows)
    return rows
