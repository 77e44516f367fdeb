"""Replayed steps equal eager ones bit for bit: families, streamed layers, quantized caches, adapters, with
other steps in between.

bf16, as the captured kernels require. CPUs without these kernels replay nothing.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.configs.schema import LoraSettings
from tandem.offload.weights.weight_copiers import InlineCopier, ThreadCopier
from tandem.offload.weights.weight_stream import Copier, WeightCopyError
from tandem.parallel.context import ParallelContext
from tandem.workers.graphs.cpu_graphs import MAX_CAPTURES, RUNS_BEFORE_CAPTURE
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import PARTITION_TOKENS
from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_experts import CpuExperts
from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_kernel
from tandem.workers.lora.device.rank_adapters import open_adapters
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform, multiplies_by_row
from tests.support.adapters import save_random_adapter
from tests.support.engine_ranks import RunsOut
from tests.support.lora_ranks import MAX_RANK, put_all, with_adapters
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, TINY_MODELS, TinyModel, save_tiny_model

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_ROWS, MAX_LEN = 5, 60
LONG = 2 * PARTITION_TOKENS + 40
Step = list[tuple[int, list[int]]]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if cpu_library(BF16) is None:
        pytest.skip("needs a C compiler")
    if not CpuPlatform().packs(BF16):
        pytest.skip("needs a CPU whose products of bf16 are no torch operations (AVX2)")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model, made when asked for."""
    root, made = tmp_path_factory.mktemp("tiny-models"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(BY_NAME[name], root)
        return made[name]

    return folder


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decoder_of(
    folder: Path, kv_dtype: torch.dtype | None = None, quantization: str | None = None, **more: object
) -> Decoder:
    spec, experts = load_spec(folder, quantization=quantization), CpuPlatform().experts(BF16)
    if spec.has_experts and not (isinstance(experts, CpuExperts) and experts.has_products):
        pytest.skip("torch multiplies experts on this CPU")
    attention = attention_of(spec, CpuPlatform(), BF16, kv_dtype)
    context = ParallelContext.single()
    return build_decoder(spec, context, folder=folder, dtype=BF16, platform=CpuPlatform(), attention=attention, **more)  # type: ignore[arg-type]


def random_steps(seed: int) -> list[Step]:
    """Prompts first; then decodes of changing sets of rows, each for some steps, and a prompt's rest in between."""
    rng = random.Random(seed)
    rows = [(row, prompt_ids(rng.randrange(2, 9), 200, seed=row)) for row in range(NUM_ROWS)]
    steps = [rows[:4], [*((row, [row + 3]) for row in range(3)), rows[4]]]
    for _ in range(6):
        chosen = rng.sample(range(NUM_ROWS), rng.choice((1, 3, NUM_ROWS)))
        steps += [[(row, [rng.randrange(3, 200)]) for row in chosen] for _ in range(rng.randrange(2, 8))]
    return [*steps, [(0, [7, 8, 9]), (1, [5])], *([(row, [step + 3]) for row in range(3)] for step in range(2))]


def logits_of(
    decoder: Decoder, steps: list[Step], *, replays: bool, kv_dtype: torch.dtype | None = None
) -> torch.Tensor:
    rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16, kv_dtype=kv_dtype)
    decoder.graphs.can_replay &= replays
    return torch.cat([rows.step(work) for work in steps])


def check(decoder: Callable[[], Decoder], kv_dtype: torch.dtype | None = None) -> None:
    steps = random_steps(1)
    plain, replaying = decoder(), decoder()
    expected = logits_of(plain, steps, replays=False, kv_dtype=kv_dtype)
    assert torch.equal(logits_of(replaying, steps, replays=True, kv_dtype=kv_dtype), expected)
    assert plain.graphs.num_replays == 0 and replaying.graphs.num_replays >= 8
    plain.close()
    replaying.close()


NARROW = {"gpt2-narrow", "qwen2_moe", "qwen2_moe-sparse", "deepseek_v2"}
"""Models whose widths the products of few rows do not take."""
REPLAYED = [tiny.name for tiny in TINY_MODELS if tiny.name not in NARROW]
GELU_EXPERTS = TinyModel("gelu-experts", "mixtral", {**BY_NAME["mixtral"].changes, "hidden_act": "gelu_pytorch_tanh"})
"""No family of the registry has experts with another activation than SiLU, but config.json may ask for one."""
IN_TEST = {
    "llama-gqa",
    "qwen3_moe",
    "gemma2",
    "gpt2",
    "opt-post",
    "bloom",
    "olmo2",
    "cohere",
    "granite",
    "granitemoe",
    "stablelm-parallel",
    "deepseek_v3",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_TEST else pytest.mark.parity) for name in REPLAYED]
)
def test_every_family_is_replayed(folders: Callable[[str], Path], name: str) -> None:
    check(lambda: decoder_of(folders(name)))


