"""RankGroup is the Executor: one group's handshake, plans and transfers out, results in. Torch-free and Ray-free.

A RankLauncher starts and ends the ranks, a RankChannel carries the messages; rank_server.py is the other end. Start:
Hello of all -> FindModel -> RankFetching, several -> RankFound of all -> RankSetup to rank 0 -> RankListening from it
-> RankSetup to the others -> RankLoading, several -> RankLoaded of all -> AllocateKV (the least that all can hold) ->
RankReady of all. The launcher's lost() reports dead ranks, ProbeWatch (liveness.py) frozen ones, StepWatch those
without progress. Next: workers/rank/rank_server.py.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import psutil

from tandem.configs.schema import EngineSettings
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.executor.liveness import ProbeWatch
from tandem.workers.executor.rank_channel import RankChannel, SocketChannel, Unreachable
from tandem.workers.executor.step_watch import StepWatch
from tandem.workers.messages.channel import new_secret
from tandem.workers.messages.errors import GroupLost, SettingsError
from tandem.workers.messages.handshake import (
    AllocateKV,
    FindModel,
    FromRank,
    Hello,
    RankFailed,
    RankFetching,
    RankFound,
    RankListening,
    RankLoaded,
    RankLoading,
    RankReady,
    RankSetup,
    RankTiers,
    Shutdown,
    ToRank,
)
from tandem.workers.messages.step import CountExperts, ExpertTokens, RankActivity, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferOp, TransferResult
from tandem.workers.planning.start_notes import adapter_notes, graph_notes, kernel_notes, weight_notes

if TYPE_CHECKING:
    from tandem.offload.kv.tiered_store import TieredStore

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 3600.0
"""Seconds since the last progress report of a rank that loads, or downloads."""
POLL_SLICE_S = 0.03
FINAL_FAILURE_S = 0.2
SHUTDOWN_S = 3.0
LOOPBACK = "127.0.0.1"
M = TypeVar("M", Hello, RankFound, RankListening, RankLoaded, RankReady)


class RankLauncher(Protocol):
    """Starts the ranks of one group somewhere and ends them."""

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        """Starts a rank, which connects to endpoint and says Hello. Called once for each, in order."""
        ...

    def lost(self) -> str | None:
        """Returns a message about a rank that has ended, None while all live. Cheap; from any thread."""
        ...

    def kill(self, grace_s: float) -> None:
        """Ends every rank and leaves nothing of it. grace_s: seconds for ranks that were asked to leave. Idempotent."""
        ...


class RankGroup:
    """Executor over the ranks that `launcher` starts. All calls from one thread but report(), loading() and silent_s().

    channel: None for rank processes, which connect by ZeroMQ to `host`, know `secret` (None: a new one) and are probed.
    name: of the group, in the titles of its processes. most_ranks(own): the most ranks that may share a machine with
    `own` of this group, these included. on_lost(message): called once, on any thread, when a rank is reported lost
    or frozen, idle or not; submit(), transfer() and poll() raise GroupLost from then on. host_sockets(): by machine,
    the host-tier processes of all that have ranks, or None; called when all have loaded.
    """

    def __init__(
        self,
        settings: EngineSettings,
        launcher: RankLauncher,
        *,
        channel: RankChannel | None = None,
        secret: str | None = None,
        name: str = "local",
        host: str = LOOPBACK,
        most_ranks: Callable[[int], int] = lambda own: own,
        on_lost: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        host_sockets: Callable[[], Mapping[str, str] | None] = lambda: None,
    ) -> None:
        self.world_size = settings.parallel.ranks_per_group
        self.launcher = launcher
        self._settings = settings
        self._channel = channel
        self._secret = secret
        self._name = name
        self._host = host
        self._most_ranks = most_ranks
        self._on_lost = on_lost or _note
        self._host_sockets = host_sockets
        self._store: TieredStore | None = None
        self._close_tiers: Callable[[], None] = _nothing
        self._loading: dict[int, RankLoading] = {}
        self._fetching: dict[str, RankFetching] = {}
        self._probe: ProbeWatch | None = None
        self._clock = clock
        self._steps = StepWatch(self.world_size, self._broadcast if channel is None else None, clock)
        self.hellos: tuple[Hello, ...] = ()
        self._ready: list[RankReady] = []
        self._broken: GroupLost | None = None
        self._reported: str | None = None
        self._reporting = threading.Lock()
        self._is_started = False
        self._is_closed = False

    # ---- Executor ----

    def start(self) -> ExecutorReady:
        """Starts all ranks and brings them to ready. After an error nothing is left running.

        SettingsError when a rank names a flag to change, GroupLost otherwise. weight_bytes and block_bytes of the
        answer are sums over the ranks; load_s is the slowest rank's.
        """
        assert not self._is_started, "start() is called once"
        self._is_started = True
        try:
            self._launch()
            return self._shake_hands()
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan to every rank. GroupLost when a rank's connection is gone."""
        self._broadcast(plan)
        self._steps.submitted(plan)

    def count_experts(self) -> None:
        """Asks every rank for the loads of its experts. GroupLost when a rank's connection is gone."""
        self._broadcast(CountExperts())

    def transfer(self, op: TransferOp) -> None:
        """Sends an op to the lanes of all ranks. GroupLost when a rank's connection is gone."""
        self._broadcast(op)

    def poll(self, timeout_s: float) -> StepResult | TransferResult | ExpertTokens | None:
        """Returns the next message, results of steps in plan order; None after timeout_s.

        GroupLost within 0.1 s of a rank's end or failure, 6 s after a rank froze, 15 s after all ranks wait for each
        other, and when no step has finished for longer than StepBound allows.
        """
        self._raise_if_broken()
        message = self._receive(timeout_s)
        if message is None or isinstance(message, TransferResult | ExpertTokens):
            return message
        assert isinstance(message, StepResult), f"a rank sent {type(message).__name__} while steps run"
        expected = self._steps.finished().step_id
        assert message.step_id == expected, f"result of step {message.step_id}, expected {expected}"
        return message

    def close(self) -> None:
        """Asks the ranks to leave, kills those that have not after SHUTDOWN_S, or all at once after a loss. Idempotent;
        leaves no process behind."""
        if not self._is_started or self._is_closed:
            return
        with self._reporting:
            self._is_closed = True
        is_well = self._broken is None and self.lost() is None
        if is_well:
            self._shut_down()
        else:
            self._kill_ranks()
        self.launcher.kill(SHUTDOWN_S if is_well else 0.0)
        if self._channel is not None:
            self._channel.close()
        self._close_tiers()

    # ---- of a group that starts or serves ----

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before all have said hello."""
        return tuple(hello.pid for hello in self.hellos)

    def loading(self) -> tuple[int, int]:
        """Returns bytes of weights loaded, and in all, over all ranks; (0, 0) until each has reported. From any
        thread."""
        known = self._loading
        if len(known) < self.world_size:
            return 0, 0
        return sum(one.loaded_bytes for one in known.values()), sum(one.total_bytes for one in known.values())

    def fetching(self) -> str:
        """Returns what machines are downloading of the model, in words; empty when none does. From any thread."""
        parts = (
            f"{host}: {one.fetched_bytes / 2**30:.1f} of {one.total_bytes / 2**30:.1f} GiB"
            for host, one in self._fetching.items()
        )
        return ", ".join(parts)

    def silent_s(self) -> float:
        """Returns the seconds that a rank has not answered probes, 0 while there is no doubt. From any thread."""
        return 0.0 if self._probe is None else self._probe.silent_s()

    def lost(self) -> str | None:
        """Returns a message about a dead or frozen rank; None while all live. From any thread."""
        return self._reported or self.launcher.lost()

    def report(self, message: str) -> None:
        """Notes that a rank is dead or frozen and kills the ranks of this machine; the first report counts. From any
        thread."""
        with self._reporting:
            if self._is_closed or self._reported is not None:
                return
            self._reported = message
        self._kill_ranks()  # a frozen rank must neither wake up later nor hold memory that the next group needs
        self._on_lost(message)

    # ---- handshake ----

    def _launch(self) -> None:
        endpoint, secret = "", self._secret or new_secret()
        if self._channel is None:
            ports = self._settings.parallel.ports
            sockets = SocketChannel(secret, self._host, ports)
            self._channel, endpoint = sockets, sockets.endpoint
            self._probe = ProbeWatch(sockets.context, secret, self._host, self.report, ports=ports)
        for rank in range(self.world_size):
            self.launcher.start(rank, endpoint, secret)

    def _shake_hands(self) -> ExecutorReady:
        hellos = self._gather(Hello, HELLO_TIMEOUT_S, "said hello")
        self.hellos = tuple(hellos)
        self._broadcast(FindModel(msgspec.msgpack.encode(self._settings.model)))
        self._gather(RankFound, LOAD_TIMEOUT_S, "found the model")
        self._fetching = {}
        self._send_setups(hellos)
        loaded = self._gather(RankLoaded, LOAD_TIMEOUT_S, "loaded the model")
        self._fetching = {}  # news of lanes may come late
        num_blocks = min(message.num_blocks for message in loaded)
        notes = self._allocate(loaded, num_blocks)
        of_weights = weight_notes(loaded, self._settings.device.cpu_offload_gib)
        first = loaded[0]
        ready = ExecutorReady(
            num_blocks=num_blocks,
            pipeline_parallel_size=self._settings.parallel.pipeline_parallel_size,
            device=first.device,
            dtype=first.dtype,
            threads=first.threads,
            weight_bytes=sum(message.weight_bytes for message in loaded),
            block_bytes=sum(message.block_bytes for message in loaded),
            load_s=max(message.load_s for message in loaded),
            rank_pids=self.rank_pids,
            num_ranks=self.world_size,
            store=self._store,
            kernel_notes=kernel_notes(loaded),
            tier_notes=(*of_weights, *adapter_notes(loaded), *graph_notes(self._ready), *notes),
            captures=tuple(one.captures for one in self._ready if one.captures is not None),
            kv_dtype=first.kv_dtype,
            adapter_pages=min(message.adapter_pages for message in loaded),
        )
        log.info("%d rank(s) ready: %s", self.world_size, ready)
        return ready

    def _allocate(self, loaded: list[RankLoaded], num_blocks: int) -> tuple[str, ...]:
        """Allocates the KV of every rank and opens the tiers below it; returns the notes about the tiers."""
        if self._settings.cache.kv_offloading_gib is None:
            self._allocate_kv(num_blocks, [None] * self.world_size)
            return ()
        from tandem.workers.executor.tiers import free_bytes, no_tiers, open_tiers

        hosts = [hello.host for hello in self.hellos]
        free = free_bytes(loaded, hosts, num_blocks)
        tiers = open_tiers(self._settings, loaded, free, hosts, self._host_sockets())
        if isinstance(tiers, str):
            self._allocate_kv(num_blocks, [None] * self.world_size)
            return (tiers,)
        self._close_tiers = tiers.close
        ready = self._allocate_kv(num_blocks, tiers.ranks)
        errors = [f"rank {message.rank}: {message.tiers_error}" for message in ready if message.tiers_error is not None]
        if errors:
            self._close_tiers()
            return (no_tiers("; ".join(errors)),)
        self._store, notes = tiers.build(all(message.has_earlier for message in ready))
        return notes

    def _allocate_kv(self, num_blocks: int, tiers: Sequence[RankTiers | None]) -> list[RankReady]:
        """Tells every rank to allocate its KV and open its tiers; returns their answers."""
        for rank, own in enumerate(tiers):
            self._send(rank, AllocateKV(num_blocks, own))
        self._ready = self._gather(RankReady, LOAD_TIMEOUT_S, "became ready")
        return self._ready

    def _send_setups(self, hellos: list[Hello]) -> None:
        """Sends each rank its setup. The rendezvous is on the machine of rank 0, which chooses the port by binding it:
        a port chosen elsewhere could be taken before it is bound."""
        per_host = {host: self._most_ranks(own) for host, own in Counter(hello.host for hello in hellos).items()}
        address = LOOPBACK if len(per_host) == 1 else hellos[0].host
        settings = msgspec.msgpack.encode(self._settings)

        def send(hello: Hello, port: int | None) -> None:
            setup = RankSetup(
                settings=settings,
                world_size=self.world_size,
                master_address=address,
                master_port=port,
                ranks_on_node=per_host[hello.host],
                probe_endpoint=None if self._probe is None else self._probe.endpoint,
            )
            self._send(hello.rank, setup)

        send(hellos[0], None)
        if self.world_size > 1:
            (listening,) = self._gather(RankListening, HELLO_TIMEOUT_S, "opened a port for the others", ranks=(0,))
            for hello in hellos[1:]:
                send(hello, listening.port)

    def _gather(self, kind: type[M], timeout_s: float, did: str, ranks: Sequence[int] | None = None) -> list[M]:
        """One message of `kind` from every rank (or from `ranks`), in rank order. The timeout begins anew whenever a
        rank has loaded more of its weights."""
        awaited = range(self.world_size) if ranks is None else ranks
        since_s = self._clock()
        got: dict[int, M] = {}
        while len(got) < len(awaited):
            message = self._receive(since_s + timeout_s - self._clock())
            if message is None:
                missing = sorted(set(awaited) - set(got))
                raise GroupLost(f"rank(s) {missing} have not {did}, and sent nothing for {timeout_s:.0f} s")
            if isinstance(message, RankLoading | RankFetching):
                self._note_progress(message)
                since_s = self._clock()
                continue
            assert isinstance(message, kind), f"a rank sent {type(message).__name__}, expected {kind.__name__}"
            got[message.rank] = message
        return [got[rank] for rank in awaited]

    def _note_progress(self, message: RankLoading | RankFetching) -> None:
        if isinstance(message, RankLoading):
            self._loading = {**self._loading, message.rank: message}
        else:
            self._fetching = {**self._fetching, self.hellos[message.rank].host: message}

    # ---- transport ----

    def _broadcast(self, message: ToRank) -> None:
        self._raise_if_broken()
        for rank in range(self.world_size):
            self._send(rank, message)

    def _send(self, rank: int, message: ToRank) -> None:
        assert self._channel is not None, "before start()"
        try:
            self._channel.send(rank, message)
        except Unreachable as error:
            self._fail(self._final_failure() or self.lost() or f"rank {rank} is not connected: {error}")

    def _shut_down(self) -> None:
        """Asks every rank that still listens to leave. Does not wait for it."""
        assert self._channel is not None, "before start()"
        message = Shutdown()
        for rank in range(self.world_size):
            try:
                self._channel.send(rank, message)
            except Unreachable:
                log.debug("rank %d is not connected", rank)

    def _receive(self, timeout_s: float) -> FromRank | None:
        """The next message, None after timeout_s; looks for dead and stuck ranks between slices."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._poll(0.0)
            if message is None and (lost := self.lost()) is not None:
                self._fail(self._final_failure() or lost)
            if message is None:
                left_s = deadline_s - time.monotonic()
                message = self._poll(min(POLL_SLICE_S, max(0.0, left_s)))
                if message is None and (stuck := self._steps.stuck()) is not None:
                    self._fail(stuck)
                if message is None and left_s <= 0:
                    return None
            if isinstance(message, RankFailed):
                self._fail(message)
            if isinstance(message, RankActivity):
                self._steps.answered(message)
            elif message is not None:
                return message

    def _poll(self, timeout_s: float) -> FromRank | None:
        assert self._channel is not None, "before start()"
        return self._channel.receive(timeout_s)

    def _final_failure(self) -> RankFailed | None:
        """Returns the failure that a dead rank sent before its end, if any."""
        deadline_s = time.monotonic() + FINAL_FAILURE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._poll(left_s)
            if isinstance(message, RankFailed):
                return message
        return None

    def _fail(self, cause: RankFailed | str) -> None:
        """Breaks the group and raises."""
        if isinstance(cause, RankFailed):
            message = f"rank {cause.rank}: {cause.message}"
            self._broken = GroupLost(message, by_step=cause.by_step, is_planned=cause.is_planned)
            if cause.flag is not None:
                raise SettingsError(cause.message, cause.flag)
        else:
            self._broken = GroupLost(cause)
        raise self._broken

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _kill_ranks(self) -> None:
        """SIGKILL, which a stopped process obeys too, for the ranks of this machine."""
        for hello in self.hellos:
            if hello.host == self._host and hello.pid != os.getpid():
                kill_rank(hello.pid, self._name)


def kill_rank(pid: int, group: str) -> None:
    """Ends the process if it is a rank of that group: the number may be another process's by now."""
    try:
        process = psutil.Process(pid)
        if " ".join(process.cmdline()).startswith(f"tandem rank {group} "):
            process.kill()
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        log.warning("rank process %d of group %s cannot be ended: %s", pid, group, error)


def _nothing() -> None:
    """There are no tiers to close."""


def _note(message: str) -> None:
    """Default of on_lost: a line in the log. lost() returns the message too."""
    log.error("%s", message)
