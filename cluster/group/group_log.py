"""Lines of a group's log: what its engine has done in the last ten seconds, while there is work.

Made of EngineStats, which exist anyway, by a task of the coordinator; nothing is counted for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from tandem.workers.engine.base.stats import EngineStats

log = logging.getLogger("tandem.group")
PERIOD_S = 10.0


class GroupLog:
    """The lines of one group. read: its last statistics, None before there are any."""

    def __init__(
        self, group: str, read: Callable[[], EngineStats | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._read = read
        self._clock = clock
        self._before: EngineStats | None = None
        self._at_s = clock()

    async def run(self) -> None:
        """Logs every PERIOD_S, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.write()

    def write(self) -> None:
        """Logs what has happened since the last call, if there was work."""
        now, now_s = self._read(), self._clock()
        if now is None:
            return
        before, seconds = self._before, max(now_s - self._at_s, 1e-3)
        self._before, self._at_s = now, now_s
        if line := work_line(before, now, seconds):
            log.info("group %s: %s", self._group, line)


def work_line(before: EngineStats | None, now: EngineStats, seconds: float) -> str:
    """Returns the line for a time between two statistics; empty without any work. before: None at the start."""

    def grown(name: str) -> int:
        return int(getattr(now, name) - (0 if before is None else getattr(before, name)))

    refused = _grown(None if before is None else before.rejected, now.rejected)
    ended = _grown(None if before is None else before.finished, now.finished)
    steps = grown("steps")
    if not (steps or refused or ended or now.running or now.waiting):
        return ""
    looked_up = grown("prefix_cache_queries")
    parts = [
        f"running {now.running}",
        f"waiting {now.waiting}",
        f"KV {now.kv_usage:.1%}",
        f"prompt {grown('prompt_tokens') / seconds:.1f} tokens/s",
        f"generation {grown('generation_tokens') / seconds:.1f} tokens/s",
        f"steps {steps}",
    ]
    if looked_up:
        parts.append(f"prefix hits {grown('prefix_cache_hits') / looked_up:.1%}")
    if drafted := _drafts(before, now):
        parts.append(drafted)
    if preempted := grown("preemptions"):
        parts.append(f"preempted {preempted}")
    return ", ".join([*parts, *_named("ended", ended), *_named("refused", refused), *_adapters(before, now)])


def _grown(before: Mapping[str, int] | None, now: Mapping[str, int]) -> dict[str, int]:
    """Returns what has been added to counts by name, without zeros."""
    each = {name: count - (0 if before is None else before.get(name, 0)) for name, count in now.items()}
    return {name: count for name, count in each.items() if count}


def _drafts(before: EngineStats | None, now: EngineStats) -> str:
    """Returns the share of draft tokens that were accepted meanwhile; empty where there were none."""
    if now.drafts is None:
        return ""
    old = None if before is None else before.drafts
    drafted, accepted = now.drafts.num_draft_tokens, now.drafts.num_accepted
    if old is not None:
        drafted, accepted = drafted - old.num_draft_tokens, accepted - old.num_accepted
    return f"drafts accepted {accepted / drafted:.1%}" if drafted else ""


def _named(what: str, counts: Mapping[str, int]) -> list[str]:
    return [f"{what} {' '.join(f'{name}={count}' for name, count in counts.items())}"] if counts else []


def _adapters(before: EngineStats | None, now: EngineStats) -> list[str]:
    """Adapters that were loaded, evicted and refused meanwhile; their names are tenants' words."""
    if now.adapters is None:
        return []
    names = ("loads", "evictions", "refused")
    old = None if before is None else before.adapters
    counts = _grown(
        None if old is None else {name: getattr(old, name) for name in names},
        {name: getattr(now.adapters, name) for name in names},
    )
    return _named("adapters", counts)
