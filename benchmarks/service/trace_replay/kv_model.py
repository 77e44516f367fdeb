"""The model and the KV tiers of an engine in the parts of `trace_replay kv`.

Sizes of tiers are in blocks of BLOCK tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine.engine_run import TimelineSink, cpu_settings, drain, run_jobs
from benchmarks.service.trace_replay.trace import BLOCK
from benchmarks.workload import Job
from tandem.configs.schema import CacheSettings, EngineSettings
from tandem.parallel.mesh import Mesh
from tandem.workers.engine.engine import Engine
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.rank.kv_cache import block_bytes

GIB = 2**30


@dataclass(frozen=True)
class Variant:
    """One set of KV tiers, in blocks; None: no such tier."""

    name: str
    device_blocks: int
    host_blocks: int | None = None
    disk_blocks: int | None = None


@dataclass(frozen=True)
class KVModel:
    """The model, type and threads that all variants share; max_model_len in tokens."""

    folder: Path
    dtype: str
    threads: int
    max_model_len: int

    @property
    def spec(self) -> ArchSpec:
        return load_spec(self.folder)

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block."""
        spec = self.spec
        return block_bytes(kv_layouts(spec, Mesh()), BLOCK, getattr(torch, self.dtype))

    def settings(self, variant: Variant, disk_folder: Path | None = None) -> EngineSettings:
        """Settings of a variant; half a block is added, because rounding GiB down would take one."""
        gib = self.block_bytes / GIB
        cache = CacheSettings(
            block_size=BLOCK,
            num_blocks=variant.device_blocks,
            kv_offloading_gib=None if variant.host_blocks is None else (variant.host_blocks + 0.5) * gib,
            kv_disk_path=None if variant.disk_blocks is None else str(disk_folder),
            kv_disk_gib=None if variant.disk_blocks is None else (variant.disk_blocks + 0.5) * gib * 1.01,
        )
        return cpu_settings(self.folder, self.threads, self.max_model_len, dtype=self.dtype, cache=cache)


def warm(engine: Engine, sink: TimelineSink) -> None:
    """Runs two jobs of tokens that no turn has, from which the engine also learns its own speed."""
    run_jobs(engine, sink, [Job([2] * 96, 4), Job([1, *[2] * 95], 4)], 1, "warm")
    drain(engine)
