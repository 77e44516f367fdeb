"""LoRA adapters for tests: random ones made by peft on a checkpoint, merged checkpoints, and moves by hand.

Random A and B, so that an adapter changes every layer it is on and two never agree.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandem.workers.engine.executor import Executor
from tandem.workers.lora.peft.peft_folder import adapter_digest
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import (
    DropAdapter,
    FetchAdapter,
    PlaceAdapter,
    TransferOp,
    TransferResult,
)
from tests.support.kept_files import digest_of, kept
from tests.support.tiny_models import load_peer

GPT2_LINEARS = ("c_attn", "c_proj", "c_fc")
BLOOM_LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION_LINEARS = ALL_LINEARS[:4]
DEEPSEEK_LINEARS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
LINEARS_OF: Mapping[str, Sequence[str]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": (*ATTENTION_LINEARS, "c_fc", "c_proj"),
    "gpt_neox": BLOOM_LINEARS,
    "falcon": BLOOM_LINEARS,
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gptj": ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),
    "mpt": ("Wqkv", "out_proj", "up_proj", "down_proj"),
    "deepseek_v2": DEEPSEEK_LINEARS,
    "deepseek_v3": DEEPSEEK_LINEARS,
    "qwen2_moe": ATTENTION_LINEARS,
    "qwen3_moe": ATTENTION_LINEARS,
    "granitemoe": ATTENTION_LINEARS,
    "gpt_oss": ATTENTION_LINEARS,
}
"""Where they are not ALL_LINEARS, by transformers' model_type."""
MOVE_S = 60.0


def save_random_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    modules: Sequence[str] = ALL_LINEARS,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A PEFT folder as peft saves it. `size`: how much it moves a layer's output, about, over that output. Torch's
    random numbers begin with the seed afterwards."""
    facts = digest_of(base), rank, seed, modules, size, dtype, sorted(config.items())
    made = kept(
        f"adapter-{folder.name}", facts, __file__,
        lambda new: _make(base, new, rank, seed, modules, size, dtype, config),
    )  # fmt: skip
    shutil.copytree(made, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    told = json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}
    file.write_text(json.dumps(told, indent=2, sort_keys=True))
    torch.manual_seed(seed)
    return folder


def _make(
    base: Path,
    folder: Path,
    rank: int,
    seed: int,
    modules: Sequence[str],
    size: float,
    dtype: torch.dtype,
    config: Mapping[str, Any],
) -> None:
    from peft import LoraConfig, get_peft_model  # takes seconds to load

    torch.manual_seed(seed)
    more = {"lora_alpha": rank, **config}
    model = get_peft_model(
        load_peer(base), LoraConfig(r=rank, target_modules=list(modules), task_type="CAUSAL_LM", **more)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                is_a, inputs = name.split("lora_")[1].startswith(("A", "embedding_A")), parameter.shape[1]
                parameter.normal_(0, 2 * (1 if is_a else size) * (1 if "embedding_A" in name else inputs**-0.5))
    has_tables = not {"embed_tokens", "lm_head"}.isdisjoint(modules)
    model.to(dtype).save_pretrained(folder, save_embedding_layers=has_tables)
    (folder / "README.md").unlink(missing_ok=True)


def load_adapted_peer(base: Path, adapter: Path) -> torch.nn.Module:
    """peft's own model: the base with the adapter beside it, float32."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_peer(base), adapter).eval()


def save_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter's product added to its weights, float32."""
    from peft import PeftModel

    PeftModel.from_pretrained(load_peer(base), adapter).merge_and_unload().save_pretrained(folder)
    return folder


def ref_of(folder: Path, name: str | None = None) -> AdapterRef:
    return AdapterRef(name=name or folder.name, digest=adapter_digest(folder), source=str(folder))


def error_of(result: TransferResult) -> str | None:
    """The reason of its failure."""
    return None if result.failure is None else result.failure.message


class AdapterDriver:
    """Moves adapters on a started executor, which has no step under way: every adapter gets fresh pages and a slot.

    `others`: answers to tickets that are not its own."""

    def __init__(self, executor: Executor, num_ranks: int = 1) -> None:
        self._executor = executor
        self._num_ranks = num_ranks
        self._ticket = 0
        self._next_page = 0
        self.others: list[TransferResult] = []

    def move(self, op: TransferOp) -> list[TransferResult]:
        """The answers of all ranks."""
        self._ticket += 1
        ticket = self._ticket
        self._executor.transfer(msgspec.structs.replace(op, ticket=ticket))
        answers: list[TransferResult] = []
        deadline_s = time.monotonic() + MOVE_S
        while len(answers) < self._num_ranks:
            assert time.monotonic() < deadline_s, f"{len(answers)} answers to {op} in {MOVE_S} s"
            answer = self._executor.poll(0.5)
            if answer is not None:
                assert isinstance(answer, TransferResult)
                (answers if answer.ticket == ticket else self.others).append(answer)
        return sorted(answers, key=lambda done: done.rank)

    def fetch(self, ref: AdapterRef) -> list[TransferResult]:
        return self.move(FetchAdapter(adapter=ref))

    def place(self, ref: AdapterRef, slot: int, pages: Sequence[int]) -> list[TransferResult]:
        return self.move(PlaceAdapter(adapter=ref, slot=slot, pages=list(pages)))

    def drop(self, ref: AdapterRef) -> list[TransferResult]:
        return self.move(DropAdapter(adapter=ref))

    def load(self, ref: AdapterRef, slot: int) -> int:
        """fetch and place; the pages that were taken."""
        fetched = self.fetch(ref)
        assert [done.failure for done in fetched] == [None] * self._num_ranks
        count = max(done.pages for done in fetched)
        pages = list(range(self._next_page, self._next_page + count))[::-1]
        self._next_page += count
        placed = self.place(ref, slot, pages)
        assert [done.failure for done in placed] == [None] * self._num_ranks
        return count
