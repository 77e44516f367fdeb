"""KV offload with real ranks: offload on gives the tokens of offload off, swapped, loaded, failing, late; choices share
their prompt in every tier; kill -9 leaves nothing, and what was on disk is found again."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem import LLM, SamplingParams
from tandem.offload.copies import kv_copies
from tandem.workers.engine.base.stats import OffloadStats
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.messages.errors import GroupLost
from tests.support.engine_invariants import check_invariants
from tests.support.in_process import is_in_process
from tests.support.tiny_models import BY_NAME, TINY_MODELS, save_tiny_model, some_in_parity

BLOCK_SIZE = 4
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": BLOCK_SIZE,
    "cpu_threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
TINY_POOL = 18
"""Device blocks for each group of layers with KV of its own: not two of the longest prompts below."""


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {}


@pytest.fixture
def folder_of(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints are made once, with the tokenizer of the demo: tests ask with ids."""

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = with_tokenizer(save_tiny_model(BY_NAME[name], tmp_path_factory.mktemp("tiny")))
        return folders[name]

    return make


@pytest.fixture(autouse=True)
def copying_always_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models on a busy machine: whether a copy is worth it would depend on what else runs."""
    monkeypatch.setattr(CopyCosts, "recompute_s", lambda self, tokens: float("inf"))


def with_tokenizer(folder: Path) -> Path:
    demo = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            (folder / name).write_bytes((demo / name).read_bytes())
    return folder


def turns() -> list[list[int]]:
    """Four conversations of three turns each, interleaved: none of them fits beside all others."""
    texts = [[3 + (7 * i + 5 * k) % 190 for k in range(38)] for i in range(4)]
    return [text[: 14 + 12 * turn] for turn in range(3) for text in texts]


def ask(llm: LLM, at_once: int = 4) -> list[list[int]]:
    """The tokens of all turns, a few at once; greedy and sampled ones."""
    said = []
    prompts = turns()
    for start in range(0, len(prompts), at_once):
        params = [
            SamplingParams(max_tokens=12, ignore_eos=True, seed=i, temperature=0.8 * (i % 2)) for i in range(at_once)
        ]
        outputs = llm.generate(prompts[start : start + at_once], params, use_tqdm=False)
        said += [output.outputs[0].token_ids for output in outputs]
    return said


def opened(folder: Path, **flags: Any) -> LLM:
    return LLM(folder, **(SMALL | flags))


def gib(num_blocks: int, block_bytes: int) -> float:
    return (num_blocks + 0.5) * block_bytes / 2**30


def ask_for_ever(llm: LLM) -> None:
    for _ in range(50):
        ask(llm)


PLAIN: dict[Path, tuple[list[list[int]], int, int]] = {}


def plain(folder: Path) -> tuple[list[list[int]], int, int]:
    """The tokens without tiers and with enough blocks, the bytes of a block, and the blocks of a tiny pool."""
    if folder not in PLAIN:
        with opened(folder, num_gpu_blocks_override=200) as llm:
            num_groups = len(llm._engine.manager.groups.windows)
            PLAIN[folder] = ask(llm), llm._engine.ready.block_bytes, TINY_POOL * num_groups
    return PLAIN[folder]


def counts(llm: LLM) -> OffloadStats:
    stats = llm._engine.stats().offload
    assert stats is not None
    return stats


def moved(llm: LLM) -> dict[str, int]:
    return dict(counts(llm).blocks)


def has_thrashed(llm: LLM) -> bool:
    """Running sequences lost their blocks to others, by way of the host; and blocks came back from there."""
    offload = counts(llm)
    moved_both_ways = offload.blocks["store"] > 0 and offload.blocks["load"] > 0
    return llm._engine.stats().preemptions > 0 and offload.swapped_out > 0 and moved_both_ways


def assert_thrashed(llm: LLM, says_the_same: Callable[[], bool]) -> None:
    """What comes back depends on which copies are done in time, so it is asked until some has."""
    for _ in range(10):
        assert says_the_same()
        if has_thrashed(llm):
            return
    raise AssertionError(counts(llm))


FIRST_OF_FAMILY = {model.model_type: model.name for model in reversed(TINY_MODELS)}
FAMILIES = [*FIRST_OF_FAMILY.values(), "qwen2-window", "llama-mqa-biased"]


@pytest.mark.parametrize("name", some_in_parity(FAMILIES))
def test_offload_on_gives_the_tokens_of_offload_off(name: str, folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of(name)
    wanted, block_bytes, tiny_pool = plain(folder)
    tiers = {
        "num_gpu_blocks_override": tiny_pool,
        "kv_offloading_size": gib(40, block_bytes),
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": gib(400, 2 * block_bytes),
    }
    with opened(folder, **tiers) as llm:
        assert_thrashed(llm, lambda: ask(llm) == wanted)
        llm.local.ask(check_invariants)


CUTS = [pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.parity), {"pipeline_parallel_size": 2}]
"""At TP2 the ranks of test_a_rank_killed_amid_copies below give the tokens of one, too."""


@pytest.mark.parametrize("cut", CUTS, ids=["tp2", "pp2"])
def test_tp_and_pp_with_tiers_equal_one_rank(cut: dict[str, int], folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("llama-gqa")
    wanted, block_bytes, tiny_pool = plain(folder)
    tiers = {
        "num_gpu_blocks_override": tiny_pool,
        "kv_offloading_size": gib(30, block_bytes),
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": gib(400, 2 * block_bytes),
    }
    with opened(folder, **tiers, **cut) as llm:
        assert_thrashed(llm, lambda: ask(llm) == wanted)


def ask_with_choices(llm: LLM) -> list[list[list[int]]]:
    """Prompt and answer of each choice: three single ones, then one of four choices, whose prompt is four blocks."""
    prompts = [*([3 + (11 * i + 5 * k) % 190 for k in range(8 + i)] for i in range(3)), list(range(20, 37))]
    params = [
        SamplingParams(max_tokens=60 if i < 3 else 24, ignore_eos=True, seed=i, temperature=0.8, n=1 if i < 3 else 4)
        for i in range(4)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[[*o.prompt_token_ids, *choice.token_ids] for choice in o.outputs] for o in outputs]


def test_choices_under_pressure_share_their_prompt_in_every_tier(folder_of: Any) -> None:
    """n = 4 on two ranks, swapped out and back: each block, the prompt's too, is stored once."""
    folder, block_bytes = folder_of("llama-gqa"), plain(folder_of("llama-gqa"))[1]
    with opened(folder, num_gpu_blocks_override=200, max_num_seqs=8) as llm:
        wanted = ask_with_choices(llm)
        assert llm._engine.stats().preemptions == 0
    tiers = {"num_gpu_blocks_override": 38, "kv_offloading_size": gib(200, block_bytes), "max_num_seqs": 8}
    with opened(folder, **tiers, tensor_parallel_size=2) as llm:
        assert_thrashed(llm, lambda: ask_with_choices(llm) == wanted)
        llm.local.ask(lambda engine: engine.flush_transfers(10.0))
        offload = counts(llm)
    choices = [choice for choices in wanted for choice in choices]
    ends = [range(BLOCK_SIZE, len(choice) + 1, BLOCK_SIZE) for choice in choices]
    distinct = {tuple(choice[:end]) for choice, mine in zip(choices, ends, strict=True) for end in mine}
    assert offload.blocks["store"] == offload.host_blocks <= len(distinct) == sum(map(len, ends)) - 3 * 4


