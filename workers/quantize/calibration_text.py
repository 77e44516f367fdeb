"""The sequences of tokens that a model is calibrated with: of a file, or written by the model itself. Torch-free.

The last ones are kept out of the calibration: with them the result is judged. N sequences of W tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem.configs.errors import SettingsError
from tandem.workers.evaluation.windows import read_texts
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tandem.workers.text.chat_template import find_chat_template
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer

FLAG: Final = "--calib"
LONGEST: Final = 512
"""Tokens of a sequence unless the user says otherwise, and the context is longer."""
MOST_JUDGED: Final = 8
MARK: Final = "<<HERE>>"


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token ids. calibration: with which errors are measured; judged: others."""

    calibration: list[list[int]]
    judged: list[list[int]]

    @property
    def all(self) -> list[list[int]]:
        return self.calibration + self.judged


def length_of(settings: QuantizeSettings, context: int) -> int:
    """Returns W. SettingsError for one beyond the context."""
    if settings.length is not None and settings.length > context:
        raise SettingsError(f"{settings.length} is beyond the model's context of {context}", "--calib-length")
    return settings.length or min(LONGEST, context)


def num_sequences(settings: QuantizeSettings, length: int) -> tuple[int, int]:
    """Returns how many sequences calibrate, and how many judge."""
    count = max(1, settings.calib_tokens // length)
    return count, min(MOST_JUDGED, max(1, -(-count // 8)))


def of_file(settings: QuantizeSettings, folder: Path, length: int) -> Sequences:
    """Returns sequences of a file, drawn by the seed where it has more than needed. SettingsError for a file that is
    not read, or too short: two sequences are the least."""
    file, tokenizer = Path(settings.calib).expanduser(), load_tokenizer(folder)
    ids: list[int] = []
    for text in read_texts(file, FLAG):
        ids += tokenizer.encode(text, add_special_tokens=True)
    found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(found) < 2:
        words = f"{file} has {len(ids)} tokens, fewer than two sequences of {length}: one to calibrate, one to judge"
        raise SettingsError(f"{words}; take a longer file, or a smaller --calib-length", FLAG)
    count, judged = num_sequences(settings, length)
    found = random.Random(settings.seed).sample(found, min(len(found), count + judged))
    return _cut(found, judged)


def own_prompt(folder: Path, tokenizer: ModelTokenizer) -> list[int]:
    """Returns what a model's own text begins with: what a chat has before the user's first word, so that it writes a
    question and answers it (Xu et al. 2024, Magpie); without a chat template BOS."""
    template = find_chat_template(folder, None, tokenizer)
    if template is not None:
        text = template.render([{"role": "user", "content": MARK}]).partition(MARK)[0]
        if ids := tokenizer.encode(text, add_special_tokens=False):
            return ids
    bos = tokenizer.encode("", add_special_tokens=True)
    if not bos and tokenizer.eos_token_ids:
        bos = [min(tokenizer.eos_token_ids)]
    if not bos:
        raise SettingsError("the model has no token that begins a text; give a file of text", FLAG)
    return bos


def written_by_model(settings: QuantizeSettings, model: str, folder: Path, length: int) -> Sequences:
    """Returns sequences that the model writes, at temperature 1. It is loaded whole meanwhile."""
    from tandem.workers.messages.request import SamplingParams
    from tandem.workers.offline.llm import LLM

    count, judged = num_sequences(settings, length)
    with LLM(model, seed=settings.seed, max_model_len=length, max_logprobs=0) as llm:
        prompt = own_prompt(folder, llm.tokenizer)[: length - 1]
        params = SamplingParams(temperature=1.0, max_tokens=length - len(prompt), ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt}] * (count + judged), params)
    found = [[*prompt, *output.outputs[0].token_ids] for output in outputs]
    if (short := next((one for one in found if len(one) != length), None)) is not None:
        raise SettingsError(f"the model wrote {len(short)} tokens where {length} were asked for", FLAG)
    return _cut(found, judged)


def _cut(found: Sequence[list[int]], judged: int) -> Sequences:
    judged = min(judged, -(-len(found) // 9))  # what num_sequences() has, of a shorter text too
    return Sequences(list(found[: len(found) - judged]), list(found[len(found) - judged :]))
