"""RankServer is one rank: messages of the coordinator in, the rank's messages out. run_rank() is its life as a process.

A rank process connects to its coordinator (workers/executor/rank_group.py) and blocks in receive between plans, so an
idle rank uses no CPU. workers/executor/in_process_ranks.py calls the same RankServer on the caller's thread. A rank
never decides what to run and never talks to another rank except through torch.distributed. Next: model_runner.py.
"""

import gc
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import setproctitle
import torch
import zmq

from tandem.configs.errors import SettingsError
from tandem.configs.limits import listen
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.groups import init_parallel, use_interface
from tandem.workers.messages.channel import ChannelContext, dealer_to
from tandem.workers.messages.handshake import (
    AllocateKV,
    FindModel,
    FromRank,
    Hello,
    RankFailed,
    RankFetching,
    RankFound,
    RankListening,
    RankLoading,
    RankReady,
    RankSetup,
    RankTiers,
    Shutdown,
    ToLanes,
    ToRank,
)
from tandem.workers.messages.step import AskActivity, CountExperts, ExpertTokens, RankActivity, StepPlan
from tandem.workers.messages.transfer import TransferResult
from tandem.workers.planning.model_source import model_here, named_node
from tandem.workers.planning.resolve import read_spec
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.core_share import CoreShare
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.launched_steps import StepHandle
from tandem.workers.rank.loading import LoadedRank, load_rank
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.rank_watch import HostActivity, LoadReports, ParentWatch, start_echo
from tandem.workers.rank.transfers.lanes import Lanes

log = logging.getLogger(__name__)

FAILURE_LINGER_MS = 1000
TOLD_TO_END = 128 + signal.SIGTERM
"""The exit status of a rank that has got ToldToEnd."""
LOOK_AGAIN_S = 2e-5
"""Between two looks at the device and at the channel, while a step is computed beside the host; Linux adds up to 50 us
to a sleep. A result is late by as much."""
LOOPBACK = "127.0.0.1"
SHARED_DEVICE = "Duplicate GPU detected"
"""NCCL's word for ranks of one group on one device."""
LOOPBACK_PREFIX = "127."


def _stay_unnamed(place: str) -> None:
    """The process has a name of its own."""


