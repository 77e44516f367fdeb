"""Ranks as real processes: TP2, PP2 and TP2 x PP2 give the tokens of one rank; deaths are noticed and nothing is
left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from tandem.configs.environment import SHARED_MEMORY
from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tandem.workers.build import model_facts
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.executor import rank_group
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.executor.local_ranks import LocalRanks, local_group
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import Ended, GenerationRequest, SamplingParams, TokenDelta
from tandem.workers.messages.step import RowSampling, RowWork, StepPlan
from tests.support.engine_invariants import check_invariants
from tests.support.executor_driver import ExecutorDriver, Job, plan_of_one_row
from tests.support.tiny_models import BY_NAME, save_tiny_model

BLOCK_SIZE = 4
GONE_S = 15.0
PATIENCE_S = 60.0
"""How long close() would wait for ranks to leave, in tests that tell leaving from being killed."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


def settings_for(folder: Path, tp: int = 1, pp: int = 1, **cache: int) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"),
        parallel=ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        cache=CacheSettings(**({"block_size": BLOCK_SIZE, "num_blocks": 96} | cache)),
        scheduler=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64),
        device=DeviceSettings(device="cpu"),
    )


def processes_of(executor: RankGroup) -> list[subprocess.Popen[bytes]]:
    """The rank processes that were started, by rank."""
    assert isinstance(executor.launcher, LocalRanks)
    return executor.launcher.processes


def jobs_for(kind: str) -> list[Job]:
    """Four rows of different lengths; `mixed` has each kind of sampling in one batch."""
    greedy = RowSampling(temperature=0.0)
    mixed = [
        RowSampling(temperature=0.9, seed=5, top_p=0.8),
        RowSampling(temperature=1.3, seed=2**63 + 9, top_k=20, min_p=0.02, choice=1),
        RowSampling(temperature=0.7, seed=1, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=3),
        greedy,
    ]
    prompts = [[3, 1, 4], list(range(10, 33)), [7], [90, 5, 90, 5, 90, 5, 90]]
    params = mixed if kind == "mixed" else [greedy] * 4
    return [Job(p, 12 - 2 * i, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]


@pytest.fixture(scope="module")
def one_rank(model_folder: Path) -> Iterator[ExecutorDriver]:
    executor = in_process_group(settings_for(model_folder))
    yield ExecutorDriver(executor, executor.start(), BLOCK_SIZE)
    executor.close()


GROUPS = [(2, 1), pytest.param((1, 2), marks=pytest.mark.parity), (2, 2)]
"""TP and PP sizes. Stages alone are what make parity adds to stages of two ranks each."""


@pytest.fixture(scope="module", params=GROUPS, ids=["tp2", "pp2", "tp2pp2"])
def group(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[tuple[RankGroup, ExecutorReady]]:
    """One group of ranks, alive for all tests below; gone with all its processes afterwards."""
    executor = local_group(settings_for(model_folder, *request.param), name="g7")
    yield executor, executor.start()
    pids = executor.rank_pids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "SHUTDOWN_S", PATIENCE_S)
        executor.close()
    executor.close()
    assert [process.returncode for process in processes_of(executor)] == [0] * len(pids), "ranks leave when asked"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize("depth", [1, 2])
def test_tp_and_pp_equal_one_rank(
    group: tuple[RankGroup, ExecutorReady], one_rank: ExecutorDriver, kind: str, depth: int
) -> None:
    """Float32, token by token; depth 2 has two steps in flight: stages overlap, or plans run ahead of results."""
    executor, ready = group
    wanted = one_rank.generate(jobs_for(kind))
    jobs = jobs_for(kind)
    assert ExecutorDriver(executor, ready, BLOCK_SIZE).generate(jobs, depth=depth, ahead=depth > 1) == wanted
    assert all(len(job.token_ids) == job.max_tokens for job in jobs)
    if kind == "mixed":
        logprobs = [entry for result in jobs[2].results for entry in result.logprobs or []]
        assert [entry.token_id for entry in logprobs] == wanted[2]
        assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in logprobs)


