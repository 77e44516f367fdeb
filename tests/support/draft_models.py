"""Draft models for tests: the demo model without its last layers, which guesses about half of what the demo says."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"


def shorter_demo(folder: Path, layers: int = 3) -> Path:
    """Writes the demo's first layers as a model of their own; returns its folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors = {name: tensor for file in DEMO.glob("*.safetensors") for name, tensor in load_file(file).items()}
    left_out = tuple(f"model.layers.{layer}." for layer in range(layers, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder
