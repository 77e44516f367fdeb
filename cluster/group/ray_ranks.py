"""The ranks of a group as Ray actors in the bundles of the group's placement group (wire/group_shape.py).

Each actor runs workers/rank/rank_server.py in one call that never returns; from then on control is ZeroMQ, as with
local processes (workers/executor/rank_group.py). A watcher thread sees a dead rank within 30 ms, ProbeWatch a
frozen one within 6 s. Ranks die with this process.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.group.host_tier_actor import node_host_tiers
from tandem.cluster.process.exit_watch import ExitWatch
from tandem.cluster.ray_private.process_titles import use_rays_titles
from tandem.cluster.ray_private.ray_facts import node_resources
from tandem.cluster.wire.group_shape import group_shape, most_ranks
from tandem.cluster.wire.service_facts import ServiceFacts, check_node, open_log_of
from tandem.configs.schema import EngineSettings
from tandem.offload.host.host_process import region_bytes
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.executor.rank_process import rank_imports
from tandem.workers.messages.channel import life_secret

HELLO_POLL_S = 0.2
EXIT_TRIES, EXIT_POLL_S = 6, 0.004


class RankActor:
    """One rank. Gets exactly one call."""

    def run(self, rank: int, endpoint: str, secret: str, group: str, facts: ServiceFacts) -> bool:
        """Runs the rank until the group ends it. Torch is first imported in here. Returns whether SIGTERM ended it."""
        check_node(facts)
        open_log_of(facts, f"rank-{group}-{rank}")
        use_rays_titles()
        with rank_imports():
            from tandem.workers.rank.rank_server import TOLD_TO_END, ToldToEnd, run_rank

        def end(number: int, frame: Any) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise ToldToEnd

        host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        signal.signal(signal.SIGTERM, end)
        return run_rank(rank, endpoint, secret, group=group, host=host, gpu=_given_gpu()) == TOLD_TO_END


def ray_group(
    settings: EngineSettings,
    facts: ServiceFacts,
    group: str,
    placement_group: Any,
    host: str,
    on_lost: Callable[[str], None],
    on_told: Callable[[], None],
) -> RankGroup:
    """Returns an executor over Ray actors, not started. placement_group: of the group's shape. on_lost(message) is
    called once, from a watcher's thread, when a rank has died or is frozen; on_told() before it, when that rank was
    told to end.
    """
    shape = group_shape(settings.parallel, facts.device)
    num_ranks = settings.parallel.ranks_per_group
    nodes = nodes_of_bundles(placement_group)
    bundles = shape.bundle_of_rank(nodes)
    placed = RankPlaces(placement_group, bundles, shape.of_rank)

    def pids() -> list[int | None]:
        return [hello.pid if hello.host == host else None for hello in made.hellos]

    def host_sockets() -> Mapping[str, str] | None:
        gib = settings.cache.kv_offloading_gib
        if facts.host_socket is not None:
            return {host: facts.host_socket}
        node_of = {hello.host: nodes[bundle] for hello, bundle in zip(made.hellos, bundles, strict=True)}
        return None if gib is None else node_host_tiers(facts.service_id, region_bytes(gib) * facts.max_groups, node_of)

    def most(own: int) -> int:
        device = "GPU" if "GPU" in shape.of_rank else "CPU"
        there = node_resources(settings.parallel.label_selector, device)
        return most_ranks(own, num_ranks, facts.max_groups, shape.of_rank, there)

    ranks = RayRanks(num_ranks, facts, group, placed, lambda why: made.report(why), on_told, pids)
    made = RankGroup(
        settings,
        ranks,
        secret=life_secret(facts.secret, group),
        name=group,
        host=host,
        most_ranks=most,
        on_lost=on_lost,
        host_sockets=host_sockets,
    )
    return made


class RankPlaces(NamedTuple):
    """The bundle of each rank in a placement group, and the resources that a rank asks for."""

    group: Any
    bundles: Sequence[int]
    of_rank: Mapping[str, float]


def nodes_of_bundles(placement_group: Any) -> list[str]:
    """Returns the id of the node of each bundle of a placement group that is placed."""
    placed = ray.util.placement_group_table(placement_group)["bundles_to_node_id"]
    return [placed[bundle] for bundle in range(len(placed))]


class RayRanks:
    """RankLauncher of num_ranks Ray actors. placed: their bundles. on_end(message): called once, from
    a thread of its own, when the first of them has ended; on_told() before it, when SIGTERM has ended that one. pids:
    process ids by rank, None for another machine's; empty before they are known."""

    def __init__(
        self,
        num_ranks: int,
        facts: ServiceFacts,
        group: str,
        placed: RankPlaces | None,
        on_end: Callable[[str], None],
        on_told: Callable[[], None],
        pids: Callable[[], Sequence[int | None]] = lambda: (),
    ) -> None:
        self._num_ranks = num_ranks
        self._facts = facts
        self._group = group
        self._placed = placed
        self._on_end = on_end
        self._on_told = on_told
        self._pids = pids
        self._exits = ExitWatch()
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._ended: str | None = None

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        placed = self._placed
        assert placed is not None
        actor_class = ray.remote(RankActor).options(
            num_cpus=placed.of_rank.get("CPU", 0),
            num_gpus=placed.of_rank.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placed.group, placement_group_bundle_index=placed.bundles[rank]
            ),
        )
        actor = actor_class.remote()
        self._actors.append(actor)
        self._runs.append(actor.run.remote(rank, endpoint, secret, self._group, self._facts))
        if len(self._runs) == self._num_ranks:
            threading.Thread(target=self._watch, args=(self._runs,), name="tandem-watch", daemon=True).start()

    def lost(self) -> str | None:
        return self._ended

    def kill(self, grace_s: float) -> None:
        """Ends the actors, once their ranks have left or grace_s is over."""
        if grace_s and self._runs:
            with suppress(Exception):  # without Ray nobody can wait for them
                ray.wait(self._runs, num_returns=len(self._runs), timeout=grace_s)
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, runs: list[Any]) -> None:
        """Blocks until the first rank's run() ends, and reports it."""
        try:
            ended = self._first_to_end(runs)
            was_told, how = _how_it_ended(ended)
            rank = runs.index(ended)
            message = f"rank {rank} of group {self._group} {how or self._how_it_died(rank)}"
            if was_told:
                self._on_told()
        except Exception as error:
            message = f"the ranks of group {self._group} can no longer be watched: {_first_line(error)}"
        self._exits.close()
        self._ended = message
        self._on_end(message)

    def _first_to_end(self, runs: list[Any]) -> Any:
        """Blocks until a rank's run() ends, and returns that run. Opens the ranks' processes once they are known."""
        while not self._pids():
            done, _ = ray.wait(runs, num_returns=1, timeout=HELLO_POLL_S)
            if done:
                return done[0]
        for pid in self._pids():
            if pid is not None:
                self._exits.watch(pid)
        return ray.wait(runs, num_returns=1)[0][0]

    def _how_it_died(self, rank: int) -> str:
        """Words for a rank that Ray says is dead: Ray itself does not know of what."""
        pids = self._pids()
        pid = pids[rank] if pids else None
        for _ in range(EXIT_TRIES if pid is not None else 0):
            if pid is not None and (how := self._exits.how_it_ended(pid)) is not None:
                return how
            time.sleep(EXIT_POLL_S)  # until its parent has heard of it
        why = "" if not pids else ": this kernel does not tell" if pid is not None else ": it was on another node"
        return f"has died (exit status or signal unknown{why})"


def _given_gpu() -> str | None:
    """Returns the GPU that Ray has given to this actor, if any. Ray also hides the others, unless it is told not to."""
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return str(gpus[0]) if gpus else None


def _how_it_ended(run: Any) -> tuple[bool, str | None]:
    """Returns whether a rank was told to end, and how its run ended, for messages; None where its process died."""
    try:
        was_told = bool(ray.get(run))
    except ray.exceptions.RayActorError:
        return False, None
    except ray.exceptions.OutOfMemoryError:
        return False, "was killed by Ray, as its node was nearly out of memory (RAY_memory_usage_threshold)"
    except ray.exceptions.RayTaskError as error:
        return False, f"failed: {_first_line(error.cause)}"
    except Exception as error:
        return False, f"failed: {_first_line(error)}"
    return was_told, "was told to end" if was_told else "has ended"


def _first_line(error: object) -> str:
    """The first line of the error that is not empty, else the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
