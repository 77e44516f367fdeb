"""KvTeller: tells gateways of a group's KV, from the engine's thread, between two of its steps.

    follow(gateways) --> facts and a snapshot to each new one --> changes every TELL_S, or nothing said every QUIET_S

A gateway that asks, or whose connection was broken, gets a snapshot: what was on its way may be lost. The empty message
is there so that a loss of the last message is noticed too. Next: cluster/wire/token_channel.py, which sends; at the
gateway cluster/routing/told_prefixes.py.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import ReplyTo

TELL_S = 0.2
"""Least pause between two messages to a gateway. A router counts what it has sent itself meanwhile."""
QUIET_S = 1.0


@runtime_checkable
class KvLinks(Protocol):
    """Connections to gateways that can be told of KV: a TokenSender."""

    def open(self, reply_to: ReplyTo) -> None:
        """Connects, unless there is a connection."""
        ...

    def tell(self, reply_to: ReplyTo, message: KvFacts | KvEvents) -> bool:
        """Sends a message; False when there is no such link, or its connection is broken."""
        ...

    def need_snapshot(self) -> list[ReplyTo]:
        """Returns the gateways that have asked for a snapshot since the last call, or that are connected again."""
        ...


@dataclass(slots=True, eq=False)
class _Follower:
    """One gateway. number: of the last message to it. sent_s: when."""

    needs_snapshot: bool = True
    number: int = 0
    sent_s: float = -math.inf


class KvTeller:
    """Tells all gateways that follow. One thread."""

    def __init__(self, kv: GroupKv, links: KvLinks, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._links = links
        self._clock = clock
        self._followers: dict[ReplyTo, _Follower] = {}
        self._due_s = -math.inf

    def follow(self, gateways: Iterable[ReplyTo]) -> None:
        """Tells these gateways from now on, and no others. Called again, it connects to those that were lost."""
        before, self._followers = self._followers, {}
        for gateway in gateways:
            self._links.open(gateway)
            self._followers[gateway] = before.get(gateway) or _Follower()

    def wait_s(self) -> float:
        """Returns the seconds until tell() has something to do while the engine does nothing; inf without gateways."""
        if not self._followers:
            return math.inf
        now_s = self._clock()
        if self._kv.journal.has_changes or any(one.needs_snapshot for one in self._followers.values()):
            return max(0.0, self._due_s - now_s)
        return max(0.0, min(one.sent_s for one in self._followers.values()) + QUIET_S - now_s)

    def tell(self) -> None:
        """Sends what is due. Called in each turn of the engine's loop; never waits."""
        for gateway in self._links.need_snapshot():
            if gateway in self._followers:
                self._followers[gateway].needs_snapshot = True
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + TELL_S
        changes, waiting = self._kv.take_changes(), dict[ReplyTo, _Follower]()
        for gateway, one in self._followers.items():
            if changes is None or one.needs_snapshot:
                waiting[gateway] = one
                one.needs_snapshot = True
            elif any(changes) or now_s - one.sent_s >= QUIET_S:
                one.number += 1
                one.needs_snapshot = not self._links.tell(gateway, KvEvents(gateway.nonce, one.number, *changes))
                one.sent_s = now_s
        self._tell_one_of(waiting, now_s)

    def _tell_one_of(self, waiting: dict[ReplyTo, _Follower], now_s: float) -> None:
        """Sends a snapshot to the one that has waited longest: of 60,000 keys it holds the engine for 30 ms."""
        for gateway, one in sorted(waiting.items(), key=lambda item: item[1].sent_s):
            self._tell_all(gateway, one, now_s)
            if not one.needs_snapshot:
                return

    def _tell_all(self, gateway: ReplyTo, one: _Follower, now_s: float) -> None:
        one.needs_snapshot, one.sent_s = True, now_s
        if not self._links.tell(gateway, replace(self._kv.facts, nonce=gateway.nonce)):
            return
        for part in self._kv.journal.snapshot(gateway.nonce):
            if not self._links.tell(gateway, part):
                return
            one.number = part.number
        one.needs_snapshot = False
