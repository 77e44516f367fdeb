"""Paths of the real tokenizers and templates, if this checkout has them beside it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
TOKENIZERS = ("gpt2", "llama2", "minimind", "qwen2.5", "stories260K")

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is absent")


def tokenizer_folder(name: str) -> Path:
    return SHARED / ("models" if name == "stories260K" else "tokenizers") / name
