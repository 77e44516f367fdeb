"""Samples, the requests of a load, and texts of an exact number of tokens to make them of.

Lengths are in tokens of the tokenizer that is named, which should be the service's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from numpy import ndarray

    from tandem.workers.text.tokenizer import ModelTokenizer

Draw = Callable[[int, int, int], "ndarray[Any, Any]"]
"""Draws (low, high, count) whole numbers, high excluded: a method of one of numpy's generators."""
TOKENIZER = "--tokenizer"
TRIES = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its prompt, as text or token ids, and the lengths of prompt and answer. due_s: when a trace has it,
    in seconds from the trace's first; None: no trace says so."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    due_s: float | None = None


class SampleText:
    """A tokenizer, as samples need it: lengths of texts, and texts of a length."""

    def __init__(self, tokenizer: "ModelTokenizer", folder: Path) -> None:
        """folder: of the tokenizer, where a chat template may be too."""
        import numpy as np

        self.tokenizer, self.folder = tokenizer, folder
        self.num_plain: int = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        self.num_added: int = tokenizer.backend.num_special_tokens_to_add(False)  # to a text: BOS and the like
        special = np.array(sorted(tokenizer.hidden_token_ids), dtype=np.int64)
        self.allowed = np.setdiff1d(np.arange(self.num_plain), special)  # ids of tokens that are no special ones

    def length(self, text: str) -> int:
        """The number of tokens of a prompt, with those that the tokenizer adds."""
        return len(self.tokenizer.encode(text, add_special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def exactly(self, token_ids: list[int], rng: "Draw") -> tuple[str, list[int]]:
        """Returns a text of as many tokens as there are ids, without added ones, and the ids that it has in the end.

        Some sequences of tokens are read back as others. What is too short gets random tokens then, what is too long
        is cut, ten times at most, as vLLM does it; a few prompts stay some tokens longer or shorter.
        """
        wanted, ids = len(token_ids), token_ids
        for left in range(TRIES, -1, -1):
            text = self.decode(ids)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted or left == 0:
                break
            ids = [*ids, *self.random_ids(wanted - len(ids), rng)] if len(ids) < wanted else ids[:wanted]
        return text, ids

    def random_ids(self, count: int, rng: "Draw") -> list[int]:
        """Draws ids of the whole vocabulary."""
        ids: list[int] = rng(0, self.num_plain, count).tolist()
        return ids


def load_sample_text(name: str | None) -> SampleText:
    """Loads the tokenizer of a model by the name that the service or the user gives: a folder, a hub id, `demo`.
    SettingsError when there is none."""
    from tandem.workers.planning.model_source import find_model
    from tandem.workers.text.tokenizer import load_tokenizer

    if name is None:
        raise SettingsError("none is named, and the service does not say which model it serves", TOKENIZER)
    try:
        folder = find_model(name, None, TOKENIZER)
    except SettingsError as error:
        raise SettingsError(
            f"{error}. Prompts are made with the model's tokenizer: name its folder", TOKENIZER
        ) from error
    return SampleText(load_tokenizer(folder), folder)
