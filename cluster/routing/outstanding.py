"""Outstanding tokens of each group for this gateway, by the gateway's own count.

Groups report those of other gateways, by gateway. A report is seconds old when it is read, so its value for this
gateway only removes old calls whose end was never seen. Kept by the Serve router; one per gateway process, one thread.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from tandem.workers.messages.request import GenerationRequest

OLD_S = 60.0
"""A call that was routed so long ago is in every report, if it was dispatched at all."""


class _RoutedCall(msgspec.Struct):
    """One call that has not ended."""

    group: str
    tenant: str
    tokens: int
    began_s: float
    tried: set[str] = set()  # groups that did not take it


class Outstanding:
    """Tokens by group, and by group and tenant. Unknown groups and unknown calls count as nothing."""

    def __init__(self) -> None:
        self._calls: dict[str, _RoutedCall] = {}
        self._here: dict[str, int] = {}
        self._tenants = defaultdict[str, Counter[str]](Counter)
        self._beyond: dict[str, tuple[int, float]] = {}
        """Tokens, by group, that are counted here and that no report since a moment had, and that moment."""

    def begin(self, call_id: str, group: str, tenant: str, tokens: int, now_s: float) -> None:
        """A call goes to a group. A call that is routed again leaves its first group."""
        before = self._remove(call_id)
        tried = (before.tried | {before.group}) - {group} if before is not None else set()
        self._calls[call_id] = _RoutedCall(group, tenant, tokens, now_s, tried)
        self._here[group] = self._here.get(group, 0) + tokens
        self._tenants[tenant][group] += tokens

    def end(self, call_id: str, group: str) -> None:
        """Counts the end of a call at a group. The end of an earlier try may come after the next has begun."""
        call = self._calls.get(call_id)
        if call is not None and group not in call.tried:
            self._remove(call_id)

    def holds(self, call_id: str) -> bool:
        """True while this call is counted."""
        return call_id in self._calls

    def reconcile(self, reports: Mapping[str, int], now_s: float) -> None:
        """Compares the counts with the groups' last reports of this gateway's tokens. Serve gives no notice of a call
        that was cancelled between choice and dispatch: old calls are forgotten by as many tokens as the count was above
        every report for a while."""
        for group in [group for group, tokens in self._here.items() if tokens or group in self._beyond]:
            if group in reports:
                self._reconcile(group, reports[group], now_s)

    def _reconcile(self, group: str, reported: int, now_s: float) -> None:
        beyond, since_s = self._beyond.get(group, (self.here(group), now_s))
        beyond = min(beyond, self.here(group) - reported)
        if beyond <= 0:
            self._beyond.pop(group, None)
        elif now_s - since_s < OLD_S:
            self._beyond[group] = (beyond, since_s)
        else:
            self._forget(group, beyond, now_s - OLD_S)
            self._beyond.pop(group)

    def _forget(self, group: str, tokens: int, began_s: float) -> None:
        """Removes calls that began before that time, the oldest first, of so many tokens at most."""
        old = [(i, c.tokens) for i, c in self._calls.items() if c.group == group and c.began_s <= began_s]
        for call_id, of_call in old:
            if of_call <= tokens:
                self._remove(call_id)
                tokens -= of_call

    def here(self, group: str) -> int:
        return self._here.get(group, 0)

    def added_to(self, elsewhere: Iterable[tuple[str, int]]) -> list[int]:
        """The tokens of each group here and elsewhere, in the order given."""
        here = self._here.get
        return [here(group, 0) + tokens for group, tokens in elsewhere]

    def of_tenant(self, tenant: str, groups: Iterable[str]) -> list[int]:
        """The tokens of a tenant's calls from here, for each group."""
        here: Mapping[str, int] = self._tenants.get(tenant, {})
        return [here.get(group, 0) for group in groups]

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone, and the calls that went to them."""
        alive = set(groups)
        self._beyond = {g: b for g, b in self._beyond.items() if g in alive}
        for call_id in [i for i, call in self._calls.items() if call.group not in alive]:
            self._remove(call_id)
        self._here = {g: n for g, n in self._here.items() if g in alive}

    def _remove(self, call_id: str) -> _RoutedCall | None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._here[call.group] -= call.tokens
            here = self._tenants[call.tenant]
            here[call.group] -= call.tokens
            if not here[call.group]:
                del here[call.group]
            if not here:
                del self._tenants[call.tenant]
        return call


def tokens_by_gateway(owed: Iterable[tuple[str, int]]) -> dict[str, int]:
    """A group's report of (gateway, tokens) of all requests that have not ended."""
    total: dict[str, int] = {}
    for gateway, tokens in owed:
        total[gateway] = total.get(gateway, 0) + tokens
    return total


def elsewhere(reported: Mapping[str, int], gateway: str) -> int:
    """The part of what a group reported that `gateway` did not send."""
    return sum(tokens for name, tokens in reported.items() if name != gateway)


def cost_tokens(request: GenerationRequest) -> int:
    """Prompt once, and the most output that all choices may produce."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens * request.sampling.n
