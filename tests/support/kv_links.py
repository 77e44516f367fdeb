"""Links from groups to one gateway without sockets: what is told arrives at once, or is lost as the test says."""

from collections.abc import Callable

from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.thread.kv_teller import KvTeller
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import ReplyTo

GATEWAY = ReplyTo("tcp://127.0.0.1:1", "me")


class StraightLinks:
    """KvLinks of one life of a group to one gateway, whose ToldPrefixes takes what is told. lose: messages that will be
    lost on the way; is_cut: there is no connection."""

    def __init__(self, prefixes: ToldPrefixes, group: str, life: int, clock: Callable[[], float]) -> None:
        self._prefixes, self._group, self._life, self._clock = prefixes, group, life, clock
        self.told: list[KvFacts | KvEvents] = []
        self.lose = 0
        self.is_cut = False
        self.opened: list[ReplyTo] = []
        self._asked = False

    def ask(self) -> None:
        self._asked = True

    def open(self, reply_to: ReplyTo) -> None:
        self.opened.append(reply_to)

    def tell(self, reply_to: ReplyTo, message: KvFacts | KvEvents) -> bool:
        assert message.nonce == reply_to.nonce == GATEWAY.nonce
        if self.is_cut:
            return False
        if self.lose:
            self.lose -= 1
            return True
        self.told.append(message)
        if self._prefixes.take(self._group, self._life, message, self._clock()):
            self.ask()
        return True

    def need_snapshot(self) -> list[ReplyTo]:
        asked, self._asked = self._asked and not self.is_cut, False
        return [GATEWAY] if asked else []


def telling(
    kv: GroupKv, prefixes: ToldPrefixes, group: str, life: int, clock: Callable[[], float]
) -> tuple[KvTeller, StraightLinks]:
    """A teller that one gateway follows, and its links."""
    links = StraightLinks(prefixes, group, life, clock)
    teller = KvTeller(kv, links, clock)
    teller.follow([GATEWAY])
    return teller, links
