"""Builds the engine of one group: ranks over Ray, the scheduler over the ranks. Used on the engine's thread only."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace

from tandem.cluster.group.group_recording import GroupRecording
from tandem.cluster.group.ray_ranks import ray_group
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.planning.model_source import engine_here, named_node
from tandem.workers.planning.start_notes import warn_of_pool

log = logging.getLogger("tandem.group")


class EngineOpener:
    """Opens one engine and closes its ranks. settings: as they hold on every machine. on_lost, on_told: of ray_group().
    recording: of the engine.
    rank_pids, notes, loading(), fetching() and silent_s() may be read from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        facts: ServiceFacts,
        group: str,
        placement_group: Any,
        on_lost: Callable[[str], None],
        on_told: Callable[[], None],
        recording: GroupRecording,
    ) -> None:
        self._recording = recording
        self._settings = with_own_step_log(settings, group)
        self._group = group
        self._host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        self._executor = ray_group(settings, facts, group, placement_group, self._host, on_lost, on_told)
        self.rank_pids: tuple[int, ...] = ()
        self.notes: tuple[str, ...] = ()

    def open(self, sink: EngineThread) -> Engine:
        """Starts the ranks, loads the model, and puts the engine on top. SettingsError or GroupLost when that fails."""
        ready = self._executor.start()
        self.rank_pids = ready.rank_pids
        with named_node(self._host):
            here = engine_here(self._settings)
        facts = model_facts(here, ready)
        warnings = warn_of_pool(self._settings.cache, facts, log)
        self.notes = (loading_note(ready), *ready.kernel_notes, *ready.tier_notes, *warnings)
        if self._settings.step_log is not None:
            self.notes += (f"every step's plan goes to {self._settings.step_log}",)
        log.info("ranks of group %s are ready, with %d KV blocks", self._group, ready.num_blocks)
        for note in self.notes:
            log.info("%s", note)
        return self._recording.engine(here, facts, self._executor, ready, sink)

    def loading(self) -> tuple[int, int]:
        """Bytes of weights that are loaded, and of how many; (0, 0) before that is known."""
        return self._executor.loading()

    def fetching(self) -> str:
        """Returns what nodes are downloading of the model, in words; empty when none does."""
        return self._executor.fetching()

    def silent_s(self) -> float:
        """Returns the seconds for which a rank has given no sign of life, 0 while there is no doubt."""
        return self._executor.silent_s()

    def close(self) -> None:
        """Ends the ranks."""
        self._executor.close()


def with_own_step_log(settings: EngineSettings, group: str) -> EngineSettings:
    """Each life of each group counts its steps from 1, so each has a file of its own, named after it."""
    if settings.step_log is None:
        return settings
    asked = Path(settings.step_log)
    return replace(settings, step_log=str(asked.with_name(f"{asked.stem}-{group}{asked.suffix}")))


def loading_note(ready: ExecutorReady) -> str:
    """Returns what reading the weights took; all ranks of the group read at the same time."""
    size_mib = ready.weight_bytes / 2**20
    size = f"{size_mib / 1024:.1f} GiB" if size_mib >= 1024 else f"{size_mib:.1f} MiB"
    return f"{size} of weights loaded in {ready.load_s:.1f} s"
