"""Trains the demo model from random weights on the text of corpus.py: `python -m tools.demo_model.train`.

It writes a Hugging Face checkpoint folder (bf16 safetensors). The same seed, machine and library versions give the same
weights; other machines may round differently.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.build_tokenizer import build_tokenizer, save_tokenizer
from tools.demo_model.corpus import END_OF_TEXT, TURN_END, Style, pack_row, plain_style

HERE = Path(__file__).resolve().parents[2] / "configs" / "demo"
MAX_POSITIONS = 2048
VOCAB_SIZE = 768
ROPE_THETA = 10_000.0
ROW_LENGTHS = (256, 512, 1024, 2048)
ROW_SHARES = (0.60, 0.28, 0.06, 0.06)


class Batch(NamedTuple):
    """Token ids and loss weights, both [rows, length]."""

    token_ids: torch.Tensor
    weights: torch.Tensor


def make_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Makes a model of 4 layers with 8 query heads on 2 KV heads, which shards over TP 2 and PP 2 or 4."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def draw_batch(rng: random.Random, tokenizer: Tokenizer, num_tokens: int, style: Style = plain_style) -> Batch:
    """Draws a batch of `num_tokens` tokens: rows of one length, which is drawn from ROW_LENGTHS."""
    length = rng.choices(ROW_LENGTHS, weights=ROW_SHARES)[0]
    rows = [pack_row(rng, tokenizer, length, style) for _ in range(max(1, num_tokens // length))]
    return Batch(torch.tensor([row.token_ids for row in rows]), torch.tensor([row.weights for row in rows]))


def batch_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy of the next token by the batch's weights, in nats. A scalar tensor."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
    losses = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch.token_ids[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def take_over(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Sets the weights to those of the checkpoint in `folder`, whose tokenizer may have other tokens.

    The embedding of a token that is new is the mean of the embeddings of the old tokens that write it.
    """
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    old_rows = old.get_input_embeddings().weight.detach()
    rows = []
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id)
        known = old_tokenizer.token_to_id(token)
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        pieces = [known] if known is not None else old_tokenizer.encode(text, add_special_tokens=False).ids
        rows.append(old_rows[pieces].mean(0))
    weights = old.state_dict()
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = torch.stack(rows)
    model.load_state_dict(weights)


def make_optimizers(model: LlamaForCausalLM, rate: float = 1.0) -> list[torch.optim.Optimizer]:
    """Makes Muon for the layers' matrices and AdamW for the embedding and the norms. rate: a factor on their rates."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=2.5e-3 * rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3 * rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, num_steps: int, warmup: int = 60) -> float:
    """The learning rate's factor at a step: a linear warm-up, then a cosine down to 0.02."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress))


def train(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    draw: "BatchSource",
    num_steps: int,
) -> float:
    """Trains for `num_steps` steps. Returns the moving average of the loss, in nats."""
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, num_steps)) for o in optimizers]
    average = 0.0
    progress = tqdm(range(num_steps), desc="training", unit="step", mininterval=5.0)
    for step in progress:
        loss = batch_loss(model, draw())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        progress.set_postfix(loss=f"{average:.3f}", refresh=False)
    return average


class BatchSource:
    """A stream of batches of `num_tokens` tokens in one style, drawn with a seed."""

    def __init__(self, seed: int, tokenizer: Tokenizer, num_tokens: int, style: Style = plain_style) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._style = style

    def __call__(self) -> Batch:
        return draw_batch(self._rng, self._tokenizer, self._num_tokens, self._style)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer and checkpoint (bf16). config.json gets the keys of older transformers versions too."""
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)
    model.to(torch.bfloat16).save_pretrained(folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Trains and saves with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--start", type=Path, help="continue from this checkpoint folder, not from random weights")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use, instead of a new one")
    parser.add_argument("--rate", type=float, default=1.0, help="a factor on the learning rates")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started_s = time.monotonic()
    kept = options.tokenizer
    tokenizer = Tokenizer.from_file(str(kept)) if kept else build_tokenizer(options.seed, VOCAB_SIZE)
    model = LlamaForCausalLM(make_config(tokenizer))
    if options.start is not None:
        take_over(model, tokenizer, options.start)
    source = BatchSource(options.seed + 1, tokenizer, options.tokens_per_step)
    loss = train(model, make_optimizers(model, options.rate), source, options.steps)
    save_model(model, tokenizer, options.out)
    elapsed_s = time.monotonic() - started_s
    print(f"{model.num_parameters():,} parameters, loss {loss:.3f} nats, {elapsed_s:.0f} s, saved to {options.out}")


if __name__ == "__main__":
    main()
