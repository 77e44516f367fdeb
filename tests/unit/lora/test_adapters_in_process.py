"""Adapters on one rank through its executor, as the engine uses it: moves, mixed steps, refusals (FT-12)."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.configs.environment import kernel_cache_folder
from tandem.configs.errors import SettingsError
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
)
from tandem.parallel.mesh import Mesh
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.lora.peft import adapter_source
from tandem.workers.lora.peft.peft_folder import CONFIG_FILE, WEIGHT_FILE, adapter_digest
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import Failure, FetchAdapter, PlaceAdapter, TransferResult
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.adapter_room import adapter_room
from tests.support.adapters import AdapterDriver, error_of, ref_of, save_merged, save_random_adapter
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.in_process import runner_of, server_of
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import BY_NAME, TinyModel, save_tiny_model

RANKS = (4, 8, 16, 64)
KINDS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "v_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("o_proj",),
)
OUTPUT_LEN = 20


def settings_for(base: Path, **lora: Any) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(base), dtype="float32"),
        cache=CacheSettings(num_blocks=200, block_size=8),
        scheduler=SchedulerSettings(max_num_seqs=18, max_num_batched_tokens=256),
        device=DeviceSettings(device="cpu", cpu_threads=1),
        lora=LoraSettings(**({"enable_lora": True, "max_loras": 16, "max_lora_rank": 64} | lora)),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        save_random_adapter(base, folder / str(n), rank=RANKS[n % 4], seed=n, modules=KINDS[n // 4]) for n in range(16)
    ]


@pytest.fixture
def started(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RankGroup, ExecutorDriver, AdapterDriver]]:
    compiled = kernel_cache_folder()
    compiled.mkdir(parents=True, mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel_cache_folder().parent.mkdir(parents=True)
    kernel_cache_folder().symlink_to(compiled)  # only adapters have a cache of this test's own
    executor = in_process_group(settings_for(base))
    ready = executor.start()
    assert ready.adapter_pages > 0 and any("adapters: " in note for note in ready.tier_notes)
    yield executor, ExecutorDriver(executor, ready, 8), AdapterDriver(executor)
    executor.close()


def polled(executor: RankGroup) -> list[TransferResult]:
    """What lanes have answered within half a second."""
    message = executor.poll(0.5)
    return [message] if isinstance(message, TransferResult) else []


def job(row: int, slot: int | None = None, max_tokens: int = OUTPUT_LEN) -> Job:
    return Job(prompt_ids(4 + 5 * (row % 6), 200, seed=row), max_tokens, adapter_slot=slot)


def text_alone(folder: Path, row: int) -> list[int]:
    """Greedy, of a checkpoint without adapters."""
    executor = in_process_group(settings_for(folder, enable_lora=False))
    try:
        ready = executor.start()
        assert ready.adapter_pages == 0
        return ExecutorDriver(executor, ready, 8).generate([job(row)])[0]
    finally:
        executor.close()


def test_sixteen_adapters_and_none_in_one_batch_write_what_each_writes_alone_merged(
    started: Any, base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    _, steps, moves = started
    for slot, folder in enumerate(adapters):
        moves.load(ref_of(folder), slot)
    slots = [None, *range(8), None, *range(8, 16)]
    texts = steps.generate([job(row, slot) for row, slot in enumerate(slots)], chunk=7)
    for row, slot in enumerate(slots):
        folder = base if slot is None else save_merged(base, adapters[slot], tmp_path / str(slot))
        assert texts[row] == text_alone(folder, row), (row, slot)
    assert len({tuple(text) for text in texts}) == len(texts)


def test_rows_are_freed_and_bound_again_with_other_adapters(started: Any, adapters: list[Path]) -> None:
    _, steps, moves = started
    moves.load(ref_of(adapters[0]), 0)
    moves.load(ref_of(adapters[5]), 40)  # beyond --max-loras: residents may be more than one step uses
    plain, first, other = (steps.generate([job(3, slot)])[0] for slot in (None, 0, 40))
    assert plain != first != other != plain
    both = steps.generate([job(3, 40), job(3), job(3, 0), job(3, 0)], depth=1, ahead=True)
    assert both == [other, plain, first, first]
    assert steps.generate([job(3)])[0] == plain


def test_pages_and_slots_are_used_again(started: Any, adapters: list[Path]) -> None:
    _, steps, moves = started
    refs = [ref_of(adapters[0]), ref_of(adapters[6])]
    pages = max(moves.load(ref, slot) for slot, ref in enumerate(refs))
    texts = [steps.generate([job(2, slot)])[0] for slot in (0, 1)]
    own = range(pages)
    for ref, text in ((refs[1], texts[1]), (refs[0], texts[0])):
        assert moves.place(ref, slot=0, pages=own)[0].failure is None
        assert steps.generate([job(2, 0)])[0] == text


def test_what_was_dropped_must_be_fetched_again(started: Any, adapters: list[Path]) -> None:
    _, _, moves = started
    ref = ref_of(adapters[1])
    taken = moves.fetch(ref)[0].pages
    assert taken > 0 and moves.fetch(ref)[0].pages == taken
    assert moves.drop(ref)[0].failure is None
    (placed,) = moves.place(ref, slot=0, pages=range(taken))
    assert placed.failure == Failure("internal", "adapter 1 is not in host memory")
    assert moves.drop(ref)[0].failure is None
    moves.load(ref, 0)


def test_steps_go_on_unchanged_while_other_adapters_come_and_go(started: Any, adapters: list[Path]) -> None:
    """Moves into other slots and pages run beside the steps, and tables grow under them."""
    executor, steps, moves = started
    pages = moves.load(ref_of(adapters[8]), 0) + moves.load(ref_of(adapters[9]), 1)
    jobs = [(row, (0, 1, None)[row % 3]) for row in range(6)]
    before = steps.generate([job(row, slot, 40) for row, slot in jobs])
    others = [ref_of(folder) for folder in adapters[10:16]]
    needs = [moves.fetch(ref)[0].pages for ref in others]
    tickets = 1000
    for place in range(60):
        number = place % len(others)
        move = PlaceAdapter(
            ticket=tickets + place,
            adapter=others[number],
            slot=2 + place,
            pages=list(range(pages, pages + needs[number])),
        )
        executor.transfer(move)
    during = steps.generate([job(row, slot, 40) for row, slot in jobs])
    assert during == before
    done = steps.transferred
    deadline_s = time.monotonic() + 60
    while len(done) < 60 and time.monotonic() < deadline_s:
        done += polled(executor)
    assert [(answer.ticket, error_of(answer)) for answer in done] == [(tickets + place, None) for place in range(60)]
    assert steps.generate([job(row, slot, 40) for row, slot in jobs]) == before


def test_what_is_at_hand_does_not_wait_for_what_is_far(
    started: Any, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources that hang hold up neither a folder nor a third source."""
    executor, _, moves = started
    go_on = threading.Event()
    whole = adapter_source._copy_files

    def slow(source: str, *rest: Any) -> None:
        assert "slow" not in source or go_on.wait(60)
        whole(source.removesuffix("?slow"), *rest)

    monkeypatch.setattr(adapter_source, "_copy_files", slow)
    far = [
        AdapterRef(name=str(n), digest=adapter_digest(adapters[n]), source=f"file://{adapters[n]}{'?slow' * (n < 2)}")
        for n in range(3)
    ]
    for n in range(3):
        executor.transfer(FetchAdapter(ticket=3000 + n, adapter=far[n]))
    moves.load(ref_of(adapters[3]), 0)
    done = {answer.ticket: error_of(answer) for answer in moves.others}
    deadline_s = time.monotonic() + 60
    while 3002 not in done and time.monotonic() < deadline_s:
        done |= {answer.ticket: error_of(answer) for answer in polled(executor)}
    assert done == {3002: None}
    go_on.set()
    while len(done) < 3 and time.monotonic() < deadline_s:
        done |= {answer.ticket: error_of(answer) for answer in polled(executor)}
    assert done == {3000: None, 3001: None, 3002: None}


