"""Builds the engine of one group: ranks over Ray, the scheduler over the ranks. Used on the engine's thread only."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.engine_thread import Sink
from cluster.ray_executor import RayExecutor
from cluster.service import ServiceFacts
from configs.schema import EngineSettings
from workers.build import model_facts
from workers.engine.engine import Engine

log = logging.getLogger("ray.serve.tandem")


class GroupEngine:
    """Opens one engine and closes its ranks. rank_pids, notes and silent_s() may be read from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        facts: ServiceFacts,
        group: str,
        placement_group: Any,
        on_lost: Callable[[str], None],
    ) -> None:
        self._settings = settings
        host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        self._executor = RayExecutor(settings, facts, group, placement_group, host, on_lost)
        self.rank_pids: tuple[int, ...] = ()
        self.notes: tuple[str, ...] = ()

    def open(self, sink: Sink) -> Engine:
        """Starts the ranks, loads the model, and puts the engine on top. SettingsError or GroupLost when that fails."""
        ready = self._executor.start()
        self.rank_pids = ready.rank_pids
        self.notes = ready.tier_notes
        log.info("ranks ready: %s", ready)
        return Engine(self._settings, model_facts(self._settings, ready), self._executor, ready, sink, time.monotonic)

    def silent_s(self) -> float:
        """How long a rank has given no sign of life, 0 while there is no doubt."""
        return self._executor.silent_s()

    def close(self) -> None:
        self._executor.close()
