"""Judges a model on a file of text: sample_of(), then judge(), with keep() before it for a reference.

The reference's rows lie on disk, so that one model is loaded at a time and one reference serves several judged models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tqdm import tqdm

from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings
from tandem.workers.evaluation.judgement import Judgement, TokenScores
from tandem.workers.evaluation.kept_rows import KeptRows, check_room
from tandem.workers.evaluation.prompt_rows import PromptRows
from tandem.workers.evaluation.windows import FILE_FLAG, TokenizedText, TokenWindow, read_texts, tokenize, windows_of
from tandem.workers.planning.resolve import read_spec, resolve_max_model_len
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer

LONGEST_WINDOW: Final = 2048
"""Tokens of a window that nobody has chosen, in a longer context."""
AGAINST: Final = "--against"


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text as a model reads it. window, stride: what its windows were made with. total: the tokens that could have
    been scored."""

    file: Path
    tokenizer: ModelTokenizer
    vocab_size: int
    texts: list[TokenizedText]
    windows: list[TokenWindow]
    window: int
    stride: int
    total: int

    @property
    def num_scored(self) -> int:
        return sum(window.num_scored for window in self.windows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the scored tokens, each counted once."""
        return sum(
            sum(self.texts[one.text].bytes_of[one.start + one.first : one.start + len(one.ids)]) for one in self.windows
        )

    def text_of(self, text: int, position: int, before: int = 0) -> str:
        """Returns what a token says, or with `before` the text of so many tokens before it."""
        ids = self.texts[text].ids
        own = ids[max(0, position - before) : position] if before else ids[position : position + 1]
        return self.tokenizer.decode(own, skip_special_tokens=False)


def sample_of(
    settings: EngineSettings,
    file: Path,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
) -> ScoredText:
    """Returns a file's texts in windows of the model's tokens.

    window: the most tokens that are computed together; None: LONGEST_WINDOW, or the context if that is less. stride,
    tokens: as for windows_of(). SettingsError for numbers that do not fit, by flag, for a file without a text of two
    tokens, and for one with tokens that the model has no row for.
    """
    spec = read_spec(settings)
    context = resolve_max_model_len(settings, spec)
    chosen = min(LONGEST_WINDOW, context) if window is None else window
    if not 2 <= chosen <= context:
        raise SettingsError(f"{chosen} must be from 2 to the context of {context} tokens", "--window")
    if stride is not None and not 1 <= stride < chosen:
        raise SettingsError(f"{stride} must be from 1 to {chosen - 1}, one less than the window", "--stride")
    if tokens is not None and tokens < 1:
        raise SettingsError(f"{tokens} must be at least 1", "--tokens")
    tokenizer = load_tokenizer(_tokenizer_folder(settings))
    texts = tokenize(tokenizer, read_texts(file))
    windows = windows_of([text.ids for text in texts], chosen, stride, tokens)
    if not windows:
        raise SettingsError(f"{file} has no text of two tokens, of which the second could be scored", FILE_FLAG)
    if (most := max(max(one.ids) for one in windows)) >= spec.vocab_size:
        words = f"{file} has the token {tokenizer.piece(most)!r} with id {most}"
        raise SettingsError(f"{words}, for which the model has no row: its vocabulary is {spec.vocab_size}", FILE_FLAG)
    total = sum(max(0, len(text.ids) - 1) for text in texts)
    return ScoredText(file, tokenizer, spec.vocab_size, texts, windows, chosen, stride or chosen - 1, total)


def keep(settings: EngineSettings, sample: ScoredText, folder: Path, *, progress: bool = True) -> KeptRows:
    """Computes a reference's rows of a sample and returns them; they lie in `folder`, which the caller removes.
    SettingsError where it has another vocabulary than the sample's model, and where the disk has no room."""
    spec = read_spec(settings)
    if spec.vocab_size != sample.vocab_size:
        both = f"{settings.model.model} has {spec.vocab_size} tokens, the judged model {sample.vocab_size}"
        raise SettingsError(f"{both}: probabilities of different tokens cannot be compared", AGAINST)
    _check_tokens(settings, sample)
    kept = KeptRows(folder, sample.vocab_size)
    check_room(folder, sample.num_scored, sample.window, sample.vocab_size)
    for _, rows_NV in _rows(settings, sample, folder, "reference", progress=progress):
        kept.append(rows_NV)
    return kept


def judge(
    settings: EngineSettings,
    sample: ScoredText,
    folder: Path,
    reference: KeptRows | None = None,
    *,
    progress: bool = True,
) -> TokenScores:
    """Scores a model on a sample, beside the reference's rows of it. folder: for the rows of one window."""
    check_room(folder, 0, sample.window, sample.vocab_size)
    judgement, done = Judgement(), 0
    for window, rows_NV in _rows(settings, sample, folder, "judged", progress=progress):
        beside = None if reference is None else reference.rows(done, window.num_scored)
        judgement.add(window.text, window.start + window.first, window.ids[window.first :], rows_NV, beside)
        done += window.num_scored
    return judgement.scores()


def _rows(
    settings: EngineSettings, sample: ScoredText, folder: Path, what: str, *, progress: bool
) -> Iterator[tuple[TokenWindow, torch.Tensor]]:
    """Yields windows and the rows of their scored tokens, [num_scored, V], which are gone with the next ones."""
    with (
        PromptRows(settings, folder) as model,
        tqdm(total=sample.num_scored, desc=what, unit="token", disable=None if progress else True) as bar,
    ):
        for window in sample.windows:
            yield window, model.rows_of(window.ids)[window.first - 1 :]
            bar.update(window.num_scored)


def _check_tokens(settings: EngineSettings, sample: ScoredText) -> None:
    """Refuses a reference whose tokenizer reads the sample otherwise."""
    other = load_tokenizer(_tokenizer_folder(settings))
    for text in sample.texts:
        shown = sample.tokenizer.decode(text.ids, skip_special_tokens=True)
        if other.decode(text.ids, skip_special_tokens=True) != shown:
            words = f"the tokenizer of {settings.model.model} reads the tokens of {sample.file} as another text"
            raise SettingsError(f"{words} than the judged model's", AGAINST)


def _tokenizer_folder(settings: EngineSettings) -> Path:
    return Path(settings.model.tokenizer or settings.model.model)
