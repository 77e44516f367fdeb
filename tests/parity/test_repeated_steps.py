"""Steps that repeat a recorded one compute what steps that are run compute, bit for bit: families, streamed layers,
quantized caches, adapters, and whatever comes between.

bf16, as the kernels that are recorded have it; heads of 32 dims. On CPUs without them there is nothing to repeat.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.schema import LoraSettings
from offload.weight_copiers import InlineCopier, ThreadCopier
from offload.weight_stream import Copier, WeightCopyError
from parallel.context import ParallelContext
from tests.support.adapters import save_random_adapter
from tests.support.lora_ranks import MAX_RANK, put_all, with_adapters
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, TINY_MODELS, save_tiny_model
from workers.attention.select import select_attention
from workers.kernels.cpu_decode_attention import PARTITION_TOKENS
from workers.kernels.cpu_few_rows import select_few_rows
from workers.lora.memory import open_adapters
from workers.models.decoder import Decoder, build_decoder
from workers.models.layer_loop import MOST_RECORDS, SIGHTINGS
from workers.models.registry import load_spec

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_ROWS, MAX_LEN = 5, 60
LONG = 2 * PARTITION_TOKENS + 40
pytestmark = pytest.mark.skipif(select_few_rows(CPU, BF16) is None, reason="this CPU multiplies no bf16 pairs")
Step = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model with heads of 32 dims, made when asked for."""
    root, made = tmp_path_factory.mktemp("wide-models"), {}

    def folder(name: str) -> Path:
        if name not in made:
            tiny = BY_NAME[name]
            made[name] = save_tiny_model(replace(tiny, changes={**tiny.changes, "head_dim": 32}), root)
        return made[name]

    return folder


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decoder_of(folder: Path, kv_dtype: torch.dtype | None = None, **more: object) -> Decoder:
    spec = load_spec(folder)
    attention = select_attention(CPU, BF16, spec.head_dim, kv_dtype)
    context = ParallelContext.single()
    return build_decoder(spec, context, folder=folder, dtype=BF16, device=CPU, attention=attention, **more)  # type: ignore[arg-type]


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
    decoder: Decoder, steps: list[Step], *, repeats: bool, kv_dtype: torch.dtype | None = None
) -> torch.Tensor:
    rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16, kv_dtype=kv_dtype)
    decoder.loop.may_repeat &= repeats
    return torch.cat([rows.step(work) for work in steps])


def check(decoder: Callable[[], Decoder], kv_dtype: torch.dtype | None = None) -> None:
    steps = random_steps(1)
    plain, repeating = decoder(), decoder()
    expected = logits_of(plain, steps, repeats=False, kv_dtype=kv_dtype)
    assert torch.equal(logits_of(repeating, steps, repeats=True, kv_dtype=kv_dtype), expected)
    assert plain.loop.num_repeats == 0 and repeating.loop.num_repeats >= 8
    plain.close()
    repeating.close()


@pytest.mark.parametrize("name", sorted(tiny.name for tiny in TINY_MODELS if "gelu" not in tiny.name))
def test_every_family(folders: Callable[[str], Path], name: str) -> None:
    check(lambda: decoder_of(folders(name)))


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("before", range(SIGHTINGS + 2))
def test_contexts_that_outgrow_a_partition_at_any_step(
    folders: Callable[[str], Path], two_threads: None, name: str, before: int
) -> None:
    """Attention takes more scratch memory while steps are seen, recorded and repeated; two threads."""
    prompts = [prompt_ids(PARTITION_TOKENS - before + 1 - row % 2, 200, seed=row) for row in range(NUM_ROWS)]
    steps = [[*enumerate(prompts)], *([(row, [row + step + 3]) for row in range(NUM_ROWS)] for step in range(12))]
    found = []
    for repeats in (False, True):
        decoder = decoder_of(folders(name))
        rows = PagedRows(decoder, NUM_ROWS, LONG, BF16)
        decoder.loop.may_repeat &= repeats
        found.append(torch.cat([rows.step(work) for work in steps]))
        assert decoder.loop.num_repeats == (12 - SIGHTINGS - 1 if repeats else 0)
    assert torch.equal(*found)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_cache(folders: Callable[[str], Path], kv_dtype: torch.dtype) -> None:
    check(lambda: decoder_of(folders("qwen3"), kv_dtype), kv_dtype)


