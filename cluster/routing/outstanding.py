"""How many tokens each group still owes this gateway, as it counts them itself.

What groups owe other gateways they report now and then, by gateway: a report is seconds old when it is read, so what it
says of this gateway's own requests is left out. Kept by the Serve router; one per gateway process, one thread.
"""

from collections.abc import Iterable, Mapping

from workers.messages import GenerationRequest


class Outstanding:
    """Tokens by group. Unknown groups and unknown calls count as nothing."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, int, float]] = {}
        self._here: dict[str, int] = {}

    def begin(self, call_id: str, group: str, tokens: int, now_s: float) -> None:
        """A call goes to a group. A call that is routed again leaves its first group."""
        self.end(call_id)
        self._calls[call_id] = (group, tokens, now_s)
        self._here[group] = self._here.get(group, 0) + tokens

    def end(self, call_id: str) -> None:
        """A call ended, however it did."""
        group, tokens, _ = self._calls.pop(call_id, ("", 0, 0.0))
        if group in self._here:
            self._here[group] -= tokens

    def holds(self, call_id: str) -> bool:
        """Is this call counted?"""
        return call_id in self._calls

    def forget_older_than(self, began_s: float) -> None:
        """Ends calls that began before that time. Calls are kept in the order of their beginning."""
        while self._calls:
            call_id, (_, _, began) = next(iter(self._calls.items()))
            if began >= began_s:
                return
            self.end(call_id)

    def here(self, group: str) -> int:
        return self._here.get(group, 0)

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone, and the calls that went to them."""
        alive = set(groups)
        self._here = {g: n for g, n in self._here.items() if g in alive}
        self._calls = {c: entry for c, entry in self._calls.items() if entry[0] in alive}


def by_gateway(owed: Iterable[tuple[str, int]]) -> dict[str, int]:
    """A group's report of (gateway, tokens) of all requests that have not ended."""
    total: dict[str, int] = {}
    for gateway, tokens in owed:
        total[gateway] = total.get(gateway, 0) + tokens
    return total


def elsewhere(reported: Mapping[str, int], gateway: str) -> int:
    """Of what a group reported, what `gateway` did not send."""
    return sum(tokens for name, tokens in reported.items() if name != gateway)


def gateway_of(request: GenerationRequest) -> str:
    """Names this life of the gateway that sent it."""
    return request.reply_to.nonce if request.reply_to is not None else ""


def cost_tokens(request: GenerationRequest) -> int:
    """Prompt once, and the most output that all choices may produce."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens * request.sampling.n
