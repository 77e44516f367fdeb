"""Starts torch.distributed for one group of ranks and makes one group per stage.

Called once by each rank process, with its platform's Backend. The rendezvous is a TCP store that listens on the given
address only; torch's own would listen on every interface without authentication.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tandem.configs.limits import Ports, available_cores, listen
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import Collectives, SingleRank, TorchCollectives
from tandem.parallel.exchange.small_sums import Seconds
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.mesh import Mesh

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""The limit of one collective: ranks wait in it for others that load, or for a slow stage. The coordinator finds dead,
frozen and stuck ranks long before."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The library that carries collectives. device: the one that it is bound to at the start, if any. shares_memory:
    ranks of one machine may sum through memory of the CPU's that they share. seconds_of: times a device whose ranks may
    sum small tensors through the devices' memory."""

    name: str
    device: torch.device | None
    shares_memory: bool
    seconds_of: Seconds | None = None


GLOO = Backend("gloo", None, shares_memory=True)


def use_interface(name: str) -> None:
    """Binds the collectives of this process to a network interface; they would otherwise listen where the machine's
    name leads to, or on the first interface they find. An NCCL_SOCKET_IFNAME of the user's wins; without `=` NCCL takes
    any interface whose name begins so."""
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def init_parallel(
    rank: int,
    world_size: int,
    tp_size: int,
    pp_size: int,
    master_address: str,
    master_port: int,
    backend: Backend,
    *,
    listener: socket.socket | None = None,
    spins: Callable[[], bool] | None = None,
    expert_parallel: bool = False,
) -> ParallelContext:
    """Returns this rank's context when all ranks have joined. torch allows one group per process.

    listener: on rank 0, a socket that listens at the address already; taken over. Without it rank 0 binds the port.
    expert_parallel: of the mesh. spins: whether ranks have a core each, other groups' included, asked at each wait;
    None: this group's have. Raises torch.distributed's DistError when the others do not join in time, OSError when the
    port cannot be bound.
    """
    mesh = Mesh(tp_size, pp_size, rank, expert_parallel)
    assert mesh.world_size == world_size, (world_size, tp_size, pp_size)
    if world_size == 1:
        return ParallelContext.single()
    dist.init_process_group(
        backend.name,
        store=_open_store(rank, world_size, master_address, master_port, listener),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=backend.device,
    )
    world = TorchCollectives(dist.group.WORLD, list(range(world_size)))
    have_cores = world_size <= available_cores()
    stage = _stage_group(mesh, backend, spins or (lambda: have_cores))
    return ParallelContext(mesh, StepCollectives(stage, tp_size, mesh.tp_rank), world, dist.destroy_process_group)


def _open_store(rank: int, world_size: int, address: str, port: int, listener: socket.socket | None) -> dist.TCPStore:
    """Opens the store through which the ranks find each other; returns on rank 0 when all have joined."""
    if rank > 0:
        return dist.TCPStore(address, port, world_size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    listener = listener or listen(address, Ports(port, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=RENDEZVOUS_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _stage_group(mesh: Mesh, backend: Backend, spins: Callable[[], bool]) -> Collectives:
    """Returns the collectives of this rank's stage: through shared memory where all its ranks run on one node and
    compute in its memory."""
    # A gloo all-reduce of a decode step costs some 200 us, one through shared memory 20. torch requires every rank to
    # take part in making every group.
    if mesh.tp_size == 1:
        return SingleRank()
    stages = [mesh.tp_group(stage) for stage in range(mesh.pp_size)]
    groups = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for ranks in stages]
    mine = TorchCollectives(groups[mesh.pp_rank], stages[mesh.pp_rank])
    if backend.shares_memory:
        from tandem.parallel.exchange.shared_memory import SharedMemoryCollectives, open_segment

        segment = open_segment(mine, mesh.tp_rank, mesh.tp_size)
        if segment is not None:
            return SharedMemoryCollectives(segment, mesh.tp_rank, mesh.tp_size, mine, spins)
    if (seconds_of := backend.seconds_of) is not None and (device := backend.device) is not None:
        from tandem.parallel.exchange.symmetric_memory import symmetric_sums

        return symmetric_sums(groups[mesh.pp_rank], mine, mesh.tp_size, device, device.index, seconds_of)
    return mine
