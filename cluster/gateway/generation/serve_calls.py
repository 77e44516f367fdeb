"""Caller over a Serve deployment handle: the control half of a request, one handle call from dispatch to end."""

from typing import Any

from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.wire.version import with_version, without_version

MOST_BY_VALUE = 2**20
"""Bytes of a request that travel in the call itself. Replicas take at most 4 MiB there; the rest of the message is
small. Larger ones go through Ray's object store, which costs milliseconds and has no limit."""


class ServeCaller:
    """Calls `generate` of the coordinator deployment; the router of cluster/routing picks the group by the hint. model:
    digest of the gateway's."""

    def __init__(self, handle: Any, model: str = "") -> None:
        self._model = model
        self._by_value = handle.options(method_name="generate", _by_reference=False)
        self._by_reference = handle.options(method_name="generate", _by_reference=True)

    def call(self, payload: bytes, hint: RouteHint) -> Any:
        """Implements Caller, with Serve's response."""
        method = self._by_value if len(payload) <= MOST_BY_VALUE else self._by_reference
        return method.remote(with_version(payload, model=self._model), hint=hint)

    async def answer(self, call: Any) -> memoryview:
        """Implements Caller. OtherVersion also when the group has another model."""
        result = await call
        assert isinstance(result, bytes)
        return without_version(result, self._model)
