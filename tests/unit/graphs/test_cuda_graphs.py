"""Captured steps on the CPU: the recorded-graph twin captures them with padding, and what is replayed on crowds equals
those steps run eagerly, bit for bit: logits, tokens, the cache and the rows; families, adapters, groups of layers,
drafts, chunks, quantized caches, experts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tandem.configs.schema import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import EachExpert, Groups
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.lora.device.rank_adapters import open_adapters
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_windows
from tandem.workers.planning.budget import ATTENTION_BYTES, MIB
from tandem.workers.planning.graph_room import capture_bytes, graph_bytes
from tandem.workers.platforms.base import DeviceMemory
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.captured.framed_step import FramedStep
from tandem.workers.rank.loading import load_rank
from tests.support.adapters import ALL_LINEARS, save_random_adapter
from tests.support.crowds import (
    BLOCKS,
    GREEDY,
    MAX_LEN,
    PLAIN,
    ROWS,
    Capture,
    Rank,
    crowd,
    decoder_on,
    device,
    eagerly,
    settings_of,
)
from tests.support.lora_ranks import put_all
from tests.support.platforms import NoGraphs, replaced
from tests.support.recorded_graph import recorded
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model

CAPTURED = (
    *PLAIN,
    RowSampling(temperature=0.7, top_k=3, top_p=0.9, seed=5),
    RowSampling(temperature=0.9, top_p=0.6, min_p=0.01, seed=2, repetition_penalty=1.2, frequency_penalty=0.3),
    RowSampling(
        temperature=0.0, presence_penalty=0.6, logit_bias=((5, 1.5),), min_tokens=4, stop_token_ids=(6, 8),
        bad_words_token_ids=((7,),),
    ),
)  # fmt: skip
"""What a capture edits and draws, in any mix."""
RULED = (
    RowSampling(temperature=0.5, seed=2, frequency_penalty=0.3, bad_words_token_ids=((5, 6), (7,)), logprobs=3),
    RowSampling(temperature=0.9, seed=1, logprobs=2),
    RowSampling(temperature=0.8, seed=6, allowed_token_ids=tuple(range(3, 90)), logprobs=0),
    RowSampling(temperature=0.0, thinking_budget=ThinkingBudget(tokens=2, start=(4,), end=(8, 9), inside=True)),
    RowSampling(temperature=0.0, logprobs=0, logprob_token_ids=(5, 900, 6)),
)
"""What one behind the step's does beside."""
LATE = (
    RowSampling(temperature=0.5, seed=2, frequency_penalty=0.3, bad_words_token_ids=((5, 6), (7,))),
    RowSampling(temperature=0.9, seed=1, logprobs=21),
)
"""What none draws."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model({**BY_NAME, GROUPED.name: GROUPED}[name], root)
        return made[name]

    return folder


def ready(
    folder: Path,
    capture: Capture | None,
    *,
    adapters: list[Path] | None = None,
    drafts: int = 0,
    kv_dtype: torch.dtype | None = None,
    windows: tuple[int | None, ...] = (None,),
) -> Rank:
    platform = device(capture)
    decoder = decoder_on(platform, folder, adapters or (), kv_dtype, windows)
    settings = settings_of(max_loras=len(adapters or ()), drafts=drafts)
    vocab = load_spec(folder).vocab_size
    return Rank.of(decoder, platform, settings, capture, vocab_size=vocab, kv_dtype=kv_dtype, windows=windows)


def ran(folder: Path, capture: Capture | None, plans: list[StepPlan], **given: Any) -> Rank:
    rank = ready(folder, capture, **given)
    rank.run(plans)
    return rank


@pytest.mark.parametrize(
    ("name", "num_adapters", "drafts", "kv_dtype", "samplings"),
    [
        ("qwen3", 2, 0, None, PLAIN),
        ("qwen3", 2, 3, None, (*PLAIN, *LATE)),
        ("gemma2", 0, 3, None, PLAIN),
        ("bloom", 0, 0, None, LATE),
        ("mistral-window", 0, 0, torch.int8, PLAIN),
        ("grouped", 2, 3, None, PLAIN),
        ("grouped", 0, 0, torch.int8, (GREEDY,)),
    ],
    ids=["adapters", "adapters-drafts-late", "drafts", "late", "window-int8", "groups-adapters-drafts", "groups-int8"],
)
def test_replays_equal_eager_steps(
    folders: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    num_adapters: int,
    drafts: int,
    kv_dtype: torch.dtype | None,
    samplings: tuple[RowSampling, ...],
) -> None:
    """At the same padding bit for bit, the cache too; the same texts as without padding, and without drafts."""
    folder, windows = folders(name), kv_windows(load_spec(folders(name)), MAX_LEN)
    adapters = [
        save_random_adapter(folder, tmp_path / f"a{n}", rank=4 + n, seed=n, modules=modules)
        for n, modules in zip(range(num_adapters), (ALL_LINEARS, ("embed_tokens", "lm_head", "q_proj")), strict=False)
    ]
    plans = crowd(7, 24, samplings=samplings, adapters=num_adapters, drafts=drafts, groups=len(windows))
    given: dict[str, Any] = {"adapters": adapters, "drafts": drafts, "kv_dtype": kv_dtype, "windows": windows}
    replayed, padded, plain = (ran(folder, capture, plans, **given) for capture in (recorded, eagerly, None))
    assert all(replayed.num_replays) and not any(plain.num_replays)
    for ours, same, other in zip(replayed.logits, padded.logits, plain.logits, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-4 if kv_dtype is None else 2e-2)
    assert replayed.tokens == padded.tokens == plain.tokens and replayed.logprobs == padded.logprobs
    for mine, its in zip(replayed.runner.kv.planes, padded.runner.kv.planes, strict=True):
        assert torch.equal(as_indexable(mine), as_indexable(its))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("samplings", [CAPTURED, (*RULED, *CAPTURED[-3:])], ids=["edits", "rules"])
def test_any_mix_of_edits_rules_and_draws_is_replayed(
    folders: Callable[[str], Path], drafts: int, samplings: tuple[RowSampling, ...]
) -> None:
    """Tokens are those of steps that run eagerly, without padding, and edit and draw with the processors' operations.
    Nothing is sampled behind a replay."""
    plans, found = crowd(11, 30, samplings=samplings, drafts=drafts), []
    for capture in (recorded, None):
        rank = ready(folders("qwen3"), capture, drafts=drafts)
        if capture is not None:
            rank.runner._draw = None  # type: ignore[assignment, method-assign]
        rank.run(plans)
        found.append(rank)
    replayed, plain = found
    assert all(replayed.num_replays) and replayed.num_ahead and not any(plain.num_replays)
    assert replayed.tokens == plain.tokens and replayed.num_accepted == plain.num_accepted
    assert bool(replayed.num_accepted) == bool(drafts)
    assert len(replayed.logprobs) == len(plain.logprobs) and bool(plain.logprobs) == (samplings != CAPTURED)
    for mine, its in zip(replayed.logprobs, plain.logprobs, strict=True):
        assert (mine.token_id, mine.rank) == (its.token_id, its.rank) and abs(mine.logprob - its.logprob) < 1e-4
        assert [token for token, _ in mine.top] == [token for token, _ in its.top]


def test_padding_is_no_experts_token(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it count. Experts one by one are asked for their tokens on the host, which no graph can hold: such steps
    run eagerly, and the start says why."""
    pairs, apply = [], EachExpert.apply

    def counted(self: EachExpert, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        pairs.append(int(groups.ends_E[-1]))
        return apply(self, x, groups, gathers=gathers)

    monkeypatch.setattr(EachExpert, "apply", counted)
    plans, found, computed = crowd(5, 12), [], []
    for capture in (eagerly, None, recorded):
        rank = ready(folders("qwen3_moe"), capture)
        assert all(not loads_E.any() for loads_E in rank.decoder.expert_loads.values()), "captures are padding alone"
        pairs.clear()
        rank.run(plans)
        found.append(rank)
        computed.append(sum(pairs))
    padded, plain, refused = found
    assert all(padded.num_replays) and padded.tokens == plain.tokens == refused.tokens
    for layer, loads_E in plain.decoder.expert_loads.items():
        assert torch.equal(padded.decoder.expert_loads[layer], loads_E) and loads_E.sum() > 0
    assert computed[0] == computed[1] > 0
    assert refused.report is not None and not refused.report.num_captures and not any(refused.num_replays)
    assert all("tolist" in why for why in refused.report.failures.values())


def test_padded_tokens_write_the_scratch_block_alone(folders: Callable[[str], Path]) -> None:
    platform, spec = device(recorded), load_spec(folders("qwen3"))
    decoder = decoder_on(platform, folders("qwen3"))
    rank = Rank.of(decoder, platform, settings_of(), recorded, vocab_size=spec.vocab_size)
    kv = rank.runner.kv
    assert kv.tensors.scratch_block == kv.slab.shape[1] - 1
    assert not kv.slab[:, :-1].any(), "captures write nothing else"
    plans = crowd(1, 12)
    for number, plan in enumerate(plans):
        before = kv.slab.clone()
        rank.run([plan])
        changed = (kv.slab != before).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
        rows = {work.row for work in plan.work}
        own = {block for row in rows for block in range(row, ROWS * BLOCKS, ROWS)}
        assert set(changed) <= own | {kv.tensors.scratch_block}, number
    assert all(rank.num_replays)


@pytest.mark.parametrize("error", [RuntimeError("not permitted in a capture"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_costs_that_one_alone(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture, error: RuntimeError
) -> None:
    """Its steps are replayed by the next one that holds them, or run eagerly; the texts are the same."""

    def fails_at_64(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        if len(body()[0]) == 64:
            raise error
        return recorded(body)

    plans = crowd(3, 20)
    failing, whole = (ran(folders("qwen3"), capture, plans) for capture in (fails_at_64, recorded))
    assert failing.report is not None and whole.report is not None
    assert failing.report.failures == {"64 tokens, 10 blocks, chunks": str(error)}
    assert (failing.report.num_captures, whole.report.num_captures) == (6, 7), "three draws with rules too"
    assert 0 < sum(failing.num_replays) < sum(whole.num_replays) == len(plans)
    assert failing.tokens == whole.tokens
    assert caplog.text.count(str(error)) == 1, "said once"


def test_no_step_is_captured_with_enforce_eager(folders: Callable[[str], Path]) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(folders("qwen3")), dtype="float32", enforce_eager=True),
        cache=CacheSettings(num_blocks=20),
    )
    platform = replaced(device(recorded, HostAccelerator()), memory=lambda: DeviceMemory(700 * MIB, 1024 * MIB))
    loaded = load_rank(settings, ParallelContext.single(), platform, rank=0, ranks_on_node=1)
    runner = loaded.build_runner(20)
    assert runner.captures is None and not loaded.decoder.graphs.can_replay
    runner.close()


def test_adapters_that_come_later_are_in_the_captures_of_the_start(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """One that changes q and v, then one that changes all: the captures were made before either was there."""
    folder, spec, found = folders("qwen3"), load_spec(folders("qwen3")), {}
    some = save_random_adapter(folder, tmp_path / "some", rank=4, seed=1, modules=("q_proj", "v_proj"))
    whole = save_random_adapter(folder, tmp_path / "all", rank=3, seed=2)
    for kind, capture in (("replayed", recorded), ("padded", eagerly)):
        platform = device(capture)
        decoder, settings = decoder_on(platform, folder), settings_of(max_loras=2)
        opened = open_adapters(
            settings.lora, spec, folder, decoder, platform, torch.float32, available_bytes=None, pp_size=1
        )
        rank = found[kind] = Rank.of(decoder, platform, settings, capture, vocab_size=spec.vocab_size)
        for number, adapters in enumerate(([some], [some, whole])):
            put_all(opened, adapters)
            inits = [
                RowInit(row=row, token_ids=[5, 7], prompt_len=2, num_computed=0, sampling=GREEDY, adapter_slot=slot)
                for row, slot in ((0, 0), (1, len(adapters) - 1), (2, None))
            ]
            work = [RowWork(row=row, num_tokens=2, samples=True, new_block_ids=[row]) for row in range(3)]
            rank.run([StepPlan(step_id=1 + number, work=work, new_rows=inits)])
        assert rank.num_replays == [True, True]
        assert len(decoder.graphs._captures) == 4, "with adapters and without, with chunks and without"  # type: ignore[attr-defined]
    assert all(map(torch.equal, found["replayed"].logits, found["padded"].logits))
    first, second = found["replayed"].logits
    assert torch.equal(first[2], second[2]) and not torch.equal(first[0], first[2])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["qwen3", "grouped"])
def test_a_capture_keeps_no_more_than_the_plan_says(folders: Callable[[str], Path], name: str) -> None:
    platform, spec = device(recorded), load_spec(folders(name))
    groups = KVGroups(16, kv_windows(spec, MAX_LEN))
    decoder = decoder_on(platform, folders(name), windows=groups.windows)
    settings = settings_of(20, max_loras=0, drafts=3, budget=70)
    Rank.of(decoder, platform, settings, recorded, vocab_size=spec.vocab_size, windows=groups.windows)
    captures = [one for found in decoder.graphs._captures.values() for one in found.values()]  # type: ignore[attr-defined]
    assert {one.step.num_tokens for one in captures} == {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 128}
    for one in captures:
        assert isinstance(one.step, FramedStep)
        kept = one.step.frame.nbytes + sum(tensor.nbytes for tensor in tree_leaves(one.outputs))
        most = capture_bytes(one.step.size, groups)
        assert kept <= most and (one.step.num_tokens < 16 or most / 3 <= kept), one.step.size


def test_the_pool_leaves_room_for_captures(folders: Callable[[str], Path]) -> None:
    """A device of 1 GiB, of which 700 MiB are free once the weights are there."""
    settings = EngineSettings(
        model=ModelSettings(model=str(folders("qwen3")), dtype="float32"),
        scheduler=SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=64),
    )
    counts, context = [], ParallelContext.single()
    for graphs in (device(recorded).graphs, lambda *_: NoGraphs()):
        memory = lambda: DeviceMemory(700 * MIB, 1024 * MIB)  # noqa: E731
        platform = replaced(device(recorded), memory=memory, graphs=graphs)
        loaded = load_rank(settings, context, platform, rank=0, ranks_on_node=1)
        counts.append(loaded.facts.num_blocks)
        size = loaded.facts.block_bytes
        loaded.decoder.close()
    of_captures = graph_bytes(loaded.spec, context.mesh, settings, 4, loaded.max_model_len)
    assert of_captures > ATTENTION_BYTES and abs((counts[1] - counts[0]) * size - of_captures) <= size
