"""RayExecutor: the ranks of a group as Ray actors in the group's placement group; rank i lives in bundle i + 1.

Each actor runs workers/rank/rank_worker.py in one call that never returns; from then on control is ZeroMQ, as with
local processes (workers/rank_group.py). A watcher thread sees a dead rank within 30 ms, the group's pulse a
frozen one within 6 s. Ranks die with this process.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import CPU_SHARE
from cluster.service import ServiceFacts, check_install
from configs.schema import EngineSettings
from workers.channel import life_secret
from workers.engine.executor import ExecutorReady
from workers.messages import AdapterMove, StepPlan, StepResult, Transfer, TransferDone
from workers.rank_group import RankGroup

log = logging.getLogger("ray.serve.tandem")


class RankActor:
    """One rank. Gets exactly one call."""

    def run(self, rank: int, endpoint: str, group: str, facts: ServiceFacts) -> None:
        """Until the group ends it. Torch is first imported in here."""
        check_install(facts)
        _use_rays_titles()
        from workers.rank.rank_worker import run_rank

        host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        run_rank(rank, endpoint, life_secret(facts.secret, group), group=group, host=host)


def _use_rays_titles() -> None:
    """Ray has moved this process's argument memory: the setproctitle package no longer finds it, Ray's own does."""
    import setproctitle

    setproctitle.setproctitle = ray._raylet.setproctitle


class RayExecutor:
    """Executor over Ray actors. `placement_group` has a bundle per rank after the coordinator's."""

    def __init__(
        self,
        settings: EngineSettings,
        facts: ServiceFacts,
        group: str,
        placement_group: Any,
        host: str,
        on_lost: Callable[[str], None],
    ) -> None:
        """on_lost(message) is called once, from a watcher's thread, when a rank has died or is frozen."""
        self._settings = settings
        self._facts = facts
        self._name = group
        self._placement_group = placement_group
        self._host = host
        self._on_lost = on_lost
        self._actors: list[Any] = []
        self._dead: str | None = None
        self._closing = False
        self._telling = threading.Lock()
        self._group: RankGroup | None = None

    def start(self) -> ExecutorReady:
        """Creates the actors and brings the ranks up."""
        assert self._group is None, "start() is called once"
        shared = self._facts.groups_on_node
        self._group = RankGroup(
            self._settings,
            life_secret(self._facts.secret, self._name),
            self._lost,
            self._host,
            shared,
            self._tell,
            host_socket=self._facts.host_socket,
        )
        runs = [self._run_rank(rank, self._group.endpoint) for rank in range(self._group.world_size)]
        threading.Thread(target=self._watch, args=(runs,), name="tandem-watch", daemon=True).start()
        return self._group.start()

    def submit(self, plan: StepPlan) -> None:
        assert self._group is not None
        self._group.submit(plan)

    def wait(self, timeout_s: float) -> StepResult | None:
        assert self._group is not None
        return self._group.wait(timeout_s)

    def transfer(self, transfer: Transfer | AdapterMove) -> None:
        assert self._group is not None
        self._group.transfer(transfer)

    def transfers_done(self) -> list[TransferDone]:
        assert self._group is not None
        return self._group.transfers_done()

    def loading(self) -> tuple[int, int]:
        """Bytes of weights that are loaded, and of how many; (0, 0) before that is known. From any thread."""
        return self._group.loading() if self._group is not None else (0, 0)

    def silent_s(self) -> float:
        """How long a rank has given no sign of life, 0 while there is no doubt. From any thread."""
        return self._group.silent_s() if self._group is not None else 0.0

    def close(self) -> None:
        """Asks the ranks to exit, or ends them when they cannot be asked any more; then ends the actors. Idempotent."""
        if self._group is None or self._closing:
            return
        self._closing = True
        if self._dead is None and not self._group.is_broken:
            self._group.shut_down()
        else:
            self._kill_ranks()
        self._group.close()
        for actor in self._actors:
            ray.kill(actor)

    def _run_rank(self, rank: int, endpoint: str) -> Any:
        on_gpu = self._facts.device == "cuda"
        actor_class = ray.remote(RankActor).options(
            num_cpus=1 if on_gpu else CPU_SHARE,
            num_gpus=1 if on_gpu else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=rank + 1
            ),
        )
        actor = actor_class.remote()
        self._actors.append(actor)
        return actor.run.remote(rank, endpoint, self._name, self._facts)

    def _watch(self, runs: list[Any]) -> None:
        """Blocks until the first rank's run() ends, however it does, and tells of it whatever Ray says."""
        try:
            done, _ = ray.wait(runs, num_returns=1)
            message = f"rank {runs.index(done[0])} of group {self._name} {_how_it_ended(done[0])}"
        except Exception as error:
            message = f"the ranks of group {self._name} can no longer be watched: {_first_line(error)}"
        self._tell(message)

    def _tell(self, message: str) -> None:
        """Once, on the thread of the watcher that saw it first. A frozen rank is ended before anyone hears of it: it
        must neither wake up later nor hold memory that the group's successor needs."""
        with self._telling:
            if self._closing or self._dead is not None:
                return
            self._dead = message
        self._kill_ranks()
        self._on_lost(message)

    def _kill_ranks(self) -> None:
        """SIGKILL, which a stopped process obeys too. Those on other machines end with their actors."""
        for hello in self._group.hellos if self._group is not None else ():
            if hello.host == self._host:
                kill_rank(hello.pid, self._name)

    def _lost(self) -> str | None:
        return self._dead


def kill_rank(pid: int, group: str) -> None:
    """Ends the process if it is a rank of that group: the number may be another process's by now."""
    try:
        process = psutil.Process(pid)
        if " ".join(process.cmdline()).startswith(f"tandem rank {group} "):
            process.kill()
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        log.warning("rank process %d of group %s cannot be ended: %s", pid, group, error)


def _how_it_ended(run: Any) -> str:
    """In words; `run` has ended."""
    try:
        ray.get(run)
    except ray.exceptions.RayActorError:
        return "has died"
    except ray.exceptions.RayTaskError as error:
        return f"failed: {_first_line(error.cause)}"
    except Exception as error:
        return f"failed: {_first_line(error)}"
    return "has ended"


def _first_line(error: object) -> str:
    """The first line with words, else the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
