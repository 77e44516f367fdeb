"""Replayed steps with drafts in flight: the device guesses, and each step is launched before the host has read the one
ahead of it. Replays equal the same steps run eagerly, bit for bit, whether tokens are drawn in them or behind them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.spec.config.config_reader import load_spec
from tests.support.adapters import save_random_adapter
from tests.support.crowds import Capture, Rank, decoder_on, device, eagerly, settings_of
from tests.support.recorded_graph import recorded
from tests.support.tiny_models import BY_NAME, save_tiny_model

BLOCK, BLOCKS, STEPS, DRAFTS = 32, 6, 18, 3
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9], [11] * 7]
SLOTS = [0, None, 1]
BEHIND = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.5, top_k=2, seed=5, frequency_penalty=-0.1, bad_words_token_ids=((9, 9), (12,))),
    RowSampling(
        temperature=0.0,
        repetition_penalty=0.9,
        min_tokens=9,
        stop_token_ids=(11, 12),
        thinking_budget=ThinkingBudget(tokens=3, start=(11,), end=(5, 6), inside=True),
    ),
]
INSIDE = [RowSampling(temperature=0.0), RowSampling(temperature=0.2, seed=5), RowSampling(temperature=0.0)]


def course(
    folder: Path, adapters: list[Path], capture: Capture | None, drafts: int, samplings: list[RowSampling]
) -> Rank:
    """Prompts, then decode steps of all rows. drafts: of a row."""
    platform = device(capture)
    decoder, rows = decoder_on(platform, folder, adapters), len(PROMPTS)
    settings = settings_of(rows, max_loras=len(adapters), block_size=BLOCK, drafts=DRAFTS)
    vocab, max_len = load_spec(folder).vocab_size, BLOCK * BLOCKS - 64
    rank = Rank.of(decoder, platform, settings, capture, vocab_size=vocab, max_len=max_len)
    inits = [
        RowInit(
            row=row,
            token_ids=prompt,
            prompt_len=len(prompt),
            num_computed=0,
            sampling=samplings[row],
            adapter_slot=SLOTS[row] if adapters else None,
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    blocks = np.arange(BLOCKS * rows).reshape(-1, rows).T.tolist()
    first = [
        RowWork(row=row, num_tokens=len(prompt), samples=True, new_block_ids=blocks[row])
        for row, prompt in enumerate(PROMPTS)
    ]
    work = [RowWork(row=row, num_tokens=1, samples=True, max_drafts=drafts) for row in range(rows)]
    plans = [StepPlan(step_id=2 + step, work=work) for step in range(STEPS)]
    rank.run([StepPlan(step_id=1, work=first, new_rows=inits), *plans])
    return rank


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "num_adapters", "samplings"), [("qwen3", 2, BEHIND), ("qwen3", 0, INSIDE), ("gemma2", 0, BEHIND)]
)
def test_replays_with_drafts_in_flight_equal_eager_steps(
    tmp_path: Path, name: str, num_adapters: int, samplings: list[RowSampling]
) -> None:
    """All steps are replayed, and launched ahead; tokens are those of steps without drafts."""
    folder = save_tiny_model(BY_NAME[name], tmp_path)
    adapters = [save_random_adapter(folder, tmp_path / f"a{n}", rank=4 + n, seed=n) for n in range(num_adapters)]
    replayed, padded = (course(folder, adapters, capture, DRAFTS, samplings) for capture in (recorded, eagerly))
    assert replayed.num_ahead == STEPS and replayed.num_accepted >= 5
    assert all(replayed.num_replays)
    assert replayed.tokens == padded.tokens
    for mine, its in zip(replayed.logits, padded.logits, strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(replayed.runner.kv.slab, padded.runner.kv.slab)
    plain = course(folder, adapters, None, 0, samplings)
    assert not any(plain.num_replays) and not plain.num_accepted
    for row, its in plain.tokens.items():
        mine = replayed.tokens[row]
        assert len(mine) >= len(its) and mine[: len(its)] == its
