"""PromptRows: a loaded model, asked for whole rows of log probabilities.

The engine of offline runs (workers/offline/local_engine.py) computes them, so with whatever weights, KV cache, device
and ranks it serves; the rank that has the logits writes rows to a file (workers/sampling/row_file.py), which is read
here window by window. Ranks are on this machine. V vocabulary.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace

from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings
from tandem.workers.messages.request import NO_TOKENS, Abort, Ended, GenerationRequest, TokenDelta
from tandem.workers.offline.local_engine import LocalEngine

SCORED: Final = replace(NO_TOKENS, prompt_logprobs=0)
FILE: Final = "rows.f32"


class PromptRows:
    """One model, from its load to close(). settings: as settings_of() makes them (workers/offline/inputs.py). folder:
    for the file, on a disk with room for the rows of one window. Raises as LLM does."""

    def __init__(self, settings: EngineSettings, folder: Path) -> None:
        self._path = folder / FILE
        self._local = LocalEngine(scoring(settings, self._path))
        self.vocab_size = self._local.facts.vocab_size
        self.max_model_len = self._local.facts.max_model_len

    def rows_of(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the log probabilities behind each token but the last, float32 [len(ids) - 1, V], those of the token
        that comes next. They are a mapped file, gone with the next call. ids: at least 2, at most max_model_len.

        RuntimeError when the engine refuses the ids, or has not scored each once.
        """
        if self._path.exists():
            os.truncate(self._path, 0)
        failures = _Unscored()
        with self._local.call(failures) as call:
            request = GenerationRequest(
                request_id=self._local.new_id(),
                prompt_token_ids=list(ids),
                sampling=SCORED,
                reply_to=call.address,
            )
            call.run([request], failures.ended)
        if failures.words:
            raise RuntimeError(f"a window of {len(ids)} tokens was not scored: {failures.words[0]}")
        rows, size = len(ids) - 1, 4 * self.vocab_size
        if (found := self._path.stat().st_size) != rows * size:
            raise RuntimeError(f"{found / size:g} rows of {self.vocab_size} values were written for {rows}")
        mapped = torch.from_file(str(self._path), size=rows * self.vocab_size, dtype=torch.float32)
        return mapped.view(rows, self.vocab_size)

    def close(self) -> None:
        """Ends the engine and its ranks. Idempotent."""
        self._local.close()

    def __enter__(self) -> "PromptRows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scoring(settings: EngineSettings, path: Path) -> EngineSettings:
    """Returns settings whose ranks write rows to a file, window after window: nothing is found in a cache, which would
    leave out rows. SettingsError for those that make no sense beside it."""
    if settings.lora.enable_lora:
        raise SettingsError("adapters are not judged; merge one into the model's weights", "--enable-lora")
    cache = replace(
        settings.cache, enable_prefix_caching=False, kv_offloading_gib=None, kv_disk_path=None, kv_disk_gib=None
    )
    scheduler = replace(settings.scheduler, max_num_seqs=1, batching_policy="continuous")
    return replace(settings, cache=cache, scheduler=scheduler, speculative=None, scored_rows=str(path))


class _Unscored:
    """A CallSink of one request: why it was not scored."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        self.words += [delta.error for delta in deltas if delta.error is not None]
        return []

    def ended(self, ended: Ended) -> None:
        if ended.refused is not None:
            self.words.append(ended.refused[3])
