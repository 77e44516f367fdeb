"""Quarantine: prompts that have ended groups, by digest. They are refused before they are dispatched.

Kept by each gateway for an hour; with several gateways their records carry the digests to the others.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable

from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import GenerationRequest

KEPT_S = 3600.0
MOST = 1000


class Convicted(RequestRefused):
    """Refusal of a prompt that has ended a group by itself, or under which too many were lost."""

    def __init__(self) -> None:
        message = "Worker groups were lost while they ran this prompt. The prompt is not run again."
        super().__init__(message, code="request_poisoned", status=500)


class Quarantine:
    """Digests and when they were added. others: digests that other gateways have."""

    def __init__(self, clock: Callable[[], float], others: Callable[[], Iterable[str]] = lambda: ()) -> None:
        self._clock = clock
        self._others = others
        self._added: dict[str, float] = {}

    def add(self, request: GenerationRequest) -> None:
        """Refuses this prompt with this adapter from now on. Beyond MOST the oldest are forgotten."""
        digest = digest_of(request)
        self._added.pop(digest, None)
        self._added[digest] = self._clock()
        while len(self._added) > MOST:
            del self._added[next(iter(self._added))]

    def digests(self) -> list[str]:
        """The digests of this gateway that are not too old. May be called on any thread."""
        before_s = self._clock() - KEPT_S
        return [digest for digest, at in list(self._added.items()) if at > before_s]

    def check(self, requests: Iterable[GenerationRequest]) -> None:
        """Raises Convicted for a prompt in quarantine. Hashes nothing while there is none."""
        refused = {*self.digests(), *self._others()}
        if refused and any(digest_of(request) in refused for request in requests):
            raise Convicted


def digest_of(request: GenerationRequest) -> str:
    """Names a prompt and its adapter; sampling parameters are left out, for retries may change them."""
    hashed = hashlib.blake2b(array("I", request.prompt_token_ids).tobytes(), digest_size=16)
    hashed.update(b"" if request.adapter is None else request.adapter.digest.encode())
    return hashed.hexdigest()
