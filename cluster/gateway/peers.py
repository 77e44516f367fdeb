"""What a gateway says for the others of its service too: metrics, and requests in hand."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.coordination.gateways import GatewayRecord

LABEL = "gateway"
"""Added to every sample where a service has several gateways, as `engine` names a group."""


class Peers(Protocol):
    """The other gateways of a service."""

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        """Prometheus text of all gateways, of this one's. own_of_tenants: its families that name tenants, empty when
        nobody's are to be shown."""
        ...

    def in_hand(self) -> int:
        """HTTP requests that the others have in hand."""
        ...


class Alone:
    """There are none."""

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        return own + own_of_tenants

    def in_hand(self) -> int:
        return 0


class Together:
    """Their last records, up to a few seconds old. `others` is asked each time."""

    def __init__(self, gateway_id: str, others: Callable[[], Sequence[GatewayRecord]]) -> None:
        self._id = gateway_id
        self._others = others

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        texts = [(self._id, own), (self._id, own_of_tenants)]
        for record in self._others():
            texts += [(record.gateway, record.metrics)]
            texts += [(record.gateway, record.tenant_metrics)] if own_of_tenants else []
        return await asyncio.to_thread(merged, [(name, text.decode()) for name, text in texts])

    def in_hand(self) -> int:
        return sum(record.in_hand for record in self._others())


class _Families:
    """A collector of families that are there."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def merged(texts: Iterable[tuple[str, str]]) -> bytes:
    """Prometheus text of many, each sample with the name of its own; a family's samples stand together."""
    families: dict[str, Metric] = {}
    for name, text in texts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [sample._replace(labels=sample.labels | {LABEL: name}) for sample in found.samples]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