def broken(adapter: Path, folder: Path, what: str) -> AdapterRef:
    """A copy with one fault; its reference was taken before."""
    shutil.copytree(adapter, folder)
    ref = ref_of(folder)
    weights = folder / WEIGHT_FILE
    data = bytearray(weights.read_bytes())
    if what == "truncated":
        weights.write_bytes(data[:-7])
    elif what == "flipped byte":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif what == "NaN":
        data[-4:] = b"\xff\xff\xff\x7f"
        weights.write_bytes(data)
    elif what == "huge header":
        weights.write_bytes(b"\xff\xff\xff\xff\x00\x00\x00\x00" + data[8:])
    elif what == "other alpha":
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 5}))
    else:
        assert what == "gone"
        shutil.rmtree(folder)
    return ref


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", "its header names"),
        ("flipped byte", "has changed"),
        ("NaN", "NaN or infinity"),
        ("huge header", "claims a header"),
        ("other alpha", "has changed"),
        ("gone", "is not a folder"),
    ],
)
def test_content_that_is_not_what_was_listed_is_refused_and_others_go_on(
    started: Any, adapters: list[Path], tmp_path: Path, what: str, words: str
) -> None:
    _, steps, moves = started
    moves.load(ref_of(adapters[0]), 0)
    before = steps.generate([job(1, 0)])[0]
    ref = broken(adapters[4], tmp_path / "adapter", what)
    (fetched,) = moves.fetch(ref)
    assert fetched.failure is not None and words in fetched.failure.message and fetched.pages == 0
    assert fetched.failure.kind == "source", "no fault of a request's: it asks for what was listed when it came"
    assert what == "gone" or str(tmp_path) not in fetched.failure.message
    (placed,) = moves.place(ref, slot=1, pages=range(50))
    assert placed.failure is not None, "a refused adapter leaves nothing to be placed"
    assert steps.generate([job(1, 0)])[0] == before