class RankServer:
    """One rank, whatever carries its messages. Messages come in the order of the handshake (rank_group.py), then plans
    and transfers; transfers from any thread, all others from one.

    on_loading, on_transferred: called with messages that no call of take() waits for: progress while weights are read;
    on a thread of its own, progress while they are downloaded, and results of transfers. on_placed: called with the
    rank's place, such as "tp0 pp1", once it is known. host: this machine's address as other ranks reach it; ranks with
    equal hosts share a machine. gpu: the GPU that was given to it alone (open_platform). cores: of a rank that is a
    process of its own, whose coordinator would miss a thread that stands still (rank_watch.py); closed with it.
    """

    def __init__(
        self,
        rank: int,
        on_loading: Callable[[RankLoading], None],
        on_transferred: Callable[[TransferResult | RankFetching], None],
        *,
        host: str = LOOPBACK,
        gpu: str | None = None,
        on_placed: Callable[[str], None] = _stay_unnamed,
        cores: CoreShare | None = None,
    ) -> None:
        self._cores = cores
        self.hello = Hello(rank, os.getpid(), host)
        self._rank = rank
        self._host = host
        self._gpu = gpu
        self._on_loading = on_loading
        self._on_placed = on_placed
        self._on_transferred = on_transferred
        self._lanes = Lanes(rank, on_transferred)
        self._model: ModelSettings | None = None
        self._loaded: LoadedRank | None = None
        self._runner: ModelRunner | None = None
        self._steps: deque[StepHandle] = deque()
        self._activity = HostActivity()
        self._is_launching = False

    def take(self, message: ToRank) -> Iterator[FromRank]:
        """Yields the answers to a message, while it is carried out. Results of transfers come through on_transferred.

        SettingsError when the settings cannot be served; any other error ends the rank too.
        """
        if isinstance(message, StepPlan):
            yield from self._step(message)
        elif isinstance(message, CountExperts):
            yield from self._count_experts()
        elif isinstance(message, FindModel):
            yield self._find(message)
        elif isinstance(message, RankSetup):
            yield from self._load(message)
        elif isinstance(message, AllocateKV):
            yield self._allocate(message)
        elif isinstance(message, AskActivity):
            yield self._answer(message)
        elif isinstance(message, Shutdown):
            self.close()
        else:
            self._lanes.put(message)

    def close(self) -> None:
        """Ends the lanes after their present copies, drops the model and the KV. Idempotent."""
        self._lanes.close()
        self._drop_runner()
        if self._cores is not None:
            self._cores.close()

    # ---- handshake ----

    def _find(self, order: FindModel) -> RankFound:
        """Finds the model on this machine before ranks wait for each other: a download may take an hour."""
        model = msgspec.msgpack.decode(order.model, type=ModelSettings)
        with named_node(self._host):
            self._model = model_here(
                model, on_bytes=lambda done, total: self._on_transferred(RankFetching(self._rank, done, total))
            )
        return RankFound(self._rank)

    def _load(self, setup: RankSetup) -> Iterator[FromRank]:
        """Answers RankSetup: RankListening (rank 0 of several), then RankLoaded; RankLoading goes to on_loading."""
        settings = msgspec.msgpack.decode(setup.settings, type=EngineSettings)
        if self._model is not None:
            settings = msgspec.structs.replace(settings, model=self._model)
        read_spec(settings)  # refused settings are found before ranks wait for each other
        on_bytes = LoadReports(self._rank, self._on_loading).take
        platform = open_platform(settings, self._rank, setup.ranks_on_node, self._gpu, self._cores)
        context = ParallelContext.single()
        if setup.world_size > 1:
            context = yield from self._meet(setup, settings, platform)
        self._on_placed(f"tp{context.tp_rank} pp{context.pp_rank}")
        self._loaded = load_rank(
            settings, context, platform, rank=self._rank, ranks_on_node=setup.ranks_on_node, on_bytes=on_bytes
        )
        yield self._loaded.facts

    def _meet(
        self, setup: RankSetup, settings: EngineSettings, platform: Platform
    ) -> Generator[FromRank, None, ParallelContext]:
        """Joins the other ranks. Rank 0 first listens, at the rendezvous address, and reports its port."""
        on_loopback = setup.master_address.startswith(LOOPBACK_PREFIX)
        interface = _interface_of(setup.master_address if on_loopback else self._host)
        if interface is not None:
            use_interface(interface)
        listener, port = None, setup.master_port
        if port is None:
            assert self._rank == 0, self._rank
            listener = listen(setup.master_address, settings.parallel.ports)
            port = listener.getsockname()[1]
            yield RankListening(self._rank, port)
        try:
            return init_parallel(
                self._rank,
                setup.world_size,
                settings.parallel.tensor_parallel_size,
                settings.parallel.pipeline_parallel_size,
                setup.master_address,
                port,
                platform.backend,
                listener=listener,
                spins=lambda: platform.has_core,
                expert_parallel=settings.parallel.enable_expert_parallel,
            )
        except torch.distributed.DistBackendError as error:
            if SHARED_DEVICE not in str(error):
                raise
            sizes = f"{setup.world_size} ranks need a GPU each, and two have got the same one"
            is_wide = settings.parallel.tensor_parallel_size > 1
            flag = "--tensor-parallel-size" if is_wide else "--pipeline-parallel-size"
            raise SettingsError(sizes, flag) from error

    def _allocate(self, allocate: AllocateKV) -> RankReady:
        assert self._loaded is not None, "AllocateKV before RankSetup"
        loaded = self._loaded
        self._runner = loaded.build_runner(allocate.num_blocks)
        loaded.open_adapter_lanes(self._lanes)
        loaded.open_grammar_lanes(self._lanes, now=self._cores is not None)
        tiers_error, has_earlier = None, True
        if allocate.tiers is not None:
            tiers_error, has_earlier = self._open_tiers(loaded, self._runner, allocate.tiers)
        return RankReady(self._rank, tiers_error, self._runner.captures, has_earlier)

    def _open_tiers(self, loaded: LoadedRank, runner: ModelRunner, tiers: RankTiers) -> tuple[str | None, bool]:
        """Opens the lanes between tiers; returns an error if their memory cannot be allocated, and has_earlier."""
        from tandem.offload.host.host_messages import HostTierError

        try:
            return None, loaded.open_kv_lanes(runner, tiers, self._lanes)
        except (OSError, HostTierError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}", False

    # ---- steps ----

    @property
    def is_computing(self) -> bool:
        """True if results of launched steps are due."""
        return bool(self._steps)

    def finish_step(self) -> Iterator[FromRank]:
        """Waits for the oldest launched step; yields its result where this rank samples."""
        with self._runner_of_step():
            result = self._steps.popleft().result()
        if result is not None:
            yield result

    def _step(self, plan: StepPlan) -> Iterator[FromRank]:
        """Launches a plan. Results that are done are yielded before and after."""
        yield from self.done_steps()
        self._is_launching = True
        with self._runner_of_step() as runner:
            self._steps.append(runner.launch(plan))
        self._is_launching = False
        yield from self.done_steps()

    def _answer(self, question: AskActivity) -> RankActivity:
        """Answers beside the step. Without a step to launch, its process works on none."""
        loaded = self._loaded
        is_exchanging = loaded is not None and loaded.context.tp.is_exchanging
        computes = self._activity.computes(is_exchanging) and self._is_launching
        return RankActivity(
            rank=self._rank, number=question.number, computes=computes, waits_for_device=self.is_computing
        )

    def _count_experts(self) -> Iterator[ExpertTokens]:
        """Ranks of a stage route alike, so its first one speaks for all. Waits until the device has run what it has."""
        assert self._loaded is not None, "a question before AllocateKV, or after a step that failed"
        if self._loaded.context.tp_rank == 0:
            loads = self._loaded.decoder.expert_loads
            yield ExpertTokens({layer: loads_E.tolist() for layer, loads_E in loads.items()})

    def done_steps(self) -> Iterator[FromRank]:
        """Yields the results of launched steps that the device has run."""
        while self._steps and self._steps[0].is_done():
            yield from self.finish_step()

    @contextmanager
    def _runner_of_step(self) -> Iterator[ModelRunner]:
        """The runner, which is dropped after an error, also when interrupted in the middle: the rows' state is
        unknown."""
        assert self._runner is not None, "a plan before AllocateKV, or after a step that failed"
        try:
            yield self._runner
        except BaseException:
            self._drop_runner()
            raise

    def _drop_runner(self) -> None:
        self._steps.clear()
        if self._runner is not None:
            self._runner.close()
        elif self._loaded is not None:
            self._loaded.decoder.close()
        self._runner = self._loaded = None