def test_experts_with_another_activation_are_replayed(tmp_path: Path) -> None:
    folder = save_tiny_model(GELU_EXPERTS, tmp_path)
    check(lambda: decoder_of(folder))


def test_how_many_families_are_replayed() -> None:
    families = {BY_NAME[name].model_type for name in REPLAYED}
    assert families >= {
        "mixtral",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "opt",
        "bloom",
        "mpt",
        "falcon",
        "cohere",
        "granite",
        "deepseek_v2",
        "deepseek_v3",
    }
    assert len(families) == 29


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "deepseek_v3"])
@pytest.mark.parametrize("before", range(RUNS_BEFORE_CAPTURE + 2))
def test_contexts_that_outgrow_a_partition_at_any_step(
    folders: Callable[[str], Path], two_threads: None, name: str, before: int
) -> None:
    """Attention takes more scratch memory while steps run eagerly, are captured and replayed; two threads."""
    prompts = [prompt_ids(PARTITION_TOKENS - before + 1 - row % 2, 200, seed=row) for row in range(NUM_ROWS)]
    steps = [[*enumerate(prompts)], *([(row, [row + step + 3]) for row in range(NUM_ROWS)] for step in range(12))]
    found = []
    for replays in (False, True):
        decoder = decoder_of(folders(name))
        rows = PagedRows(decoder, NUM_ROWS, LONG, BF16)
        decoder.graphs.can_replay &= replays
        found.append(torch.cat([rows.step(work) for work in steps]))
        assert decoder.graphs.num_replays == (12 - RUNS_BEFORE_CAPTURE - 1 if replays else 0)
    assert torch.equal(*found)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_quantized_weights(folders: Callable[[str], Path], quantization: str) -> None:
    if int8_kernel(BF16) is None:
        pytest.skip("this CPU multiplies no bytes")
    check(lambda: decoder_of(folders("qwen3"), quantization=quantization))
    check(lambda: decoder_of(folders("qwen3"), quantization=quantization, streamed=(0, 1, 3), copier=InlineCopier()))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_cache(folders: Callable[[str], Path], kv_dtype: torch.dtype) -> None:
    for name in ("qwen3", "deepseek_v3"):
        check(lambda name=name: decoder_of(folders(name), kv_dtype), kv_dtype)  # type: ignore[misc]


