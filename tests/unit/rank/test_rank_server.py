"""RankServer by itself, and behind an executor in this process: the handshake, plans, what a step that fails leaves."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from tandem.configs.errors import SettingsError
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tandem.workers.executor.in_process_ranks import InProcessRank, in_process_group
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.handshake import (
    AllocateKV,
    FromRank,
    RankListening,
    RankLoaded,
    RankLoading,
    RankReady,
    RankSetup,
    Shutdown,
)
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan, StepResult
from tandem.workers.messages.transfer import DropAdapter, TransferResult
from tandem.workers.models.decoder import Decoder
from tandem.workers.rank import rank_server
from tandem.workers.rank.launched_steps import StepHandle
from tandem.workers.rank.rank_server import RankServer
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.in_process import runner_of, server_of
from tests.support.tiny_models import BY_NAME, save_tiny_model

ADAPTER = AdapterRef(name="a", digest="d", source="s")


@pytest.fixture(scope="module", autouse=True)
def same_threads() -> Iterator[None]:
    """A rank sets this process's thread count."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


def settings_for(folder: Path, enable_lora: bool = False) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"),
        cache=CacheSettings(num_blocks=16, block_size=4),
        scheduler=SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=40),
        device=DeviceSettings(device="cpu", cpu_threads=1),
        lora=LoraSettings(enable_lora=enable_lora, max_loras=1, max_lora_rank=8),
    )


def plan(step_id: int) -> StepPlan:
    init = RowInit(row=0, token_ids=[1, 2], prompt_len=2, num_computed=0, sampling=RowSampling(temperature=0.0))
    work = RowWork(row=0, num_tokens=2, samples=True, new_block_ids=[0])
    return StepPlan(step_id=step_id, work=[work], new_rows=[init])


def test_a_rank_answers_each_message_of_its_life(folder: Path) -> None:
    said: queue.SimpleQueue[FromRank] = queue.SimpleQueue()
    places: list[str] = []
    server = RankServer(0, said.put, said.put, on_placed=places.append)
    assert (server.hello.rank, server.hello.pid) == (0, os.getpid())
    setup = RankSetup(
        settings=msgspec.msgpack.encode(settings_for(folder, enable_lora=True)),
        world_size=1,
        master_address="127.0.0.1",
        master_port=None,
        ranks_on_node=1,
    )
    (loaded,) = server.take(setup)
    assert isinstance(loaded, RankLoaded) and loaded.num_blocks == 16 and places == ["tp0 pp0"]
    progress = [said.get() for _ in range(said.qsize())]
    assert all(isinstance(one, RankLoading) and not isinstance(one, RankListening) for one in progress)
    last = progress[-1]
    assert isinstance(last, RankLoading) and last.loaded_bytes == last.total_bytes > 0
    assert not len(server._lanes)
    assert list(server.take(AllocateKV(16))) == [RankReady(0)] and len(server._lanes) == 5
    assert list(server.take(DropAdapter(ticket=7, adapter=ADAPTER))) == []
    answer = said.get(timeout=60)
    assert isinstance(answer, TransferResult) and (answer.ticket, answer.failure) == (7, None)
    (result,) = server.take(plan(1))
    assert isinstance(result, StepResult) and result.step_id == 1 and len(result.rows[0].token_ids) == 1
    assert list(server.take(Shutdown())) == [] and not len(server._lanes)
    server.close()


def test_a_rank_that_ends_before_it_has_kv_closes_its_decoder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Decoder] = []
    monkeypatch.setattr(Decoder, "close", lambda decoder: closed.append(decoder))
    server = RankServer(0, lambda _: None, lambda _: None)
    settings = msgspec.msgpack.encode(settings_for(folder))
    setup = RankSetup(settings=settings, world_size=1, master_address="127.0.0.1", master_port=None, ranks_on_node=1)
    list(server.take(setup))
    list(server.take(Shutdown()))
    assert len(closed) == 1


@pytest.mark.parametrize("said", ["Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60", "no route"])
def test_ranks_that_share_a_gpu_are_told_which_flag_is_too_large(
    folder: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError(f"NCCL error in: NCCLUtils.cpp:93, invalid usage\n{said}")

    monkeypatch.setattr(rank_server, "init_parallel", refuse)
    settings = msgspec.structs.replace(settings_for(folder), parallel=ParallelSettings(tensor_parallel_size=2))
    server = RankServer(1, lambda _: None, lambda _: None)
    setup = RankSetup(
        settings=msgspec.msgpack.encode(settings),
        world_size=2,
        master_address="127.0.0.1",
        master_port=1,
        ranks_on_node=2,
    )
    wanted = SettingsError if "GPU" in said else torch.distributed.DistBackendError
    with pytest.raises(wanted) as raised:
        list(server.take(setup))
    if isinstance(raised.value, SettingsError):
        assert raised.value.flag == "--tensor-parallel-size" and "2 ranks need a GPU each" in str(raised.value)


def test_one_rank_in_process_has_no_thread_and_no_socket_of_its_own(folder: Path) -> None:
    threads, sockets = set(threading.enumerate()), psutil.Process().net_connections("all")
    group = in_process_group(settings_for(folder))
    ready = group.start()
    ExecutorDriver(group, ready, 4).generate([Job([5, 6, 7], 4)])
    assert set(threading.enumerate()) <= threads and not len(server_of(group)._lanes)
    assert len(psutil.Process().net_connections("all")) <= len(sockets)
    before_s = time.process_time()
    assert group.poll(1.0) is None
    assert time.process_time() - before_s < 0.5, "it waits"
    group.close()
    group.close()


class Interrupted(deque[Any]):
    """A queue whose reader is interrupted, once, when it has taken a message from it."""

    has_interrupted = False

    def popleft(self) -> Any:
        message = super().popleft()
        if not self.has_interrupted:
            self.has_interrupted = True
            raise KeyboardInterrupt
        return message


def test_an_interrupt_between_the_queue_and_the_step_ends_the_rank(folder: Path) -> None:
    """The plan is in neither: the next one would find rows that the rank never got."""
    group = in_process_group(settings_for(folder))
    group.start()
    rank = group.launcher
    assert isinstance(rank, InProcessRank)
    rank._to_rank = Interrupted()
    group.submit(plan(1))
    group.submit(plan(2))
    with pytest.raises(KeyboardInterrupt):
        group.poll(30.0)
    for call in (lambda: group.poll(0.0), lambda: group.submit(plan(3))):
        with pytest.raises(GroupLost, match="KeyboardInterrupt"):
            call()
    group.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_a_step_that_is_interrupted_or_fails_ends_the_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    group = in_process_group(settings_for(folder))
    group.start()

    def launch(of: Any) -> StepHandle:
        raise error

    monkeypatch.setattr(runner_of(group), "launch", launch)
    group.submit(plan(1))
    group.submit(plan(2))
    with pytest.raises((KeyboardInterrupt, GroupLost)) as raised:
        group.poll(30.0)
    assert raised.value is error or raised.value.__cause__ is error
    assert server_of(group)._runner is None, "the rows' state is unknown: no memory for it"
    for _ in range(2):
        with pytest.raises(GroupLost, match=type(error).__name__):
            group.poll(0.0)
        with pytest.raises(GroupLost, match=type(error).__name__):
            group.submit(plan(3))
    group.close()
