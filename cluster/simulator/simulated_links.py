"""SimulatedLinks: the token channel of one group, as far as KV events go over it: messages that arrive a moment later
at the gateways' ToldPrefixes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import ReplyTo

CHANNEL_S: Final = 0.001
"""Time of a message on the channel."""
LIFE: Final = 1
"""A simulated group has one: another one has another name."""
TakesTold = Callable[[str, int, KvFacts | KvEvents], None]
"""Takes the group, its life and a message."""


class SimulatedLinks:
    """Implements KvLinks for group `group`. gateways: what takes the messages, by name."""

    def __init__(self, group: str, clock: VirtualClock, gateways: Mapping[str, TakesTold]) -> None:
        self._group, self._clock, self._gateways = group, clock, gateways
        self._asked: dict[str, None] = {}

    def open(self, reply_to: ReplyTo) -> None:
        """Implements KvLinks."""

    def tell(self, reply_to: ReplyTo, message: KvFacts | KvEvents) -> bool:
        """Implements KvLinks."""
        self._clock.after(CHANNEL_S, partial(self._gateways[reply_to.nonce], self._group, LIFE, message))
        return True

    def ask(self, gateway: str) -> None:
        """Has that gateway get a snapshot with the next message."""
        self._asked[gateway] = None

    def need_snapshot(self) -> list[ReplyTo]:
        """Implements KvLinks."""
        asked, self._asked = self._asked, {}
        return [link_of(gateway) for gateway in asked]


def link_of(gateway: str) -> ReplyTo:
    """Returns the address of a simulated gateway."""
    return ReplyTo(gateway, gateway)
