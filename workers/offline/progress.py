"""Progress: the bar of one call of LLM, with vLLM's estimate of tokens per second."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm

UseTqdm = bool | Callable[..., Any]
"""True for a bar, or a function that makes one in place of tqdm."""


class Progress:
    """A bar of `total` prompts, used on the thread of the call: what it does may call the LLM again."""

    def __init__(self, use_tqdm: UseTqdm, total: int, what: str) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._input_tokens = self._output_tokens = 0
        self._bar = make(total=total, desc=what, unit="prompt", dynamic_ncols=True) if use_tqdm else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def ended(self, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Counts a prompt that has ended."""
        if (bar := self._bar) is None:
            return
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        if elapsed_s := bar.format_dict["elapsed"]:
            reading, writing = self._input_tokens / elapsed_s, self._output_tokens / elapsed_s
            bar.postfix = f"est. speed input: {reading:.2f} toks/s, output: {writing:.2f} toks/s"
        bar.update(1)