def test_ranks_that_share_no_memory_equal_one_rank(
    one_rank: ExecutorDriver, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several machines, in containers, and on CPUs that are not x86. `make parity` runs this whole folder so."""
    monkeypatch.setenv(SHARED_MEMORY, "0")
    wanted = one_rank.generate(jobs_for("mixed"))
    with contextlib.closing(local_group(settings_for(model_folder, 2, 1), name="g8")) as executor:
        ready = executor.start()
        assert ExecutorDriver(executor, ready, BLOCK_SIZE).generate(jobs_for("mixed"), depth=2, ahead=True) == wanted


@dataclass
class Tokens:
    """OutputSink that keeps every choice's tokens."""

    of: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.of.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None and set(ended.finish_reasons) == {"length"}, ended


def engine_tokens(
    executor: Executor, ready: ExecutorReady, settings: EngineSettings
) -> dict[tuple[str, int], list[int]]:
    """What the real engine serves for a fixed set of requests: chunked prompts, two choices, seeds, preemption."""
    sink = Tokens()
    engine = build_engine(settings, model_facts(settings, ready), executor, ready, sink)
    for i in range(6):
        sampling = SamplingParams(
            max_tokens=14, ignore_eos=True, seed=i, n=1 + i % 2, temperature=0.4 * i, top_p=0.9, presence_penalty=0.2
        )
        prompt = [3 + (7 * i + 5 * k) % 190 for k in range(1 + 15 * i)]
        engine.add_request(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    deadline_s = time.monotonic() + 60
    while engine.has_work():
        assert time.monotonic() < deadline_s
        engine.turn(0.05)
    return sink.of


def test_the_engine_serves_the_same_tokens_over_any_tp_and_pp_size(
    group: tuple[RankGroup, ExecutorReady], model_folder: Path
) -> None:
    settings = settings_for(model_folder, num_blocks=48)
    with contextlib.closing(in_process_group(settings)) as alone:
        wanted = engine_tokens(alone, alone.start(), settings)
    executor, ready = group
    assert engine_tokens(executor, ready, settings_for(model_folder)) == wanted
    assert len(wanted) == 9 and all(len(tokens) == 14 for tokens in wanted.values())


class TickingClock:
    """Seconds that a thread has waited one twentieth after the other: they stand still while the machine does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while not self._over.wait(0.05):
            self.now_s += 0.05

    def close(self) -> None:
        self._over.set()


class TimedTokens(Tokens):
    """Also the longest time, from its making on, without a token of anyone: in time that the machine let it run."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_gap_s = 0.0
        self._clock = TickingClock()
        self._last_s = 0.0

    def deltas(self, deltas: list[TokenDelta]) -> None:
        super().deltas(deltas)
        if any(delta.token_ids for delta in deltas):
            now_s = self._clock.now_s
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
            self._last_s = now_s

    def close(self) -> None:
        self._clock.close()


def growing_tokens(
    executor: Executor, ready: ExecutorReady, settings: EngineSettings
) -> tuple[TimedTokens, EngineStats]:
    """Fifty requests at once, short prompts and long answers, greedy ones and sampled ones."""
    sink = TimedTokens()
    engine = build_engine(settings, model_facts(settings, ready), executor, ready, sink)
    for i in range(50):
        sampling = SamplingParams(
            max_tokens=14 + i % 20, ignore_eos=True, seed=i, temperature=0.8 * (i % 2), top_k=3 * (i % 2)
        )
        prompt = [3 + (7 * i + 5 * k) % 190 for k in range(3 + i % 9)]
        engine.add_request(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    deadline_s = time.monotonic() + 120
    while engine.has_work():
        engine.turn(0.05)
        assert time.monotonic() < deadline_s, "it is stuck"
    sink.close()
    check_invariants(engine)
    return sink, engine.stats()


@pytest.fixture(scope="module")
def grown(model_folder: Path) -> dict[tuple[str, int], list[int]]:
    """The tokens of one rank that has room for all fifty."""
    settings = msgspec.structs.replace(
        settings_for(model_folder, num_blocks=1000),
        scheduler=SchedulerSettings(max_num_seqs=50, max_num_batched_tokens=1024),
    )
    with contextlib.closing(in_process_group(settings)) as alone:
        sink, stats = growing_tokens(alone, alone.start(), settings)
    assert stats.preemptions == 0 and [len(sink.of[str(i), 0]) for i in range(50)] == [14 + i % 20 for i in range(50)]
    return sink.of


def test_kv_01_fifty_growing_requests_on_32_blocks(
    group: tuple[RankGroup, ExecutorReady], model_folder: Path, grown: dict[tuple[str, int], list[int]]
) -> None:
    """All finish although they push each other out, none has other tokens for it, and never is it silent for 2 s."""
    executor, ready = group
    few = msgspec.structs.replace(ready, num_blocks=32)
    sink, stats = growing_tokens(executor, few, settings_for(model_folder))
    print(f"{stats.preemptions} preemptions, longest gap {sink.longest_gap_s:.3f} s")
    assert sink.of == grown
    assert stats.preemptions > 0 and stats.used_blocks == 0
    assert sink.longest_gap_s < 2.0


def test_ranks_report_pid_and_host_and_idle_without_cpu(group: tuple[RankGroup, ExecutorReady]) -> None:
    executor, ready = group
    processes = [psutil.Process(pid) for pid in executor.rank_pids]
    assert ready.rank_pids == executor.rank_pids
    tp = len(processes) // ready.pipeline_parallel_size
    titles = [process.cmdline()[0] for process in processes]
    assert titles == [f"tandem rank g7 tp{rank % tp} pp{rank // tp}" for rank in range(len(processes))]
    assert ready.threads == max(1, len(os.sched_getaffinity(0)) // len(processes))
    window_s = 1.0
    for _ in range(10):  # what a rank still puts in order is over soon; one that spins or polls never rests
        before = [sum(process.cpu_times()[:2]) for process in processes]
        threading.Event().wait(window_s)
        used_s = [sum(process.cpu_times()[:2]) - b for process, b in zip(processes, before, strict=True)]
        if max(used_s) < 0.05 * window_s:
            break
    else:
        raise AssertionError(used_s)


def test_ranks_listen_on_loopback_only(group: tuple[RankGroup, ExecutorReady]) -> None:
    """The rendezvous and gloo's own pairs: neither asks who connects."""
    executor, _ = group
    for rank, pid in enumerate(executor.rank_pids):
        sockets = psutil.Process(pid).net_connections("inet")
        listening = [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]
        assert listening or rank > 0, "rank 0 holds the rendezvous"
        assert set(listening) <= {"127.0.0.1"}, (rank, listening)
        assert {s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.raddr} <= {"127.0.0.1"}, (rank, sockets)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_a_killed_rank_is_noticed_at_once_and_nothing_is_left(model_folder: Path, victim: int) -> None:
    """kill -9 while a step waits for the victim: GroupLost at once, and close() ends the survivor."""
    with contextlib.closing(local_group(settings_for(model_folder, tp=2))) as executor:
        executor.start()
        pids = executor.rank_pids
        os.kill(pids[victim], signal.SIGSTOP)  # so that the step is surely under way
        executor.submit(plan_of_one_row())
        assert executor.poll(0.2) is None
        killed_s = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(GroupLost):
            executor.poll(30.0)
        assert time.monotonic() - killed_s < 4.0, "sooner than a missing sign of life would tell"
        with pytest.raises(GroupLost):
            executor.submit(plan_of_one_row())
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.chaos)], ids=["in step", "idle"])
def test_a_frozen_rank_is_noticed_and_killed(model_folder: Path, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SHUTDOWN_S", PATIENCE_S)
    with contextlib.closing(local_group(settings_for(model_folder, tp=2))) as executor:
        executor.start()
        pids = executor.rank_pids
        os.kill(pids[1], signal.SIGSTOP)
        stopped_s = time.monotonic()
        if busy:
            executor.submit(plan_of_one_row())
        with pytest.raises(GroupLost, match="rank 1 has given no sign of life"):
            executor.poll(30.0)
        assert time.monotonic() - stopped_s < 20.0
        with pytest.raises(GroupLost):
            executor.submit(plan_of_one_row())
        closed_s = time.monotonic()
    assert time.monotonic() - closed_s < PATIENCE_S / 2, "nobody waits for a process that is stopped"
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_step_that_cannot_be_run_ends_the_group_with_its_reason(model_folder: Path) -> None:
    with contextlib.closing(local_group(settings_for(model_folder))) as executor:
        executor.start()
        executor.submit(StepPlan(step_id=1, work=[RowWork(row=0, num_tokens=5, samples=True)]))
        with pytest.raises(GroupLost, match="rank 0: AssertionError: row 0: 5 tokens"):
            executor.poll(60.0)
        (pid,) = executor.rank_pids
    assert not psutil.pid_exists(pid)


HOLDER = """
import os, signal, sys, msgspec
from tandem.configs.schema import EngineSettings
from tests.support.executor_driver import plan_of_one_row
from tandem.workers.executor.local_ranks import local_group
executor = local_group(msgspec.json.decode(sys.argv[1], type=EngineSettings))
executor.start()
if sys.argv[2] == "in step":
    os.kill(executor.rank_pids[1], signal.SIGSTOP)
    executor.submit(plan_of_one_row())
    assert executor.poll(0.3) is None
print(*executor.rank_pids, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("where", [pytest.param("idle", marks=pytest.mark.chaos), "in step"])
def test_ranks_end_when_their_coordinator_is_killed(model_folder: Path, where: str) -> None:
    """`in step`: a rank that waits in a collective for a peer that is stopped; the peer, when it goes on."""
    settings = msgspec.json.encode(settings_for(model_folder, tp=2)).decode()
    command = [sys.executable, "-c", HOLDER, settings, where]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert holder.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
    assert len(ranks) == 2
    holder.kill()
    holder.wait()
    holder.stdout.close()
    try:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()
            rank.wait(GONE_S)
    finally:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


LONELY_RANK = """
import gc
import sys
from tandem.workers.rank.rank_server import run_rank

freeze = gc.freeze
def freeze_and_tell():
    freeze()
    print(gc.get_freeze_count(), flush=True)
gc.freeze = freeze_and_tell
sys.exit(run_rank(0, sys.argv[1], sys.argv[2]))
"""


def test_a_rank_without_a_parent_to_watch_ends_when_its_channel_is_gone(model_folder: Path) -> None:
    """As under Ray: nothing but the connection tells the rank that its coordinator is no more. What it has loaded is
    frozen before its first step: no collection walks it again."""
    launcher = Lonely()
    group = RankGroup(settings_for(model_folder), launcher)
    try:
        assert group.start().rank_pids == (launcher.rank.pid,)
        assert launcher.rank.stdout is not None and int(launcher.rank.stdout.readline()) > 100_000
        assert group._channel is not None
        group._channel.close()
        assert launcher.rank.wait(GONE_S) == 1
    finally:
        launcher.kill(0.0)


class Lonely:
    """RankLauncher of a rank without a standard input to watch."""

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        self.rank = subprocess.Popen([sys.executable, "-c", LONELY_RANK, endpoint, secret], stdout=subprocess.PIPE)

    def lost(self) -> str | None:
        return "the rank ended" if self.rank.poll() is not None else None

    def kill(self, grace_s: float) -> None:
        self.rank.kill()
        self.rank.communicate()


def start_error(settings: EngineSettings) -> SettingsError:
    """What start() refuses with; nothing may be left running."""
    executor = local_group(settings)
    with pytest.raises(SettingsError) as refused:
        executor.start()
    assert not any(psutil.pid_exists(process.pid) for process in processes_of(executor))
    return refused.value


def test_a_missing_folder_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    error = start_error(settings_for(tmp_path / "nowhere"))
    assert error.flag == "MODEL" and "nowhere" in str(error)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NovelForCausalLM"], "model_type": "novel"}))
    error = start_error(settings_for(tmp_path))
    assert isinstance(error, UnsupportedModelError) and "NovelForCausalLM" in str(error)


def test_a_tp_size_that_does_not_divide_heads_is_refused(model_folder: Path) -> None:
    error = start_error(settings_for(model_folder, tp=3))
    assert error.flag == "--tensor-parallel-size" and "3" in str(error)


def test_too_little_memory_is_refused_with_the_length_that_would_fit(model_folder: Path) -> None:
    settings = msgspec.structs.replace(
        settings_for(model_folder), cache=CacheSettings(block_size=BLOCK_SIZE, kv_cache_memory_bytes=128 * 1024)
    )
    error = start_error(settings)
    assert error.flag == "--kv-cache-memory-bytes" and "--max-model-len 128" in str(error)


def test_a_checkpoint_without_weights_is_refused_by_the_ranks(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    error = start_error(settings_for(tmp_path))
    assert "safetensors" in str(error)


def test_dummy_weights_need_no_checkpoint_and_are_equal_on_every_start(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    settings = settings_for(tmp_path)
    settings = msgspec.structs.replace(
        settings, model=ModelSettings(model=str(tmp_path), dtype="auto", load_format="dummy", max_model_len=64)
    )
    texts = []
    for _ in range(2):
        with contextlib.closing(in_process_group(settings)) as executor:
            ready = executor.start()
            texts.append(ExecutorDriver(executor, ready, BLOCK_SIZE).generate([Job([1, 2, 3], 6)]))
    assert texts[0] == texts[1]
