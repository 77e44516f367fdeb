"""Starts torch.distributed for one group of ranks and cuts it into one group per stage.

Called once by each rank process. gloo on CPU, NCCL on CUDA; the rendezvous is a TCP store at the given address, nothing
is read from the environment.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.collectives import Collectives, SingleRank, TorchCollectives
from parallel.context import ParallelContext
from parallel.mesh import Mesh
from parallel.shared_memory import SharedMemoryCollectives, open_segment

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


def init_parallel(
    rank: int,
    world_size: int,
    tp_size: int,
    pp_size: int,
    master_address: str,
    master_port: int,
    device: torch.device,
) -> ParallelContext:
    """This rank's context; returns when all ranks have come. One group per process, since torch keeps one.

    Raises torch.distributed's DistError when the others do not come in time or the port cannot be bound.
    """
    mesh = Mesh(tp_size, pp_size, rank)
    assert mesh.world_size == world_size, (world_size, tp_size, pp_size)
    if world_size == 1:
        return ParallelContext.single()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{_bracketed(master_address)}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=RENDEZVOUS_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    world = TorchCollectives(dist.group.WORLD, list(range(world_size)))
    return ParallelContext(mesh, _stage_group(mesh, device), world, dist.destroy_process_group)


def _stage_group(mesh: Mesh, device: torch.device) -> Collectives:
    """The TP group of this rank's stage: through shared memory where all its ranks run on one CPU node, as a gloo
    all-reduce of a decode step costs some 200 us and a shared-memory one 20. Every rank takes part in making every
    group, as torch demands."""
    mine: Collectives = SingleRank()
    if mesh.tp_size == 1:
        return mine
    for stage in range(mesh.pp_size):
        ranks = mesh.tp_group(stage)
        group = dist.new_group(ranks, timeout=RENDEZVOUS_TIMEOUT)
        if stage == mesh.pp_rank:
            mine = TorchCollectives(group, ranks)
    if device.type == "cpu":
        segment = open_segment(mine, mesh.tp_rank, mesh.tp_size)
        if segment is not None:
            spins = mesh.world_size <= len(os.sched_getaffinity(0))
            mine = SharedMemoryCollectives(segment, mesh.tp_rank, mesh.tp_size, mine, spins)
    return mine


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