@pytest.mark.parametrize("streamed", [(1,), (0, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_streamed_layers_that_the_computing_threads_copy(
    folders: Callable[[str], Path], streamed: tuple[int, ...]
) -> None:
    check(lambda: decoder_of(folders("qwen3"), streamed=streamed, copier=InlineCopier()))


@pytest.mark.parametrize(("name", "copier"), [("llama-gelu", None), ("qwen3", ThreadCopier)])
def test_what_is_more_than_kernels_is_never_repeated(
    folders: Callable[[str], Path], name: str, copier: Callable[[], Copier] | None
) -> None:
    more = {} if copier is None else {"streamed": (0, 1, 2), "copier": copier()}
    decoder = decoder_of(folders(name), **more)
    logits_of(decoder, random_steps(2), repeats=True)
    assert decoder.loop.num_repeats == 0 and not decoder.loop.may_repeat
    decoder.close()


def test_a_copy_that_failed_ends_repeated_steps_too(folders: Callable[[str], Path]) -> None:
    decoder = decoder_of(folders("qwen3"), streamed=(0, 1, 2), copier=InlineCopier())
    rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
    for step in range(SIGHTINGS + 3):
        rows.step([(0, [step + 3])])
    assert decoder.loop.num_repeats == 2

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
def test_a_step_that_fails_while_it_is_recorded_leaves_nothing_behind(
    folders: Callable[[str], Path], streamed: tuple[int, ...]
) -> None:
    def decoded(fails: bool) -> torch.Tensor:
        decoder = decoder_of(folders("qwen3"), streamed=streamed, copier=InlineCopier())
        rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
        outputs = []
        for step in range(SIGHTINGS + 5):
            if fails and step == SIGHTINGS:
                mlp, decoder.loop._layers[0]._mlp = decoder.loop._layers[0]._mlp, None  # type: ignore[attr-defined]
                batch = rows.batch([(0, [step + 3])])
                with torch.inference_mode(), pytest.raises(TypeError):
                    decoder.forward(batch, rows.kv, None)
                decoder.loop._layers[0]._mlp = mlp  # type: ignore[attr-defined]
                rows.rows[0].length -= 1
            outputs.append(rows.step([(0, [step + 3])]))
        assert decoder.loop.num_repeats == 4
        decoder.close()
        return torch.cat(outputs)

    assert torch.equal(decoded(fails=True), decoded(fails=False))


def test_many_kinds_are_forgotten_and_learned_again(folders: Callable[[str], Path]) -> None:
    decoder = decoder_of(folders("qwen3"))
    caches = [PagedRows(decoder, 1, MAX_LEN, BF16) for _ in range(MOST_RECORDS + 1)]
    for rows in caches:
        for step in range(SIGHTINGS + 2):
            rows.step([(0, [step + 3])])
    assert decoder.loop.num_repeats == MOST_RECORDS + 1 and len(decoder.loop._records) == MOST_RECORDS
    for step in range(SIGHTINGS + 1):
        caches[0].step([(0, [step + 3])])
    assert decoder.loop.num_repeats == MOST_RECORDS + 1
    caches[0].step([(0, [9])])
    assert decoder.loop.num_repeats == MOST_RECORDS + 2


def test_adapters(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Each set of adapters on rows is a kind of step of its own, and one that is replaced makes another kind."""
    folder = folders("qwen3")
    sources = [save_random_adapter(folder, tmp_path / f"a{seed}", rank=4 + seed, seed=seed) for seed in range(3)]
    found = []
    for repeats in (False, True):
        decoder = decoder_of(folder)
        settings = LoraSettings(enable_lora=True, max_loras=2, max_lora_rank=MAX_RANK)
        spec = load_spec(folder)
        adapters = open_adapters(settings, spec, folder, decoder, CPU, BF16, available_bytes=None, pp_size=1)
        put_all(adapters, sources[:2])
        rows = PagedRows(decoder, NUM_ROWS, MAX_LEN, BF16)
        decoder.loop.may_repeat &= repeats
        found.append(adapted_logits(decoder, rows, partial(put_all, adapters, [sources[2], sources[1]])))
        assert decoder.loop.num_repeats == (4 * 3 if repeats else 0)
    assert torch.equal(*found)


@torch.inference_mode()
def adapted_logits(decoder: Decoder, rows: PagedRows, replace_first: Callable[[], None]) -> torch.Tensor:
    outputs = []
    for slots in ([0, 1, -1], [1, 1, 0], [-1, -1, -1], [0, 1, -1]):
        if slots[0] == -1:
            replace_first()
        for step in range(SIGHTINGS + 4):
            batch = with_adapters(rows.batch([(row, [row + step + 3]) for row in range(3)]), slots)
            outputs.append(decoder.forward(batch, rows.kv, None))
    return torch.cat(outputs)
