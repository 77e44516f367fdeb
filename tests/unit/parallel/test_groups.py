"""Decisions of init_parallel: the rendezvous' address, and whether ranks may spin."""

import mmap

import pytest
import torch

from tandem.configs.errors import SettingsError
from tandem.configs.limits import Ports
from tandem.parallel import groups
from tandem.parallel.exchange import shared_memory
from tandem.parallel.mesh import Mesh

CPU = torch.device("cpu")


def test_a_listener_is_bound_to_one_address_and_a_port_of_its_own() -> None:
    with groups.listen("127.0.0.1") as first, groups.listen("127.0.0.1") as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]
        taken = first.getsockname()[1]
        with pytest.raises(SettingsError, match=f"{taken}-{taken}: none of these ports is free at 127.0.0.1"):
            groups.listen("127.0.0.1", Ports(taken, taken))


@pytest.mark.parametrize("spins", [True, False])
def test_ranks_spin_only_with_a_core_each(monkeypatch: pytest.MonkeyPatch, spins: bool) -> None:
    """Asked anew for each wait, as groups come and go. The other rank never comes."""
    yields: list[bool] = []
    monkeypatch.setattr(shared_memory, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(shared_memory.os, "sched_yield", lambda: yields.append(True))
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks, timeout: object())
    memory = mmap.mmap(-1, shared_memory.segment_bytes(2))
    monkeypatch.setattr(shared_memory, "open_segment", lambda group, rank, size: memory)
    alone = [not spins]
    stage = groups._stage_group(Mesh(2, 1, 0), groups.GLOO, lambda: alone[0])
    alone[0] = spins
    with pytest.raises(TimeoutError):
        stage.all_reduce(torch.zeros(4))
    assert bool(yields) == spins
