"""CudaGraphs on the CPU: the recorded-graph twin captures, and what is replayed on later steps equals those steps run
eagerly, bit for bit: families, adapters, groups of layers, rows with drafts, padding, quantized caches."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tandem.configs.schema import CacheSettings, EngineSettings, LoraSettings, ModelSettings, SchedulerSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import NoGraphs, Outputs
from tandem.workers.lora.device.rank_adapters import open_adapters
from tandem.workers.messages.handshake import CaptureReport
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_windows
from tandem.workers.planning.budget import ATTENTION_BYTES, MIB
from tandem.workers.planning.graph_room import capture_bytes, graph_bytes
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.loading import load_rank
from tandem.workers.rank.start.captures import capture_steps, sizes_of
from tests.support.adapters import save_random_adapter
from tests.support.lora_ranks import put_all, with_adapters
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import recorded
from tests.support.slot_lora import SlotLora
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model

CPU, ROWS, MAX_LEN, BLOCK = torch.device("cpu"), 4, 70, 16
ONE_GROUP = (None,)
Step = tuple[list[tuple[int, list[int]]], list[int]]
"""Rows with their tokens, and the rows' adapter slots."""


def eagerly(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """No capture: each replay runs the body again, on the inputs of now."""
    outputs = body()

    def replay() -> None:
        for mine, its in zip(outputs, body(), strict=True):
            mine.copy_(its)

    return replay, outputs


def settings_of(rows: int, *, max_loras: int = 0, block_size: int = BLOCK) -> EngineSettings:
    """Of a decoder that is captured for so many tokens."""
    return EngineSettings(
        model=ModelSettings(model="tiny", dtype="float32"),
        cache=CacheSettings(block_size=block_size),
        scheduler=SchedulerSettings(max_num_seqs=rows),
        lora=LoraSettings(enable_lora=max_loras > 0, max_loras=max(1, max_loras), max_lora_rank=8),
    )


def captured(
    decoder: Decoder, kv: KVTensors, platform: Platform, settings: EngineSettings, max_len: int, num_groups: int = 1
) -> CaptureReport | None:
    """Makes the captures of a start."""
    with torch.no_grad():
        sizes = sizes_of(decoder, kv, settings, max_len)
        return capture_steps(decoder, kv, ParallelContext.single(), platform, sizes, num_groups)


def device(capture: Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]) -> Platform:
    """A GPU's platform on CPU memory."""
    platform = GpuOnHost(HostAccelerator(), capture)
    return replaced(platform, lora_ops=lambda dtype: SlotLora())


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


def steps_of(seed: int, with_slots: bool) -> list[Step]:
    """Prompts, then decodes of some rows, some with drafts; a prompt in between."""
    rng = random.Random(seed)

    def slots(count: int) -> list[int]:
        some = [rng.choice((-1, 0, 1)) if with_slots else -1 for _ in range(count)]
        return [rng.randrange(2), *some[1:]] if with_slots else some

    steps = [([(row, prompt_ids(rng.randrange(6, 14), 200, seed=row)) for row in range(ROWS)], slots(ROWS))]
    for _ in range(20):
        rows = rng.sample(range(ROWS), rng.choice((1, ROWS - 1, ROWS)))
        steps.append(([(row, prompt_ids(rng.choice((1, 1, 3)), 200)) for row in rows], slots(len(rows))))
    return steps


@torch.no_grad()
def logits_of(
    decoder: Decoder,
    platform: Platform,
    steps: list[Step],
    kv_dtype: torch.dtype | None = None,
    windows: tuple[int | None, ...] = ONE_GROUP,
) -> tuple[list[torch.Tensor], PagedRows]:
    rows = PagedRows(decoder, ROWS, MAX_LEN, block_size=BLOCK, kv_dtype=kv_dtype, platform=platform, windows=windows)
    settings, found = settings_of(2 * ROWS, max_loras=2 * decoder.captures_adapters), []
    captured(decoder, rows.kv, platform, settings, MAX_LEN, len(windows))
    for work, slots in steps:
        batch = rows.batch(work, all_logits=True)
        found.append(decoder.forward(with_adapters(batch, slots), rows.kv, None))
    return found, rows


def decoder_on(
    platform: Platform,
    folder: Path,
    adapters: list[Path],
    kv_dtype: torch.dtype | None = None,
    windows: tuple[int | None, ...] = ONE_GROUP,
) -> Decoder:
    spec = load_spec(folder)
    context = ParallelContext.single()
    decoder = build_decoder(
        spec, context, folder=folder, dtype=torch.float32, platform=platform, kv_dtype=kv_dtype, windows=windows
    )
    if adapters:
        settings = LoraSettings(enable_lora=True, max_loras=2, max_lora_rank=8)
        opened = open_adapters(
            settings, spec, folder, decoder, platform, torch.float32, available_bytes=None, pp_size=1
        )
        put_all(opened, adapters)
    return decoder