def test_a_higher_rank_than_configured_is_refused(base: Path, adapters: list[Path]) -> None:
    executor = in_process_group(settings_for(base, max_lora_rank=8))
    executor.start()
    try:
        (fetched,) = AdapterDriver(executor).fetch(ref_of(adapters[2]))
        assert fetched.failure is not None and "is of rank 16, --max-lora-rank is 8" in fetched.failure.message
        assert fetched.failure.kind == "content", "it is what was asked for, and no later try will help"
    finally:
        executor.close()


def test_a_remote_adapter_whose_cache_was_changed_is_fetched_anew(
    started: Any, adapters: list[Path], tmp_path: Path
) -> None:
    _, _, moves = started
    ref = AdapterRef(name="far", digest=adapter_digest(adapters[0]), source=f"file://{adapters[0]}")
    moves.load(ref, 0)
    moves.drop(ref)
    cached = tmp_path / "cache" / "tandem" / "adapters" / ref.digest / WEIGHT_FILE
    cached.write_bytes(cached.read_bytes()[:-4] + b"\0\0\0\0")
    assert "has changed" in (error_of(moves.fetch(ref)[0]) or "")
    moves.load(ref, 0)


def test_memory_is_as_asked_and_kv_gets_the_rest(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 4 * 96 * 4
    for size, pages in ((page_bytes, 1), (10 * page_bytes + 5, 10)):
        executor = in_process_group(settings_for(base, memory_bytes=size))
        assert executor.start().adapter_pages == pages
        executor.close()
    for size in (page_bytes - 1, 2**50):
        with pytest.raises(SettingsError) as refused:
            in_process_group(settings_for(base, memory_bytes=size)).start()
        assert refused.value.flag == "--lora-memory-bytes"
    monkeypatch.setattr("tandem.workers.rank.loading.available_bytes", lambda: 2**26)
    blocks = []
    for lora in ({"enable_lora": False}, {"memory_bytes": 2**25}):
        settings = settings_for(base, **lora)
        executor = in_process_group(
            EngineSettings(
                model=settings.model,
                cache=CacheSettings(block_size=8),
                scheduler=SchedulerSettings(max_num_seqs=500),
                device=settings.device,
                lora=settings.lora,
            )
        )
        blocks.append(executor.start().num_blocks)
        executor.close()
    assert blocks[1] == pytest.approx(blocks[0] / 2, rel=0.01)


def test_without_adapters_nothing_is_attached(base: Path) -> None:
    executor = in_process_group(settings_for(base, enable_lora=False))
    executor.start()
    try:
        server = server_of(executor)
        decoder: Any = runner_of(executor)._model
        assert all(linear.lora_hook is None for linear in decoder.linears()) and not len(server._lanes)
    finally:
        executor.close()


def test_the_default_slab_holds_max_loras_adapters(base: Path, adapters: list[Path]) -> None:
    executor = in_process_group(settings_for(base, max_loras=2, max_lora_rank=64))
    ready = executor.start()
    try:
        moves = AdapterDriver(executor)
        assert 2 * moves.load(ref_of(adapters[11]), 0) == ready.adapter_pages, "rank 64 on every linear"
        room = adapter_room(executor._settings.lora, load_spec(base), Mesh(), 4)
        assert (room.num_pages, room.page_bytes) == (ready.adapter_pages, 4 * 96 * 4), "as tandem plan says"
    finally:
        executor.close()


def test_half_precision_models_take_float32_adapters_and_refuse_what_they_cannot_hold(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    settings = settings_for(base)
    model = ModelSettings(model=str(base), dtype="float16")
    executor = in_process_group(
        EngineSettings(
            model=model, cache=settings.cache, scheduler=settings.scheduler, device=settings.device, lora=settings.lora
        )
    )
    executor.start()
    try:
        moves = AdapterDriver(executor)
        moves.load(ref_of(adapters[0]), 0)
        large = save_random_adapter(base, tmp_path / "large", rank=4, size=1e6, dtype=torch.float32)
        assert "holds a number beyond torch.float16" in (error_of(moves.fetch(ref_of(large))[0]) or "")
    finally:
        executor.close()


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_beside_its_adapter_must_be_the_models_own(tied: bool, tmp_path: Path) -> None:
    """PEFT saves the base's tables along; one that was trained would be used in their place."""
    base = save_tiny_model(TinyModel("tables", "llama", {"tie_word_embeddings": tied}), tmp_path)
    adapter = save_random_adapter(base, tmp_path / "a", rank=4, modules=("embed_tokens", "lm_head"))
    rounded = tmp_path / "rounded"
    shutil.copytree(adapter, rounded)
    tensors = load_file(adapter / WEIGHT_FILE)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, rounded / WEIGHT_FILE)
    executor = in_process_group(settings_for(base))
    executor.start()
    try:
        moves = AdapterDriver(executor)
        moves.load(ref_of(adapter), 0)
        moves.load(ref_of(rounded), 1)
        for module in ("model.embed_tokens", "lm_head"):
            name = f"base_model.model.{module}.base_layer.weight"
            trained = tensors | {name: tensors[name] * 1.05}
            save_file(trained, adapter / WEIGHT_FILE)
            error = error_of(moves.fetch(ref_of(adapter))[0])
            assert error == f"tensor {name} is not this model's table: the adapter changes its base"
            save_file(tensors | {name: tensors[name][:-1].clone()}, adapter / WEIGHT_FILE)
            assert "[202, 64], the model's table [203, 64]" in (error_of(moves.fetch(ref_of(adapter))[0]) or "")
    finally:
        executor.close()
