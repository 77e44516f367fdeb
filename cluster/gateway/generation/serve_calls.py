"""Caller over a Serve deployment handle: the control half of a request, one handle call from dispatch to end."""

from collections.abc import Sequence
from typing import Any


class ServeCall:
    """A handle call in flight."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def answer(self) -> bytes:
        result = await self._response
        assert isinstance(result, bytes)
        return result

    def cancel(self) -> None:
        self._response.cancel()


class ServeCaller:
    """Calls `generate` of the coordinator deployment over gRPC; the router of cluster/routing picks the group."""

    def __init__(self, handle: Any) -> None:
        # by value: arguments and answers are small bytes, and the object store costs milliseconds
        self._method = handle.options(method_name="generate", _by_reference=False)

    def call(self, payload: bytes, missing: Sequence[str] = ()) -> ServeCall:
        options = {"missing": list(missing)} if missing else {}
        return ServeCall(self._method.remote(payload, **options))