@pytest.mark.parametrize(
    ("name", "num_adapters", "kv_dtype"),
    [
        ("qwen3", 2, None),
        ("gemma2", 0, None),
        ("bloom", 0, None),
        ("mistral-window", 0, torch.int8),
        ("grouped", 2, None),
        ("grouped", 0, torch.int8),
    ],
)
def test_replays_equal_eager_steps(
    folders: Callable[[str], Path], tmp_path: Path, name: str, num_adapters: int, kv_dtype: torch.dtype | None
) -> None:
    """At the same padding bit for bit, the cache too; against steps without padding, and with one block table for all
    layers, up to the order of sums."""
    folder, steps = folders(name), steps_of(3, num_adapters > 0)
    adapters = [save_random_adapter(folder, tmp_path / f"a{n}", rank=4 + n, seed=n) for n in range(num_adapters)]
    found = {}
    for kind, capture in (("replayed", recorded), ("padded", eagerly), ("plain", None)):
        platform = device(capture or recorded)
        windows = kv_windows(load_spec(folder), MAX_LEN) if capture else ONE_GROUP
        decoder = decoder_on(platform, folder, adapters, kv_dtype, windows)
        if capture is None:
            decoder.graphs = NoGraphs()
        found[kind] = (*logits_of(decoder, platform, steps, kv_dtype, windows), decoder.graphs)
    (replayed, cache, graphs), (padded, padded_cache, _), (plain, _, _) = found.values()
    assert graphs.num_replays >= 8 and graphs.can_replay
    for ours, same, other in zip(replayed, padded, plain, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-4 if kv_dtype is None else 2e-2)
    for mine, its in zip(cache.kv.layers, padded_cache.kv.layers, strict=True):
        assert torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)