class ToldToEnd(BaseException):
    """Raised in a rank's main thread by the signal handler of whoever runs it."""


def run_rank(
    rank: int, endpoint: str, secret: str, *, group: str = "local", host: str = LOOPBACK, gpu: str | None = None
) -> int:
    """Runs a rank process until Shutdown; returns the exit status: 0 after Shutdown, 1 after a failure, TOLD_TO_END.

    host, gpu: as of a RankServer. Ends the process by itself when the coordinator is gone.
    """
    from tandem.workers.rank.transfers.lane_channel import LaneChannel

    setproctitle.setproctitle(f"tandem rank {group} {rank} starting")
    log.info("rank %d of group %s starts in process %d", rank, group, os.getpid())
    context = ChannelContext()
    socket = dealer_to(context, secret, endpoint, str(rank).encode(), heeds_silence=True)
    parent_watch = ParentWatch(socket, endpoint)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromRank) -> None:
        socket.send(encoder.encode(message))

    lane_channel = LaneChannel(context, secret, endpoint, rank)
    server = RankServer(
        rank,
        send,
        lane_channel.send,
        host=host,
        gpu=gpu,
        cores=CoreShare(),
        on_placed=lambda place: setproctitle.setproctitle(f"tandem rank {group} {place}"),
    )

    def answer_beside_steps(message: ToLanes) -> None:
        for answer in server.take(message):
            lane_channel.send(answer)

    try:
        lane_channel.serve(answer_beside_steps)
        send(server.hello)
        for message in _messages(socket, server, send):
            if isinstance(message, RankSetup) and message.probe_endpoint is not None:
                start_echo(context, secret, message.probe_endpoint, rank)
            for answer in server.take(message):
                if isinstance(answer, RankReady):  # from then on the coordinator can send to the lanes
                    _freeze()
                    lane_channel.send(answer)
                else:
                    send(answer)
        log.info("rank %d ends, as its coordinator asked", rank)
        return 0
    except ToldToEnd:  # its coordinator learns it before the other ranks miss this one
        log.warning("rank %d was told to end by a signal", rank)
        send(RankFailed(rank=rank, message="it was told to end", by_step=False, is_planned=True))
        return TOLD_TO_END
    except Exception as error:
        send(_failure_of(rank, error))
        return 1
    finally:
        server.close()
        parent_watch.stop()
        socket.close(linger=FAILURE_LINGER_MS)
        context.term()


def _messages(socket: zmq.Socket[Any], server: RankServer, send: Callable[[FromRank], None]) -> Iterator[ToRank]:
    """The coordinator's messages, up to Shutdown; blocks for each. While the device computes a step, messages are taken
    as they come, so that the next step is launched beside it."""
    decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
    message: ToRank | None = None
    while not isinstance(message, Shutdown):
        while server.is_computing and not socket.poll(0):
            for answer in server.done_steps():
                send(answer)
            if server.is_computing:
                time.sleep(LOOK_AGAIN_S)
        message = decoder.decode(socket.recv())
        yield message


def _interface_of(address: str) -> str | None:
    """The network interface that has an address: lo for 127.0.0.1 on Linux, lo0 on macOS."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _freeze() -> None:
    """Keeps what exists, which lives as long as the rank, out of later collections: no step waits for one of it."""
    gc.collect()
    gc.freeze()


def _failure_of(rank: int, error: Exception) -> RankFailed:
    """A SettingsError always names a flag; whoever started the group prints it, with what to change. The user cannot
    mend other errors, which are logged."""
    if isinstance(error, SettingsError):
        return RankFailed(rank=rank, message=str(error), flag=error.flag or "MODEL")
    log.error("rank %d failed", rank, exc_info=error)
    return RankFailed(rank=rank, message=f"{type(error).__name__}: {error}")
