"""A whole start of a group of one, the GPU's platform over the host's memory: captures are made before it is ready,
none later, whatever is asked; the start says them, and metrics count replays."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.parallel.mesh import Mesh
from tandem.workers.build import model_facts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.planning.budget import MIB
from tandem.workers.planning.graph_room import (
    CHUNK_BUCKETS,
    DECODE_BUCKETS,
    GuessSize,
    capture_bytes,
    capture_sizes,
    graph_bytes,
    guess_sizes,
)
from tandem.workers.planning.resolve import kv_groups, read_spec
from tandem.workers.platforms.base import DeviceMemory
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.captured.guess_replays import GuessMemory, GuessStep
from tandem.workers.rank.start import captures, guess_captures
from tests.support.draft_models import random_medusa
from tests.support.engine_ranks import Told
from tests.support.free_drafts import free_drafts
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import recorded


def test_nothing_is_captured_after_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(captures, "PROGRESS_S", 0.0)
    caplog.set_level("INFO", captures.__name__)
    made: list[int] = []

    def capture(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        made.append(1)
        if len(made) == 2:
            raise RuntimeError("not in a capture")
        return recorded(body)

    platform = replaced(GpuOnHost(HostAccelerator(), capture), memory=lambda: DeviceMemory(900 * MIB, 1024 * MIB))
    monkeypatch.setattr("tandem.workers.rank.rank_server.open_platform", lambda *_: platform)
    settings = EngineSettings(
        model=ModelSettings(model=str(DEMO_MODEL), dtype="float32", max_model_len=400),
        cache=CacheSettings(num_blocks=60),
        scheduler=SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=64),
    )
    group, told = in_process_group(settings), Told()
    try:
        ready = group.start()
        (line,) = [note for note in ready.tier_notes if note.startswith("graphs: ")]
        assert line.startswith("graphs: 13 in ") and "; 1 could not be captured" in line and "not in a capture" in line
        assert caplog.text.count(" of 10 steps captured in ") == 10
        engine, at_start = build_engine(settings, model_facts(settings, ready), group, ready, told), len(made)
        assert at_start == 14, "1, 2, 4, 8 tokens, and 64 with chunks, by tables of 16 and of 29 blocks; four draws"
        for number, length in enumerate((1, 3, 17, 40, 100, 130, 5, 64)):
            sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=number % 2, seed=number)
            prompt = [3 + (7 * number + 5 * k) % 700 for k in range(length)]
            engine.add_request(GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work():
            engine.turn(0.0)
        stats = engine.stats()
        assert stats.captures == {"made": 13, "failed": 1} and len(made) == at_start
        assert stats.launches["replayed"] >= 8
        assert sum(stats.launches.values()) == stats.steps
        assert all(len(tokens) == 12 for tokens in told.tokens.values()) and len(told.tokens) == 8
    finally:
        group.close()


def test_passes_of_a_drafter_are_captured_at_the_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start counts them with steps, and the pool leaves the bytes that they keep and take."""
    monkeypatch.setattr(guess_captures, "PROGRESS_S", 0.0)
    caplog.set_level("INFO", guess_captures.__name__)
    made, frames, shared, frame_of = list[int](), dict[GuessSize, int](), set[int](), GuessStep.__init__

    def noted(step: GuessStep, parts: Any, size: GuessSize, memory: GuessMemory) -> None:
        frame_of(step, parts, size, memory)
        frames[size] = step._frame.nbytes
        shared.add(sum(part.nbytes for part in memory))

    def capture(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        made.append(1)
        return recorded(body)

    platform = replaced(GpuOnHost(HostAccelerator(), capture), memory=lambda: DeviceMemory(900 * MIB, 1024 * MIB))
    monkeypatch.setattr("tandem.workers.rank.rank_server.open_platform", lambda *_: platform)
    monkeypatch.setattr(GuessStep, "__init__", noted)
    settings = EngineSettings(
        model=ModelSettings(
            model=str(DEMO_MODEL),
            dtype="float32",
            max_model_len=200,
            draft=ModelSettings(model=str(random_medusa(tmp_path / "medusa")), dtype="float32"),
        ),
        cache=CacheSettings(num_blocks=60),
        scheduler=SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=16),
        speculative=SpeculativeSettings(method="medusa", num_speculative_tokens=3),
    )
    model = msgspec.structs.replace(settings.model, draft=None)
    ngrams = SpeculativeSettings(method="ngram", num_speculative_tokens=3)
    alone, spec = msgspec.structs.replace(settings, model=model, speculative=ngrams), read_spec(settings)
    more = graph_bytes(spec, Mesh(), settings, 4, 200) - graph_bytes(spec, Mesh(), alone, 4, 200)
    group, told = in_process_group(settings), Told()
    try:
        ready = group.start()
        engine, at_start = build_engine(settings, model_facts(settings, ready), group, ready, told), len(made)
        sizes = guess_sizes(2, 3, 14, reads_along=True)
        assert [size[:2] for size in sizes] == [(rows, places) for rows in (1, 2) for places in range(4)]
        assert {size[:3] for size in frames} == {size[:3] for size in sizes}
        assert all(kept <= capture_bytes(size.frame, kv_groups(settings, spec, 200)) for size, kept in frames.items())
        assert more > sum(frames.values()) + max(shared) + 3 * 2 * spec.vocab_size * 4, "and logits of two rows"
        assert engine.stats().captures == {"made": at_start, "failed": 0} and at_start > 2 * len(sizes)
        assert "one by one" not in caplog.text
        assert "capturing passes of medusa, of 8 sizes" in caplog.text and "7 of 8 sizes captured" in caplog.text
        with free_drafts():
            for number in range(3):
                sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=number % 2, seed=number)
                prompt = [3 + 7 * number + k for k in range(3 + 9 * number)]
                request = GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
                engine.add_request(request)
            while engine.has_work():
                engine.turn(0.0)
        drafts = engine.stats().drafts
        assert len(made) == at_start and drafts is not None and drafts.num_draft_tokens > 0
        assert all(len(tokens) == 12 for tokens in told.tokens.values()) and len(told.tokens) == 3
    finally:
        group.close()


