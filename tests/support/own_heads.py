"""Makes checkpoints that hold a head of their own, beside a config.json that says, or whose family says, that it is the
embedding's table: what a merged fine-tune of both tables looks like."""

import json
from dataclasses import replace
from pathlib import Path

from tests.support.tiny_models import TinyModel, save_tiny_model


def save_own_head(tiny: TinyModel, folder: Path, *, by_default: bool = False) -> Path:
    """Saves the model with a random head. by_default: config.json says nothing of it."""
    untied = replace(tiny, changes={**tiny.changes, "tie_word_embeddings": False})
    target = save_tiny_model(untied, folder)
    config = json.loads((target / "config.json").read_text())
    del config["tie_word_embeddings"]
    tied = {} if by_default else {"tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps({**config, **tied}))
    return target