@pytest.mark.parametrize("how", ["slow", "store fails", "load fails", "load fails after some bytes"])
def test_copies_that_are_slow_or_fail_change_no_token(
    how: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama-gqa")
    wanted, block_bytes, _ = plain(folder)
    calls = {"store": 0, "load": 0}
    copier = kv_copies.CpuCopier
    whole_store, whole_load = copier.store, copier.load

    def store(self: Any, *args: Any) -> None:
        calls["store"] += 1
        if how == "slow":
            time.sleep(0.01)  # a slow store is what is tested
        if how == "store fails" and calls["store"] % 2:
            raise OSError("a hook says so")
        whole_store(self, *args)

    def load(self: Any, slots: Any, block_ids: Any, *rest: Any) -> None:
        calls["load"] += 1
        if how == "slow":
            time.sleep(0.03)  # so is a slow load
        if how.startswith("load fails") and calls["load"] % 2:
            if how.endswith("bytes"):
                whole_load(self, list(reversed(slots)), block_ids, *rest)
            raise OSError("a hook says so")
        whole_load(self, slots, block_ids, *rest)

    monkeypatch.setattr(copier, "store", store)
    monkeypatch.setattr(copier, "load", load)
    tiers = {"num_gpu_blocks_override": TINY_POOL, "kv_offloading_size": gib(60, block_bytes)}
    with opened(folder, **tiers) as llm:
        for _ in range(10):
            assert ask(llm) == wanted
            if calls["load"] > 0:
                break
        llm.local.ask(check_invariants)
    assert calls["load"] > 0


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_a_rank_killed_amid_copies_leaves_nothing_and_its_files_are_found_again(
    victim: int, folder_of: Any, tmp_path: Path
) -> None:
    folder = folder_of("llama-gqa")
    wanted, block_bytes, tiny_pool = plain(folder)
    tiers = {
        "num_gpu_blocks_override": tiny_pool,
        "kv_offloading_size": gib(20, block_bytes),
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": gib(400, 2 * block_bytes),
        "tensor_parallel_size": 2,
    }
    llm = opened(folder, **tiers)
    executor = llm._executor
    assert not is_in_process(executor)
    pids = executor.rank_pids
    assert ask(llm) == wanted
    whole_turn, killed = llm._engine.turn, [False]

    def turn(timeout_s: float) -> bool:
        if not killed[0] and llm._engine.is_copying:
            killed[0] = True
            os.kill(pids[victim], signal.SIGKILL)
        return whole_turn(timeout_s)

    llm._engine.turn = turn  # type: ignore[method-assign]
    with pytest.raises(GroupLost):
        ask_for_ever(llm)
    assert killed[0], "a copy was under way"
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with opened(folder, **tiers) as again:
        left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
        assert not left, "half-written files"
        store = again._engine.offload
        assert store is not None and ask(again) == wanted
        assert moved(again)["fetch"] > 0, "blocks of the group that was killed"
        assert [path.name for path in tmp_path.glob("*/*") if path.is_dir()] == ["0"], "the lock was free again"