def test_padded_tokens_write_the_scratch_block_alone(folders: Callable[[str], Path]) -> None:
    platform = device(recorded)
    decoder = decoder_on(platform, folders("qwen3"), [])
    rows = PagedRows(decoder, ROWS, MAX_LEN, block_size=BLOCK, platform=platform)
    assert rows.kv.scratch_block == len(rows.kv.layers[0].keys) - 1
    captured(decoder, rows.kv, platform, settings_of(ROWS), MAX_LEN)
    for kv in rows.kv.layers:
        assert (kv.keys[:-1] == 7).all() and (kv.values[:-1] == 7).all(), "captures write nothing else"
    with torch.no_grad():
        for step in range(3):
            before = [(kv.keys.clone(), kv.values.clone()) for kv in rows.kv.layers]
            batch = rows.batch([(row, [step + 3]) for row in range(3)])
            decoder.forward(batch, rows.kv, None)
    assert decoder.graphs.num_replays == 3, "three tokens in a bucket of four"
    written = {*(batch.slot_mapping_T // rows.block_size).tolist(), rows.kv.scratch_block}
    for kv, (keys, values) in zip(rows.kv.layers, before, strict=True):
        changed = (kv.keys != keys).flatten(1).any(1) | (kv.values != values).flatten(1).any(1)
        assert set(changed.nonzero()[:, 0].tolist()) <= written


@pytest.mark.parametrize("error", [RuntimeError("not permitted in a capture"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_costs_that_one_alone(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture, error: RuntimeError
) -> None:
    """Its steps run eagerly, as those do that no bucket holds; the others are replayed."""

    def fails_at_four(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        if len(body()[0]) == 4:
            raise error
        return recorded(body)

    counts, logits = {}, {}
    for name, capture in (("failing", fails_at_four), ("whole", recorded)):
        platform = device(capture)
        decoder = decoder_on(platform, folders("qwen3"), [])
        rows = PagedRows(decoder, ROWS, MAX_LEN, block_size=BLOCK, platform=platform)
        report = captured(decoder, rows.kv, platform, settings_of(ROWS), MAX_LEN)
        assert report is not None
        assert (report.num_captures, report.failures) == (
            (2, {"4 tokens, 9 blocks": str(error)}) if name == "failing" else (3, {})
        )
        counts[name], logits[name] = [], []
        for tokens in (1, 2, 4, 2, 4, 1, 17):
            before = decoder.graphs.num_replays
            with torch.no_grad():
                step = rows.batch([(row, [step_id + 3]) for row, step_id in enumerate(range(min(tokens, ROWS)))])
                if tokens == 17:
                    step = rows.batch([(0, prompt_ids(17, 200))])
                logits[name].append(decoder.forward(step, rows.kv, None))
            counts[name].append(decoder.graphs.num_replays - before)
    assert counts == {"failing": [1, 1, 0, 1, 0, 1, 0], "whole": [1, 1, 1, 1, 1, 1, 0]}
    for ours, theirs in zip(logits["failing"], logits["whole"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert caplog.text.count(str(error)) == 1, "said once"


def test_no_step_is_captured_with_enforce_eager(folders: Callable[[str], Path]) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(folders("qwen3")), dtype="float32", enforce_eager=True),
        cache=CacheSettings(num_blocks=20),
    )
    platform = replaced(device(recorded), memory=lambda: DeviceMemory(700 * MIB, 1024 * MIB))
    loaded = load_rank(settings, ParallelContext.single(), platform, rank=0, ranks_on_node=1)
    runner = loaded.build_runner(20)
    assert runner.captures is None and not loaded.decoder.graphs.can_replay
    runner.close()


def test_one_graph_serves_any_mix_of_adapters(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, platform = folders("qwen3"), device(recorded)
    adapters = [save_random_adapter(folder, tmp_path / f"a{n}", rank=4, seed=n) for n in range(2)]
    decoder = decoder_on(platform, folder, adapters)
    mixes = [[0, 1], [1, 1], [0, -1], [-1, 1], [1, 0], [0, 0]]
    logits_of(decoder, platform, [([(0, [step + 3]), (1, [7])], mix) for step, mix in enumerate(mixes)])
    assert decoder.graphs.num_replays == len(mixes)
    assert len(decoder.graphs._captures) == 8, "four buckets, with adapters and without"  # type: ignore[attr-defined]


def test_adapters_that_come_later_are_in_the_captures_of_the_start(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """One that changes q and v, then one that changes all: the captures were made before either was there."""
    folder, logits = folders("qwen3"), {}
    some = save_random_adapter(folder, tmp_path / "some", rank=4, seed=1, modules=("q_proj", "v_proj"))
    whole = save_random_adapter(folder, tmp_path / "all", rank=3, seed=2)
    for kind, capture in (("replayed", recorded), ("padded", eagerly)):
        platform = device(capture)
        decoder = decoder_on(platform, folder, [])
        settings = settings_of(ROWS, max_loras=2)
        opened = open_adapters(
            settings.lora, load_spec(folder), folder, decoder, platform, torch.float32, available_bytes=None, pp_size=1
        )
        rows = PagedRows(decoder, ROWS, MAX_LEN, block_size=BLOCK, platform=platform)
        captured(decoder, rows.kv, platform, settings, MAX_LEN)
        logits[kind] = []
        with torch.no_grad():
            for adapters in ([some], [some, whole]):
                put_all(opened, adapters)
                batch = rows.batch([(0, [5]), (1, [7])])
                logits[kind].append(decoder.forward(with_adapters(batch, [0, len(adapters) - 1]), rows.kv, None))
        assert decoder.graphs.num_replays == 2
    assert all(map(torch.equal, logits["replayed"], logits["padded"]))
    assert not torch.equal(*logits["replayed"])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "bloom", "grouped"])
def test_a_capture_keeps_no_more_than_the_plan_says(folders: Callable[[str], Path], name: str) -> None:
    platform, spec = device(recorded), load_spec(folders(name))
    groups = KVGroups(BLOCK, kv_windows(spec, MAX_LEN))
    decoder = decoder_on(platform, folders(name), [], windows=groups.windows)
    rows = PagedRows(decoder, ROWS, MAX_LEN, block_size=BLOCK, platform=platform, windows=groups.windows)
    captured(decoder, rows.kv, platform, settings_of(ROWS), 400, groups.count)
    captures = decoder.graphs._captures  # type: ignore[attr-defined]
    assert len(captures) == 6, "tables of 16 blocks and of 29"
    for (_, bucket), one in captures.items():
        inputs = one.inputs
        attention = [leaf for leaf in tree_leaves(vars(inputs.attention)) if isinstance(leaf, torch.Tensor)]
        kept = sum(tensor.nbytes for tensor in (*inputs._tensors(), *one.outputs, *attention))
        most = capture_bytes(spec, groups, bucket, inputs.batch.block_table_RN.shape[1], 4)
        assert most / 2 <= kept <= most, bucket


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
