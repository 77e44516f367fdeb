"""The rank process: run_rank() is its whole life, the same under LocalExecutor and Ray.

Connects to its coordinator (workers/rank_group.py), loads its shard, then runs plans until Shutdown. It blocks in
receive between plans, so an idle rank uses no CPU. It never decides what to run and never talks to another rank except
through torch.distributed.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import psutil
import setproctitle
import torch
import zmq

from configs.errors import SettingsError
from configs.schema import EngineSettings
from offload.host_process import HostTierError
from parallel.context import ParallelContext
from parallel.groups import init_parallel, listen
from workers.channel import ChannelContext, MoverKind, connect_dealer, mover_name
from workers.messages import (
    AllocateKV,
    FromRank,
    Hello,
    RankFailed,
    RankListening,
    RankReady,
    RankSetup,
    RankTiers,
    Shutdown,
    StepPlan,
    ToRank,
)
from workers.rank.lifeline import Lifeline, watch_stdin
from workers.rank.load_reports import LoadReports
from workers.rank.loading import LoadedRank, choose_device, load_rank, set_threads
from workers.rank.model_runner import ModelRunner
from workers.rank.mover_inbox import ChannelInbox, Inbox
from workers.rank.pulse_echo import start_echo
from workers.resolve import read_spec

log = logging.getLogger(__name__)

LAST_WORDS_MS = 1000
LOOPBACK_PREFIX = "127."
M = TypeVar("M", RankSetup, AllocateKV)


class _ShutDown(Exception):
    """The coordinator said Shutdown where something else was due."""


@dataclass(frozen=True, slots=True)
class _Channel:
    """Typed messages over the rank's DEALER."""

    socket: zmq.Socket[Any]
    encoder: msgspec.msgpack.Encoder
    decoder: "msgspec.msgpack.Decoder[ToRank]"

    def send(self, message: FromRank) -> None:
        self.socket.send(self.encoder.encode(message))

    def receive(self) -> ToRank:
        """Blocks until the coordinator says something."""
        return self.decoder.decode(self.socket.recv())

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        if isinstance(message, Shutdown):
            raise _ShutDown
        assert isinstance(message, kind), f"got {type(message).__name__}, expected {kind.__name__}"
        return message


def run_rank(rank: int, endpoint: str, secret: str, *, group: str = "local", host: str = "127.0.0.1") -> int:
    """Runs a rank until it is told to end; returns the exit status: 0 after Shutdown, 1 after a failure.

    host: this machine's address as other ranks reach it (ranks with equal hosts share a machine). Ends the process by
    itself when the coordinator is gone.
    """
    setproctitle.setproctitle(f"tandem rank {group} {rank} starting")
    context = ChannelContext()
    socket = connect_dealer(context, secret, endpoint, str(rank).encode())
    lifeline = Lifeline(socket)
    channel = _Channel(socket, msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToRank))
    try:
        channel.send(Hello(rank, os.getpid(), host))
        setup = channel.expect(RankSetup)
        if setup.pulse_endpoint is not None:
            start_echo(context, secret, setup.pulse_endpoint, rank)
        inbox = partial(_mover_inbox, context, secret, endpoint, rank)
        runner = _start(rank, group, setup, host, channel, inbox)
        try:
            _serve(runner, channel)
        finally:
            runner.close()
        return 0
    except _ShutDown:
        return 0
    except Exception as error:
        log.exception("rank %d failed", rank)
        channel.send(_last_words(rank, error))
        return 1
    finally:
        lifeline.stop()
        socket.close(linger=LAST_WORDS_MS)
        context.term()


def _start(
    rank: int, group: str, setup: RankSetup, host: str, channel: _Channel, inbox: Callable[[MoverKind], Inbox]
) -> ModelRunner:
    """The rank's half of the handshake: RankSetup (-> RankListening) -> RankLoading, several -> RankLoaded ->
    AllocateKV -> RankReady."""
    loaded = _load(rank, group, setup, host, channel)
    channel.send(loaded.facts)
    allocate = channel.expect(AllocateKV)
    runner = loaded.build_runner(allocate.num_blocks)
    for mover in loaded.open_adapter_movers(inbox):
        mover.start()
    tiers_error = None
    if allocate.tiers is not None:
        tiers_error = _start_movers(loaded, runner, allocate.tiers, inbox)
    channel.send(RankReady(rank, tiers_error))
    return runner


