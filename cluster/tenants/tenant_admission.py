"""Admission of tenants' requests: admit, settle, headers. Implemented by quota.py; open in `run-batch`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tandem.cluster.tenants.tenant import NO_LIMITS, Limits
from tandem.workers.messages.errors import RequestRefused

Reason = Literal["requests", "tokens", "concurrency", "kv_share", "budget", "budget_reserved"]
Header = tuple[bytes, bytes]


class OverLimit(RequestRefused):
    """A tenant is over a limit. retry_after_s: when it may be worth trying again; None: trying again is no use."""

    def __init__(self, message: str, *, reason: Reason, retry_after_s: float | None, code: str) -> None:
        super().__init__(message, code=code, status=429)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Reservation(NamedTuple):
    """The tokens that an admitted request holds until it is settled."""

    tenant: str
    tokens: int = 0  # prompt and allowed output
    charge: int = 0  # of those, taken from the minute's bucket
    wanted: int = 0  # of those, what the bucket must hold
    is_counted: bool = False  # False: its tenant has no limit that needs counting


class Tenancy:
    """The limits of tenants, and what they have left. As it is no tenant has a limit: `tandem run-batch`, and tests."""

    async def admit(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
    ) -> Reservation:
        """Reserves a request of so many prompt tokens and at most so many of output. OverLimit when it is too much.

        is_open_ended: the client named no limit of output; output_tokens are all that the context holds.
        Called by the request's owner task. Every reservation is settled once.
        """
        del prompt_tokens, output_tokens, is_open_ended
        return Reservation(tenant)

    def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """The request is over and is billed so many tokens. Never waits, never fails."""

    def headers(self, tenant: str) -> Sequence[Header]:
        """The x-ratelimit-* headers of this moment, by this gateway's count; none for a tenant without such limits."""
        del tenant
        return ()

    def limits(self, tenant: str) -> Limits:
        """The limits as last seen; NO_LIMITS for a name that is no tenant's."""
        del tenant
        return NO_LIMITS
