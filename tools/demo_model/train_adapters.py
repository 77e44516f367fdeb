"""Trains the bundled LoRA adapters on the bundled demo model: `python -m tools.demo_model.train_adapters`.

It is run after `train.py` has written a new base model, whose weights stay as they are. It writes one PEFT folder per
recipe in `styles.py`.
"""

import argparse
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.demo_model.styles import RECIPES, AdapterRecipe
from tools.demo_model.train import HERE, BatchSource, train

BASE_NAME = "tandem-demo"


def attach_adapter(base_path: Path, recipe: AdapterRecipe, start: Path | None = None) -> PeftModel:
    """Loads the base model in float32 and adds an adapter to it: a new one, or the one in the folder `start`."""
    base = LlamaForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    if start is not None:
        started: PeftModel = PeftModel.from_pretrained(base, start, is_trainable=True)
        return started.float()
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        lora_dropout=0.0,
        target_modules=sorted(recipe.target_modules),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Writes adapter_config.json, which names the base model BASE_NAME, and adapter_model.safetensors in bf16."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.target_modules = sorted(config.target_modules)  # a set, which would be written in an order of its own
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def main() -> None:
    """Trains and saves every recipe with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demo adapters.")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES], help="train this one alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", type=Path, help="continue from the adapters in this folder, not from new ones")
    parser.add_argument("--base", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.base / "tokenizer.json"))
    for recipe in (recipe for recipe in RECIPES if options.only in (None, recipe.name)):
        torch.manual_seed(options.seed)
        started_s = time.monotonic()
        model = attach_adapter(options.base, recipe, options.start and options.start / recipe.name)
        matrices = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(matrices, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
        source = BatchSource(options.seed + 1, tokenizer, options.tokens_per_step, recipe.style)
        loss = train(model, [optimizer], source, options.steps)
        save_adapter(model, options.out / recipe.name)
        print(f"{recipe.name}: loss {loss:.3f} nats, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
