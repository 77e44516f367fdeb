"""The coordinator's half of a group of rank processes: handshake, plans out, results in. Torch-free and Ray-free.

Used by workers/local_executor.py and cluster/ray_executor.py, which only differ in how they start and end processes.
Binds the ROUTER; each rank (workers/rank/rank_worker.py) connects as the DEALER named by its number. Start: Hello of
all -> RankSetup to rank 0 -> RankListening from it -> RankSetup to the others -> RankLoading, several -> RankLoaded of
all -> AllocateKV (the least that all can hold) -> RankReady of all. Never starts, kills or waits for a process; learns
from `lost` that one is gone, from its pulse that one is frozen (rank_pulse.py), from StepBound that they are stuck
(step_bound.py).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import zmq

from configs.schema import EngineSettings
from workers.channel import ADAPTER_MOVERS, ChannelContext, MoverKind, bind_router, mover_name, mover_of
from workers.engine.executor import ExecutorReady
from workers.errors import GroupLost, SettingsError
from workers.messages import (
    AdapterMove,
    AllocateKV,
    FromRank,
    Hello,
    RankFailed,
    RankListening,
    RankLoaded,
    RankLoading,
    RankReady,
    RankSetup,
    Shutdown,
    StepPlan,
    StepResult,
    ToRank,
    Transfer,
    TransferDone,
)
from workers.rank.memory import available_bytes
from workers.rank_pulse import OnSilent, PulseWatch
from workers.start_notes import adapter_notes, weight_notes
from workers.step_bound import StepBound
from workers.tiers import NoTiersBecause, OpenTiers, device_bytes, no_tiers, open_tiers

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 3600.0
"""Since a rank last said that it has more of its weights."""
POLL_SLICE_S = 0.03
LAST_WORDS_S = 0.2
LOOPBACK = "127.0.0.1"
Lost = Callable[[], str | None]
M = TypeVar("M", Hello, RankListening, RankLoaded, RankReady)


class RankGroup:
    """One group's channel. `lost()` says in words which rank process is gone, None while all live; it must be cheap.

    Use: RankGroup(...), start the processes with `endpoint` and the secret, start(), submit()/wait(), close(). All
    calls from one thread. Two plans or more may be in flight; results come back in the order of submission.
    groups_on_node: the most groups of this shape that may share a machine with this one, itself included.
    on_silent(message): called once, on a thread of the group's own, when a rank is found frozen, idle or not; submit()
    and wait() raise GroupLost from then on. host_socket: the node's host-tier process, if every rank is on that node.
    """

    def __init__(
        self,
        settings: EngineSettings,
        secret: str,
        lost: Lost,
        host: str = LOOPBACK,
        groups_on_node: int = 1,
        on_silent: OnSilent | None = None,
        clock: Callable[[], float] = time.monotonic,
        host_socket: str | None = None,
    ) -> None:
        assert groups_on_node >= 1, groups_on_node
        self.world_size = settings.parallel.ranks_per_group
        self._settings = settings
        self._groups_on_node = groups_on_node
        self._lost = lost
        self._host_socket = host_socket
        self._context = ChannelContext()
        self._socket, self.endpoint = bind_router(self._context, secret, host)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._names = [str(rank).encode() for rank in range(self.world_size)]
        self._listening: set[bytes] = set()
        self._done: list[TransferDone] = []
        self._tiers: OpenTiers | None = None
        self._close_tiers: Callable[[], None] = _nothing
        self._loading: dict[int, RankLoading] = {}
        self._pulse = PulseWatch(self._context, secret, host, on_silent or _note)
        self._clock = clock
        self._steps = StepBound(clock)
        self.hellos: tuple[Hello, ...] = ()
        self._broken: str | None = None
        self._closed = False

    def start(self) -> ExecutorReady:
        """Brings all ranks from Hello to ready. SettingsError when a rank names a flag to change, GroupLost otherwise.

        weight_bytes and block_bytes of the answer are sums over the ranks; load_s is the slowest rank's.
        """
        hellos = self._gather(Hello, HELLO_TIMEOUT_S, "said hello")
        self.hellos = tuple(hellos)
        self._send_setups(hellos)
        loaded = self._gather(RankLoaded, LOAD_TIMEOUT_S, "loaded the model")
        num_blocks = min(message.num_blocks for message in loaded)
        notes = self._allocate(loaded, num_blocks)
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
            rank_pids=tuple(hello.pid for hello in hellos),
            num_ranks=self.world_size,
            store=None if self._tiers is None else self._tiers.store,
            tier_notes=(*weight_notes(loaded, self._settings.device.cpu_offload_gib), *adapter_notes(loaded), *notes),
            kv_dtype=first.kv_dtype,
            adapter_pages=min(message.adapter_pages for message in loaded),
        )
        log.info("%d rank(s) ready: %s", self.world_size, ready)
        return ready

    def submit(self, plan: StepPlan) -> None:
        """Encodes a plan once and sends it to every rank. GroupLost when a rank's connection is gone."""
        self._raise_if_broken()
        self._broadcast(plan)
        self._steps.submitted(plan)

    def wait(self, timeout_s: float) -> StepResult | None:
        """The next result in plan order, None after timeout_s. GroupLost within 0.1 s of a rank's end or failure, 6 s
        after a rank froze, and when no step has finished for longer than StepBound allows."""
        self._raise_if_broken()
        message = self._receive(timeout_s)
        if message is None:
            return None
        if isinstance(message, TransferDone):
            if message.ticket:
                self._done.append(message)
            return None
        assert isinstance(message, StepResult), f"a rank sent {type(message).__name__} while steps run"
        expected = self._steps.finished().step_id
        assert message.step_id == expected, f"result of step {message.step_id}, expected {expected}"
        return message

    def transfer(self, transfer: Transfer | AdapterMove) -> None:
        """To the movers of all ranks. GroupLost when a rank's connection is gone."""
        self._raise_if_broken()
        payload = self._encoder.encode(transfer)
        kind = mover_of(transfer)
        for rank in range(self.world_size):
            self._send(rank, payload, mover_name(rank, kind))

    def transfers_done(self) -> list[TransferDone]:
        done, self._done = self._done, []
        return done

    @property
    def is_broken(self) -> bool:
        """GroupLost or SettingsError was raised: no plan runs any more."""
        return self._broken is not None

    def loading(self) -> tuple[int, int]:
        """Bytes of weights that are loaded, and of how many, over all ranks; (0, 0) until each has said its own. From
        any thread."""
        known = self._loading
        if len(known) < self.world_size:
            return 0, 0
        return sum(said.loaded_bytes for said in known.values()), sum(said.total_bytes for said in known.values())

    def silent_s(self) -> float:
        """How long a rank has given no sign of life, 0 while there is no doubt. From any thread."""
        return self._pulse.silent_s()

    def lost(self) -> str | None:
        """Which rank is gone or frozen, in words; None while all live. From any thread."""
        return self._lost() or self._pulse.verdict

    def shut_down(self) -> None:
        """Asks every rank that still listens to exit with status 0. Does not wait for it."""
        if self._closed:
            return
        payload = self._encoder.encode(Shutdown())
        for name in self._names:
            try:
                self._socket.send_multipart([name, payload], zmq.DONTWAIT)
            except zmq.ZMQError:
                log.debug("rank %s is not connected", name.decode())

    def close(self) -> None:
        """Closes the channel; idempotent. Ranks that still run notice it and exit within two seconds."""
        if not self._closed:
            self._closed = True
            self._socket.close(linger=200)
            self._context.term()
            self._close_tiers()

    # ---- handshake ----

    def _allocate(self, loaded: list[RankLoaded], num_blocks: int) -> tuple[str, ...]:
        """The KV of every rank and the tiers below it; what there is to say of those."""
        on_cpu = loaded[0].device == "cpu"
        on_device = sum(device_bytes(rank, num_blocks) for rank in loaded) if on_cpu else 0
        tiers = open_tiers(self._settings, loaded, available_bytes() - on_device, self._host_socket)
        if isinstance(tiers, OpenTiers):
            self._close_tiers = tiers.close
        for rank in range(self.world_size):
            own = None if isinstance(tiers, NoTiersBecause) else tiers.ranks[rank]
            self._send(rank, self._encoder.encode(AllocateKV(num_blocks, own)))
        ready = self._gather(RankReady, LOAD_TIMEOUT_S, "became ready")
        if self._settings.lora.enable_lora:
            self._await_movers(*ADAPTER_MOVERS)
        if isinstance(tiers, NoTiersBecause):
            return tiers.notes
        errors = [f"rank {message.rank}: {message.tiers_error}" for message in ready if message.tiers_error is not None]
        if errors:
            self._close_tiers()
            return no_tiers("; ".join(errors)).notes
        self._await_movers("memory", *(() if tiers.store.disk is None else ("disk",)))
        self._tiers = tiers
        return tiers.notes

    def _send_setups(self, hellos: list[Hello]) -> None:
        """Tells each rank its world. The rendezvous is on the machine of rank 0, which chooses the port by holding it:
        a port that somebody else looked up could be taken before it is bound."""
        per_host = Counter(hello.host for hello in hellos)
        address = LOOPBACK if len(per_host) == 1 else hellos[0].host
        settings = self._encoder.encode(self._settings)

        def send(hello: Hello, port: int | None) -> None:
            setup = RankSetup(
                settings=settings,
                world_size=self.world_size,
                master_address=address,
                master_port=port,
                ranks_on_node=per_host[hello.host] * self._groups_on_node,
                pulse_endpoint=self._pulse.endpoint,
            )
            self._send(hello.rank, self._encoder.encode(setup))

        send(hellos[0], None)
        if self.world_size > 1:
            (listening,) = self._gather(RankListening, HELLO_TIMEOUT_S, "opened a port for the others", ranks=(0,))
            for hello in hellos[1:]:
                send(hello, listening.port)

    def _await_movers(self, *kinds: MoverKind) -> None:
        """Until those of every rank listen: what is sent to one before it does is lost."""
        awaited = {mover_name(rank, kind) for rank in range(self.world_size) for kind in kinds}
        deadline_s = time.monotonic() + HELLO_TIMEOUT_S
        while not awaited <= self._listening:
            message = self._receive(deadline_s - time.monotonic())
            if message is None:
                raise GroupLost(f"after {HELLO_TIMEOUT_S:.0f} s not every rank has started its movers")
            assert isinstance(message, TransferDone), f"a rank sent {type(message).__name__} before any step"

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
                raise GroupLost(f"rank(s) {missing} have not {did}, and have said nothing for {timeout_s:.0f} s")
            if isinstance(message, TransferDone):  # a mover's first word, beside its rank's
                continue
            if isinstance(message, RankLoading):
                self._loading = {**self._loading, message.rank: message}
                since_s = self._clock()
                continue
            assert isinstance(message, kind), f"a rank sent {type(message).__name__}, expected {kind.__name__}"
            got[message.rank] = message
        return [got[rank] for rank in awaited]

    # ---- transport ----

    def _broadcast(self, message: ToRank) -> None:
        payload = self._encoder.encode(message)
        for rank in range(self.world_size):
            self._send(rank, payload)

    def _send(self, rank: int, payload: bytes, name: bytes | None = None) -> None:
        try:
            self._socket.send_multipart([name or self._names[rank], payload], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self._fail(self._last_words() or self.lost() or f"rank {rank} is not connected: {error}")

    def _receive(self, timeout_s: float) -> FromRank | None:
        """The next message, None after timeout_s; looks for dead and stuck ranks between slices."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._poll(0.0)
            if message is None and (lost := self.lost()) is not None:
                self._fail(self._last_words() or lost)
            if message is None:
                left_s = deadline_s - time.monotonic()
                message = self._poll(min(POLL_SLICE_S, max(0.0, left_s)))
                if message is None and (overdue_s := self._steps.overdue_s()) is not None:
                    self._fail(f"no step has finished for {overdue_s:.0f} s although every rank lives: they are stuck")
                if message is None and left_s <= 0:
                    return None
            if isinstance(message, RankFailed):
                self._fail(message)
            if message is not None:
                return message

    def _poll(self, timeout_s: float) -> FromRank | None:
        if not self._poller.poll(round(timeout_s * 1000)):
            return None
        name, payload = self._socket.recv_multipart(zmq.NOBLOCK)
        message: FromRank = self._decoder.decode(payload)
        if isinstance(message, TransferDone) and not message.ticket:
            self._listening.add(name)
        return message

    def _last_words(self) -> RankFailed | None:
        """What a rank that is gone had still sent to say why."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._poll(left_s)
            if isinstance(message, RankFailed):
                return message
        return None

    def _fail(self, cause: RankFailed | str) -> None:
        """Breaks the group and raises."""
        if isinstance(cause, RankFailed):
            self._broken = f"rank {cause.rank}: {cause.message}"
            if cause.flag is not None:
                raise SettingsError(cause.message, cause.flag)
        else:
            self._broken = cause
        raise GroupLost(self._broken)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise GroupLost(self._broken)


def _nothing() -> None:
    """There are no tiers to close."""


def _note(message: str) -> None:
    """Whoever asks next learns of it from lost()."""
    log.error("%s", message)
