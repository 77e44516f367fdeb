"""Starts torch.distributed for one group of ranks and cuts it into one group per stage.

Called once by each rank process. gloo on CPU, NCCL on CUDA. The rendezvous is a TCP store that listens on the given
address only (torch's own would listen on every interface, and asks nobody who they are).
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.collectives import Collectives, SingleRank, TorchCollectives
from parallel.context import ParallelContext
from parallel.mesh import Mesh
from parallel.shared_memory import SharedMemoryCollectives, open_segment

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Of one collective: ranks wait in them for others that load, or for a slow stage. Who is dead, frozen or stuck is
found by the coordinator long before."""


def init_parallel(
    rank: int,
    world_size: int,
    tp_size: int,
    pp_size: int,
    master_address: str,
    master_port: int,
    device: torch.device,
    *,
    listener: socket.socket | None = None,
    ranks_on_node: int | None = None,
) -> ParallelContext:
    """This rank's context; returns when all ranks have come. One group per process, since torch keeps one.

    listener: on rank 0, a socket that listens at the address already; taken over. Without it rank 0 binds the port.
    ranks_on_node: all ranks that share this machine, other groups' included; None: those of this group.
    Raises torch.distributed's DistError when the others do not come in time, OSError when the port cannot be bound.
    """
    mesh = Mesh(tp_size, pp_size, rank)
    assert mesh.world_size == world_size, (world_size, tp_size, pp_size)
    if world_size == 1:
        return ParallelContext.single()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_open_store(rank, world_size, master_address, master_port, listener),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    world = TorchCollectives(dist.group.WORLD, list(range(world_size)))
    stage = _stage_group(mesh, device, ranks_on_node or world_size)
    return ParallelContext(mesh, stage, world, dist.destroy_process_group)


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address of this machine, on a free port unless one is named."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _open_store(rank: int, world_size: int, address: str, port: int, listener: socket.socket | None) -> dist.TCPStore:
    """Where the ranks find each other; returns on rank 0 when all have come."""
    if rank > 0:
        return dist.TCPStore(address, port, world_size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    listener = listener or listen(address, port)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=RENDEZVOUS_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _stage_group(mesh: Mesh, device: torch.device, ranks_on_node: int) -> Collectives:
    """The TP group of this rank's stage: through shared memory where all its ranks run on one CPU node, as a gloo
    all-reduce of a decode step costs some 200 us and a shared-memory one 20. Every rank takes part in making every
    group, as torch demands."""
    mine: Collectives = SingleRank()
    if mesh.tp_size == 1:
        return mine
    for stage in range(mesh.pp_size):
        ranks = mesh.tp_group(stage)
        group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        if stage == mesh.pp_rank:
            mine = TorchCollectives(group, ranks)
    if device.type == "cpu":
        segment = open_segment(mine, mesh.tp_rank, mesh.tp_size)
        if segment is not None:
            spins = ranks_on_node <= len(os.sched_getaffinity(0))
            mine = SharedMemoryCollectives(segment, mesh.tp_rank, mesh.tp_size, mine, spins)
    return mine
