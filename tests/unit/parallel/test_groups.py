"""Decisions of init_parallel: the rendezvous' address, and whether ranks may spin."""

import os

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


@pytest.mark.parametrize(("ranks_on_node", "spins"), [(2, True), (4, False)])
def test_ranks_spin_only_with_a_core_each(monkeypatch: pytest.MonkeyPatch, ranks_on_node: int, spins: bool) -> None:
    """Two groups of two on two cores: each alone would spin."""
    told: list[bool] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks, timeout: object())
    monkeypatch.setattr(shared_memory, "open_segment", lambda group, rank, size: object())
    monkeypatch.setattr(shared_memory, "SharedMemoryCollectives", lambda *arguments: told.append(arguments[-1]))
    groups._stage_group(Mesh(2, 1, 0), groups.GLOO, ranks_on_node)
    assert told == [spins]