def test_what_a_start_captures_covers_decode_steps_of_all_rows_and_small_chunks() -> None:
    def sizes(drafts: int = 0, *, chunks: bool = False, **scheduler: int) -> list[tuple[int, int]]:
        settings = EngineSettings(
            model=ModelSettings(model="m"),
            scheduler=SchedulerSettings(**scheduler),
            speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=drafts) if drafts else None,
        )
        found = capture_sizes(settings, 400, lambda blocks, chunks: blocks if blocks < 29 else None)
        assert all(one.num_rows >= min(one.num_tokens, settings.scheduler.max_num_seqs) for one in found)
        return [one[:2] for one in found if one.has_chunks == chunks]

    assert sizes(max_num_seqs=5) == [(1, 16), (2, 16), (4, 16), (8, 16)]
    assert sizes(max_num_seqs=5, max_num_batched_tokens=2) == [(1, 16), (2, 16)]
    assert [tokens for tokens, _ in sizes(max_num_seqs=1000)] == list(DECODE_BUCKETS)
    assert sizes(4, max_num_seqs=52)[-1] == (288, 16), "260 tokens: 52 rows with four drafts each"
    assert [tokens for tokens, _ in sizes(chunks=True, max_num_seqs=5)] == list(CHUNK_BUCKETS)
    assert sizes(chunks=True, max_num_seqs=5, max_num_batched_tokens=100) == [(64, 16), (128, 16)]


def test_padding_is_less_than_eight_tokens_or_a_fifth_of_a_decode_step() -> None:
    assert all(after - before <= max(8, after // 5) for before, after in pairwise(DECODE_BUCKETS[:-2]))
