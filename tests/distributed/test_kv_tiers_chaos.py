"""KV-02 with real ranks at length: eight clients, two choices a turn, a pool for two of them and tiers not much larger,
thousands of requests at every cut. Each answer is what a device large enough says without tiers, and on one rank each
block comes back bit by bit. make chaos."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.configs.load import build_settings
from tandem.offload.kv.disk_io import HEADER_BYTES
from tandem.offload.kv.disk_tier import DiskTier
from tandem.parallel.mesh import Mesh
from tandem.workers.build import model_facts, offline_settings, open_executor
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.messages.request import GenerationRequest
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.resolve import kv_groups, resolve_max_model_len
from tandem.workers.planning.sizes import kv_token_bytes
from tests.support.clients import Clients, Exchange, Listener
from tests.support.engine_invariants import check_invariants
from tests.support.in_process import is_in_process, runner_of
from tests.support.kv_bits import Bits
from tests.support.tiny_models import BY_NAME, TINY_MODELS, save_tiny_model

pytestmark = pytest.mark.chaos

TURNS = 60
REQUESTS = 8 * TURNS
"""Of one model at one cut; of all models together some thousands at every cut."""
SEED = 3
"""Of talks without a near-tie. Where two tokens are as near to each other as the order of float32 sums moves them, cuts
differ and nobody is at fault: another seed, then."""
BLOCK_SIZE = 4
DEVICE_BLOCKS, HOST_SLOTS, DISK_BLOCKS = 28, 24, 80
"""For each group of layers: a sequence takes blocks of every group."""
SETTLE_S = 20.0
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": BLOCK_SIZE,
    "cpu_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
LARGE: dict[str, Any] = SMALL | {
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
}
CUTS = {"one rank": {}, "tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
FIRST_OF_FAMILY = {model.model_type: model.name for model in reversed(TINY_MODELS)}
MODELS = [*FIRST_OF_FAMILY.values(), "qwen2-window", "llama-mqa-biased"]


@pytest.fixture(autouse=True)
def both_ways_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of blocks, a preempted sequence is copied or computed again, and what lower tiers have of a prompt
    is used or not. By measured times it would depend on what else runs on the machine."""
    monkeypatch.setattr(
        CopyCosts, "recompute_s", lambda self, tokens: float("inf") if tokens // BLOCK_SIZE % 2 else 0.0
    )