def _start_movers(
    loaded: LoadedRank, runner: ModelRunner, tiers: RankTiers, inbox: Callable[[MoverKind], Inbox]
) -> str | None:
    """Starts the copies between tiers; why there are none, when the memory cannot be had."""
    try:
        for mover in loaded.open_movers(runner, tiers, inbox):
            mover.start()
    except (OSError, HostTierError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _mover_inbox(context: "zmq.Context[Any]", secret: str, endpoint: str, rank: int, kind: MoverKind) -> Inbox:
    return ChannelInbox(context, secret, endpoint, mover_name(rank, kind))


def _load(rank: int, group: str, setup: RankSetup, host: str, channel: _Channel) -> LoadedRank:
    settings = msgspec.msgpack.decode(setup.settings, type=EngineSettings)
    read_spec(settings)  # what is refused is refused before ranks wait for each other
    device = choose_device(settings, rank)
    set_threads(settings, device, setup.ranks_on_node)
    context = ParallelContext.single()
    if setup.world_size > 1:
        context = _meet(rank, setup, settings, host, device, channel)
    setproctitle.setproctitle(f"tandem rank {group} tp{context.tp_rank} pp{context.pp_rank}")
    on_bytes = LoadReports(rank, channel.send).take
    return load_rank(settings, context, device, rank=rank, ranks_on_node=setup.ranks_on_node, on_bytes=on_bytes)


def _meet(
    rank: int, setup: RankSetup, settings: EngineSettings, host: str, device: torch.device, channel: _Channel
) -> ParallelContext:
    """Joins the other ranks. Rank 0 first listens, at the one address where it is looked for, and tells the port."""
    on_loopback = setup.master_address.startswith(LOOPBACK_PREFIX)
    interface = _interface_of(setup.master_address if on_loopback else host)
    if interface is not None:  # gloo would otherwise listen where the machine's name leads to
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    listener, port = None, setup.master_port
    if port is None:
        assert rank == 0, rank
        listener = listen(setup.master_address)
        port = listener.getsockname()[1]
        channel.send(RankListening(rank, port))
    return init_parallel(
        rank,
        setup.world_size,
        settings.parallel.tensor_parallel_size,
        settings.parallel.pipeline_parallel_size,
        setup.master_address,
        port,
        device,
        listener=listener,
        ranks_on_node=setup.ranks_on_node,
    )


def _interface_of(address: str) -> str | None:
    """The network interface that has an address: lo for 127.0.0.1 on Linux, lo0 on macOS."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _serve(runner: ModelRunner, channel: _Channel) -> None:
    """Plans in order until Shutdown."""
    while not isinstance(message := channel.receive(), Shutdown):
        assert isinstance(message, StepPlan), f"got {type(message).__name__} while steps run"
        result = runner.execute(message)
        if result is not None:
            channel.send(result)


def _last_words(rank: int, error: Exception) -> RankFailed:
    """A SettingsError always names a flag; anything else is not the user's to mend."""
    if isinstance(error, SettingsError):
        return RankFailed(rank=rank, message=str(error), flag=error.flag or "MODEL")
    return RankFailed(rank=rank, message=f"{type(error).__name__}: {error}")


def main() -> None:
    """Command line of LocalExecutor; the secret is the first line of standard input."""
    parser = argparse.ArgumentParser(description="One rank of a Tandem group; started by LocalExecutor.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--group", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format=f"rank {arguments.rank} %(levelname)s %(name)s: %(message)s")
    secret = _read_line(sys.stdin.fileno())
    watch_stdin()
    status = run_rank(arguments.rank, arguments.endpoint, secret, group=arguments.group)
    logging.shutdown()
    os._exit(status)  # threads of collective libraries must not hold up the end


def _read_line(descriptor: int) -> str:
    """One line, unbuffered, so that nothing after it is taken."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


if __name__ == "__main__":
    main()
