"""Outstanding tokens of each group for this gateway, by the gateway's own count.

Groups report those of other gateways, by gateway. A report is seconds old when it is read, so its value for this
gateway only removes old calls whose end was never seen. Here a call counts what it still costs its group: less than
what the group reports of it where the group has KV of the prompt, or part of the answer is out. Kept by the Serve
router; one per gateway process, one thread.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from tandem.cluster.routing.group_loads import TokensG
from tandem.workers.messages.request import GenerationRequest

OLD_S = 60.0
"""A call that was routed so long ago is in every report, if it was dispatched at all."""


class _RoutedCall(msgspec.Struct):
    """One call that has not ended."""

    group: str
    tenant: str
    tokens: int  # still to come
    reported: int  # what the group reports of it until its end
    began_s: float
    request_id: str
    tried: set[str] = set()  # groups that did not take it


class Outstanding:
    """Tokens by group, and by group and tenant. Unknown groups and unknown calls count as nothing."""

    def __init__(self) -> None:
        self._calls: dict[str, _RoutedCall] = {}
        self._call_of: dict[str, str] = {}  # by request
        self._here: dict[str, int] = {}
        self._reported: dict[str, int] = {}  # what the groups will report of the calls here
        self._tenants = defaultdict[str, Counter[str]](Counter)
        self._places: dict[str, int] = {}
        self.total = 0  # of the groups of the columns
        self._here_G: TokensG = np.zeros(0, np.int64)  # `_here`, and below `_tenants`, as columns
        self._tenants_G: dict[str, TokensG] = {}  # of those that were asked for
        self._beyond: dict[str, tuple[int, float]] = {}
        """Tokens, by group, that are counted here and that no report since a moment had, and that moment."""

    def begin(
        self,
        call_id: str,
        group: str,
        tenant: str,
        tokens: int,
        now_s: float,
        *,
        reported: int | None = None,
        request_id: str = "",
    ) -> None:
        """A call goes to a group. A call that is routed again leaves its first group. reported: what the group will
        report of it, if that is not `tokens`. request_id: for correct()."""
        before = self._remove(call_id)
        tried = (before.tried | {before.group}) - {group} if before is not None else set()
        reported = tokens if reported is None else reported
        self._calls[call_id] = _RoutedCall(group, tenant, tokens, reported, now_s, request_id, tried)
        if request_id:
            self._call_of[request_id] = call_id
        self._reported[group] = self._reported.get(group, 0) + reported
        self._add(group, tenant, tokens)

    def correct(self, request_id: str, tokens: int) -> None:
        """Notes what is still to come of a request that goes on. One that is not counted stays so."""
        call = self._calls.get(self._call_of.get(request_id, ""))
        if call is None:
            return
        self._add(call.group, call.tenant, tokens - call.tokens)
        call.tokens = tokens

    def end(self, call_id: str, group: str) -> None:
        """Counts the end of a call at a group. The end of an earlier try may come after the next has begun."""
        call = self._calls.get(call_id)
        if call is not None and group not in call.tried:
            self._remove(call_id)

    def group_of(self, call_id: str) -> str | None:
        """The group at which this call is counted; None if it is not."""
        call = self._calls.get(call_id)
        return None if call is None else call.group

    def holds(self, call_id: str) -> bool:
        """True while this call is counted."""
        return call_id in self._calls

    def reconcile(self, reports: Mapping[str, int], now_s: float) -> None:
        """Compares the counts with the groups' last reports of this gateway's tokens. Serve gives no notice of a call
        that was cancelled between choice and dispatch: old calls are forgotten by as many tokens as the count was above
        every report for a while."""
        for group in [group for group, tokens in self._reported.items() if tokens or group in self._beyond]:
            if group in reports:
                self._reconcile(group, reports[group], now_s)

    def _reconcile(self, group: str, reported: int, now_s: float) -> None:
        counted = self._reported[group]
        beyond, since_s = self._beyond.get(group, (counted, now_s))
        beyond = min(beyond, counted - reported)
        if beyond <= 0:
            self._beyond.pop(group, None)
        elif now_s - since_s < OLD_S:
            self._beyond[group] = (beyond, since_s)
        else:
            self._forget(group, beyond, now_s - OLD_S)
            self._beyond.pop(group)

    def _forget(self, group: str, tokens: int, began_s: float) -> None:
        """Removes calls that began before that time, the oldest first, of so many tokens at most."""
        old = [(i, c.reported) for i, c in self._calls.items() if c.group == group and c.began_s <= began_s]
        for call_id, of_call in old:
            if of_call <= tokens:
                self._remove(call_id)
                tokens -= of_call

    def here(self, group: str) -> int:
        return self._here.get(group, 0)

    def set_groups(self, groups: Sequence[str]) -> None:
        """The groups of the columns from now on, in their order."""
        self._places = {group: place for place, group in enumerate(groups)}
        self._here_G = self._column(self._here)
        self.total = int(self._here_G.sum())
        self._tenants_G.clear()

    def here_by_group(self) -> TokensG:
        """The tokens of each group. The array changes with the counts."""
        return self._here_G

    def tenants_with(self, tenant: str) -> int:
        """The number of tenants with calls from here that have not ended, and this one."""
        return len(self._tenants) + (tenant not in self._tenants)

    def of_tenant(self, tenant: str) -> TokensG:
        """The tokens of a tenant's calls from here, for each group. The array changes with the counts."""
        column = self._tenants_G.get(tenant)
        if column is None:
            column = self._column(self._tenants.get(tenant, {}))
            if tenant in self._tenants:
                self._tenants_G[tenant] = column
        return column

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone, and the calls that went to them."""
        alive = set(groups)
        self._beyond = {g: b for g, b in self._beyond.items() if g in alive}
        for call_id in [i for i, call in self._calls.items() if call.group not in alive]:
            self._remove(call_id)
        self._here = {g: n for g, n in self._here.items() if g in alive}  # of the others nothing is left
        self._reported = {g: n for g, n in self._reported.items() if g in alive}

    def _remove(self, call_id: str) -> _RoutedCall | None:
        call = self._calls.pop(call_id, None)
        if call is None:
            return None
        if self._call_of.get(call.request_id) == call_id:
            del self._call_of[call.request_id]
        self._reported[call.group] -= call.reported
        self._add(call.group, call.tenant, -call.tokens)
        here = self._tenants[call.tenant]
        if not here[call.group]:
            del here[call.group]
        if not here:
            del self._tenants[call.tenant]
            self._tenants_G.pop(call.tenant, None)
        return call

    def _add(self, group: str, tenant: str, tokens: int) -> None:
        self._here[group] = self._here.get(group, 0) + tokens
        self._tenants[tenant][group] += tokens
        if (place := self._places.get(group)) is not None:
            self._here_G[place] += tokens
            self.total += tokens
            if (column := self._tenants_G.get(tenant)) is not None:
                column[place] += tokens

    def _column(self, tokens: Mapping[str, int]) -> TokensG:
        return np.array([tokens.get(group, 0) for group in self._places], np.int64)


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