class Reference:
    """What a device large enough answers, asked everything at once: no tiers, no prefix is found again, nobody gives
    way. Each prompt is asked once, whatever cut it is compared with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, Path] = {}
        self._answers: dict[tuple[Any, ...], list[list[int]]] = {}

    def folder(self, name: str) -> Path:
        """The checkpoint."""
        if name not in self._folders:
            self._folders[name] = save_tiny_model(BY_NAME[name], self._folder)
        return self._folders[name]

    def answers(self, name: str, requests: Sequence[GenerationRequest]) -> list[list[list[int]]]:
        """To each request: the tokens of each choice."""
        keys = [(name, *request.prompt_token_ids, request.sampling) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._answers}
        if new:
            said = self._ask(self.folder(name), list(new.values()))
            self._answers |= {key: said[request.request_id] for key, request in new.items()}
        return [self._answers[key] for key in keys]

    def _ask(self, folder: Path, requests: list[GenerationRequest]) -> dict[str, list[list[int]]]:
        settings = offline_settings(build_settings(str(folder), LARGE).engine)
        executor, listener = open_executor(settings), Listener()
        try:
            ready = executor.start()
            engine = build_engine(settings, model_facts(settings, ready), executor, ready, listener)
            said = listener.answers(engine, requests)
            assert engine.stats().preemptions == 0 and engine.stats().prefix_cache_hits == 0
            return said
        finally:
            executor.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Thrashed:
    """What the clients of one engine said and heard, and what it cost. Seconds without starting and ending. bits: None
    where ranks are processes of their own."""

    exchanges: list[Exchange]
    stats: EngineStats
    disk_evictions: int
    took_s: float
    bits: Bits | None

    @property
    def host_evictions(self) -> int:
        offload = self.stats.offload
        assert offload is not None
        return offload.blocks["store"] + offload.blocks["fetch"] - offload.host_blocks


def tiny_tiers(folder: Path, disk: Path, cut: dict[str, int]) -> tuple[dict[str, Any], int]:
    """Flags for that many blocks on each tier, which the ranks of the cut share, and the number of groups."""
    spec, settings = load_spec(folder), build_settings(str(folder), SMALL).engine
    windows = kv_groups(settings, spec, resolve_max_model_len(settings, spec)).windows
    tp_size, pp_size = cut.get("tensor_parallel_size", 1), cut.get("pipeline_parallel_size", 1)
    ranks = [Mesh(tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]
    block_bytes = BLOCK_SIZE * sum(kv_token_bytes(spec, rank, "float32", windows) for rank in ranks)
    groups = len(windows)
    return {
        "num_gpu_blocks_override": DEVICE_BLOCKS * groups,
        "kv_offloading_size": (HOST_SLOTS * groups + 0.5) * block_bytes / 2**30,
        "kv_disk_path": str(disk),
        "kv_disk_size": (DISK_BLOCKS * groups + 0.5) * (block_bytes + len(ranks) * HEADER_BYTES) / 2**30,
    }, groups


def thrash(folder: Path, disk: Path, cut: dict[str, int]) -> Thrashed:
    """All that the clients ask; afterwards nothing of it is held anywhere."""
    tiers, groups = tiny_tiers(folder, disk, cut)
    settings = offline_settings(build_settings(str(folder), SMALL | tiers | cut).engine)
    executor = open_executor(settings)
    try:
        ready, clients = executor.start(), Clients(seed=SEED)
        engine = build_engine(settings, model_facts(settings, ready), executor, ready, clients)
        bits, began_s = watched(engine, executor), time.monotonic()
        exchanges = clients.converse(engine, TURNS)
        took_s = time.monotonic() - began_s
        engine.flush_transfers(SETTLE_S)
        tier = assert_nothing_is_held(engine, disk, len(cut) + 1, groups)
        pids = () if is_in_process(executor) else ready.rank_pids
        thrashed = Thrashed(exchanges, engine.stats(), tier.stats.evictions, took_s, bits)
    finally:
        executor.close()
    assert_nothing_is_open(disk, pids)
    return thrashed


def watched(engine: Engine, executor: Executor) -> Bits | None:
    if not is_in_process(executor):
        return None
    assert engine.offload is not None
    return Bits(engine.offload, runner_of(executor).kv.planes)


def assert_nothing_is_held(engine: Engine, disk: Path, num_ranks: int, groups: int) -> DiskTier:
    """No block is used, no ticket open, no slot pinned, no file but those that are listed, and invariants hold."""
    assert not engine.has_work() and not engine.is_copying
    check_invariants(engine)
    stats, offload = engine.stats(), engine.offload
    assert offload is not None and stats.used_blocks == 0
    assert not offload._open and not offload._arriving
    assert engine.manager.pool.num_reserved == engine.manager.num_promised == 0
    host, tier = offload._store.host, offload._store.disk
    assert host.num_available == host.num_slots == HOST_SLOTS * groups, "a slot is pinned or being written"
    assert isinstance(tier, DiskTier) and tier.disabled_reason is None
    tier.check_invariants()
    assert not tier._pins and not tier._writing and not tier._remains
    assert 0 < tier.stats.keys <= tier.stats.capacity_keys == DISK_BLOCKS * groups
    for rank in range(num_ranks):
        files = [path.name for path in tier.folder(f"rank{rank}").rglob("*") if path.is_file()]
        assert sorted(files) == sorted(f"{key.hex()}.kv" for key in tier._idle), "files that are not listed"
    return tier


def assert_nothing_is_open(disk: Path, pids: Sequence[int]) -> None:
    """After the end: no rank, no thread that copies, no file of the disk tier, no memory of the host tier."""
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("Lane")]
    assert not [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(disk)]
    assert "tandem-kv" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_kv_02_eight_clients_thrash_tiny_tiers(name: str, cut: str, reference: Reference, tmp_path: Path) -> None:
    run = thrash(reference.folder(name), tmp_path / "kv", CUTS[cut])
    answers = reference.answers(name, [exchange.request for exchange in run.exchanges])
    differing = [
        (exchange.request, exchange.heard, answer)
        for exchange, answer in zip(run.exchanges, answers, strict=True)
        if exchange.heard != [said[: len(heard)] for heard, said in zip(exchange.heard, answer, strict=True)]
        or (exchange.is_whole and exchange.heard != answer)
    ]
    offload = run.stats.offload
    assert offload is not None
    print(
        f"{name}, {cut}: {len(run.exchanges)} requests in {run.took_s:.1f} s, {run.stats.preemptions} preemptions "
        f"({offload.swapped_out} swapped, {offload.recomputed} recomputed), blocks {offload.blocks}, evictions "
        f"{run.host_evictions} host, {run.disk_evictions} disk"
    )
    assert not differing, f"{len(differing)} of {REQUESTS} differ, first {differing[0]}"
    assert len(run.exchanges) == REQUESTS and sum(e.is_whole for e in run.exchanges) > 0.9 * REQUESTS
    assert offload.swapped_out > 0 and offload.recomputed > 0 and offload.failed_blocks == 0, offload
    assert all(offload.blocks[kind] > 0 for kind in ("store", "load", "spill", "fetch")), offload
    assert run.bits is None or run.bits.num_compared == offload.blocks["load"]
    assert run.host_evictions > 0 and run.disk_evictions > 0