@pytest.mark.parametrize("streamed", [(1,), (0, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_streamed_layers_that_the_computing_threads_copy(
    folders: Callable[[str], Path], streamed: tuple[int, ...]
) -> None:
    check(lambda: decoder_of(folders("qwen3"), streamed=streamed, copier=InlineCopier()))


def test_a_step_that_runs_out_of_memory_is_run_again(folders: Callable[[str], Path]) -> None:
    """Every step at first fails, each at another operation: eager ones, while they are captured, while replayed."""
    plain, failing = decoder_of(folders("qwen3")), decoder_of(folders("qwen3"))
    steps = random_steps(3)
    expected = logits_of(plain, steps, replays=False)
    rows, logits, num_struck = PagedRows(failing, NUM_ROWS, MAX_LEN, BF16), [], 0
    for number, work in enumerate(steps):
        batch = rows.batch(work)
        with torch.inference_mode():
            with RunsOut(7 * number % 40) as mode, contextlib.suppress(torch.OutOfMemoryError):
                failing.forward(batch, rows.kv, None)
            logits.append(failing.forward(batch, rows.kv, None).clone())
        num_struck += mode.has_struck
    assert torch.equal(torch.cat(logits), expected)
    assert num_struck > len(steps) // 2 and failing.graphs.num_replays >= 8
    plain.close()
    failing.close()


@pytest.mark.parametrize(("name", "copier"), [("gpt2-narrow", None), ("qwen3", ThreadCopier)])
def test_steps_of_more_than_kernels_are_never_replayed(
    folders: Callable[[str], Path], name: str, copier: Callable[[], Copier] | None
) -> None:
    if name == "gpt2-narrow" and multiplies_by_row(BF16):
        pytest.skip("the row GEMM multiplies weights of any width")
    more = {} if copier is None else {"streamed": (0, 1, 2), "copier": copier()}
    decoder = decoder_of(folders(name), **more)
    logits_of(decoder, random_steps(2), replays=True)
    assert decoder.graphs.num_replays == 0 and not decoder.graphs.can_replay
    decoder.close()


def test_a_failed_copy_ends_replayed_steps_too(folders: Callable[[str], Path]) -> None:
    decoder = decoder_of(folders("qwen3"), streamed=(0, 1, 2), copier=InlineCopier())
    rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
    for step in range(RUNS_BEFORE_CAPTURE + 3):
        rows.step([(0, [step + 3])])
    assert decoder.graphs.num_replays == 2

    def fail() -> None:
        raise OSError("the machine is on fire")

    decoder.stream._slots[0].holds, decoder.stream._slots[0].waits = 0, [fail] * 4
    for _ in range(2):
        with pytest.raises(WeightCopyError, match="on fire"):
            rows.step([(0, [9]), (1, [9])])
        with pytest.raises(WeightCopyError, match="on fire"):
            rows.step([(0, [9])])
    decoder.close()


@pytest.mark.parametrize("streamed", [(), (0, 1, 2)])
def test_a_step_that_fails_during_its_capture_leaves_nothing_behind(
    folders: Callable[[str], Path], streamed: tuple[int, ...]
) -> None:
    def decoded(fails: bool) -> torch.Tensor:
        decoder = decoder_of(folders("qwen3"), streamed=streamed, copier=InlineCopier())
        rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
        outputs = []
        for step in range(RUNS_BEFORE_CAPTURE + 5):
            if fails and step == RUNS_BEFORE_CAPTURE:
                mlp, decoder._layers[0]._mlp = decoder._layers[0]._mlp, None  # type: ignore[attr-defined]
                batch = rows.batch([(0, [step + 3])])
                with torch.inference_mode(), pytest.raises(TypeError):
                    decoder.forward(batch, rows.kv, None)
                decoder._layers[0]._mlp = mlp  # type: ignore[attr-defined]
                rows.rows[0].length -= 1
            outputs.append(rows.step([(0, [step + 3])]))
        assert decoder.graphs.num_replays == 4
        decoder.close()
        return torch.cat(outputs)

    assert torch.equal(decoded(fails=True), decoded(fails=False))


def test_graph_keys_are_evicted_and_captured_again(folders: Callable[[str], Path]) -> None:
    decoder = decoder_of(folders("qwen3"))
    caches = [PagedRows(decoder, 1, MAX_LEN, BF16) for _ in range(MAX_CAPTURES + 1)]
    for rows in caches:
        for step in range(RUNS_BEFORE_CAPTURE + 2):
            rows.step([(0, [step + 3])])
    assert decoder.graphs.num_replays == MAX_CAPTURES + 1 and len(decoder.graphs._captures) == MAX_CAPTURES
    for step in range(RUNS_BEFORE_CAPTURE + 1):
        caches[0].step([(0, [step + 3])])
    assert decoder.graphs.num_replays == MAX_CAPTURES + 1
    caches[0].step([(0, [9])])
    assert decoder.graphs.num_replays == MAX_CAPTURES + 2


def test_adapters(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Each set of adapters on rows is a graph key of its own, and a replaced adapter makes another key."""
    folder = folders("qwen3")
    sources = [save_random_adapter(folder, tmp_path / f"a{seed}", rank=4 + seed, seed=seed) for seed in range(3)]
    found = []
    for replays in (False, True):
        decoder = decoder_of(folder)
        settings = LoraSettings(enable_lora=True, max_loras=2, max_lora_rank=MAX_RANK)
        spec = load_spec(folder)
        adapters = open_adapters(settings, spec, folder, decoder, CpuPlatform(), BF16, available_bytes=None, pp_size=1)
        put_all(adapters, sources[:2])
        rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
        decoder.graphs.can_replay &= replays
        found.append(adapted_logits(decoder, rows, partial(put_all, adapters, [sources[2], sources[1]])))
        assert decoder.graphs.num_replays == (4 * 3 if replays else 0)
    assert torch.equal(*found)


@torch.inference_mode()
def adapted_logits(decoder: Decoder, rows: PagedRows, replace_first: Callable[[], None]) -> torch.Tensor:
    outputs = []
    for slots in ([0, 1, -1], [1, 1, 0], [-1, -1, -1], [0, 1, -1]):
        if slots[0] == -1:
            replace_first()
        for step in range(RUNS_BEFORE_CAPTURE + 4):
            batch = with_adapters(rows.batch([(row, [row + step + 3]) for row in range(3)]), slots)
            outputs.append(decoder.forward(batch, rows.kv, None))
    return torch.cat(outputs)
