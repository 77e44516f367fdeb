"""ToldPrefixes: what groups have told this gateway of their KV, and how right that was.

    KvFacts, KvEvents --take--> indexes        request --overlaps--> tokens by group --> sent --> found: error in tokens

The keys of a prompt are made here as the groups make them (offload/kv/block_key.py), one by one until no group has the
next. A group that finds other than was predicted, for WRONG_S, is asked for a snapshot: so no error stays, whatever its
cause. All on the event loop; overlaps() of a long prompt is for a thread. Next: prefix_index.py; cluster/gateway/
services/prompt_overlaps.py, which calls it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from tandem.cluster.routing.prefix_index import PrefixIndex
from tandem.offload.kv.block_key import block_key, root_key
from tandem.workers.messages.kv_events import HEAD_BYTES, KvEvents, KvFacts
from tandem.workers.messages.request import GenerationRequest

ASK_AGAIN_S: Final = 1.0
EXPECT_AT_ONCE: Final = 128
"""Keys: a tenth of a millisecond of the event loop. Of one prompt no more are expected."""
WRONG_S: Final = 30.0
WRONG_SHARE: Final = 0.5
QUIET_LOST_S: Final = 30.0
"""A group says once a second that nothing is missing. What is known of one that has said nothing for so long may be old
in all parts, and nothing is predicted of it until it tells again."""
MEMORY: Final = 0.8
"""Weight of earlier requests in a group's error."""


def prompt_heads(request: GenerationRequest, facts: KvFacts) -> Iterator[bytes]:
    """Yields the heads of the indexed keys of a request's known tokens, as a group of these facts makes them. The last
    token is always computed, so its block counts for nothing."""
    if not request.finds_prefix or request.sampling.prompt_logprobs is not None:
        return
    tokens, size = request.prompt_token_ids, facts.block_size
    if request.resume_token_ids:
        tokens = [*tokens, *request.resume_token_ids[0]]
    adapter = None if request.adapter is None else request.adapter.digest
    key = root_key(facts.model_revision, facts.kv_dtype, adapter, request.cache_salt)
    for place in range((len(tokens) - 1) // size // facts.index_blocks * facts.index_blocks):
        key = block_key(key, tokens[place * size : (place + 1) * size])
        if (place + 1) % facts.index_blocks == 0:
            yield key[:HEAD_BYTES]


class PromptPrefix(NamedTuple):
    """Knowledge of a prompt of num_tokens tokens. overlaps: by group. heads: by index, of its keys that some group
    has, and of the next."""

    num_tokens: int
    overlaps: Mapping[str, tuple[int, int]]
    heads: tuple[tuple[PrefixIndex, tuple[bytes, ...]], ...] = ()


class _Teller(msgspec.Struct):
    """One group. heard_s: when it told last. wrong_since_s: since when its error is too large; None: it is not."""

    life: int
    facts: KvFacts
    index: PrefixIndex
    heard_s: float
    error: float = 0.0
    wrong_since_s: float | None = None


class ToldPrefixes:
    """All groups that tell. on_error: called with predicted minus found tokens of each request with a prediction."""

    def __init__(self) -> None:
        self.on_error: Callable[[int], None] = lambda tokens: None
        self._groups: dict[str, _Teller] = {}
        self._indexes: dict[KvFacts, PrefixIndex] = {}
        self._asked: dict[str, float] = {}
        self._prompts: dict[str, PromptPrefix] = {}
        self._sent: deque[tuple[PromptPrefix, str, float]] = deque()

    @property
    def least_tokens(self) -> int | None:
        """The longest prompt of which nothing can be said; None while no group has told anything."""
        return min((facts.index_tokens for facts in self._indexes), default=None)

    # ---- what groups tell ----

    def take(self, group: str, life: int, message: KvFacts | KvEvents, now_s: float) -> bool:
        """Takes a group's message. Returns True if the group is to be asked for a snapshot."""
        self.expect_sent()
        if isinstance(message, KvFacts):
            self._meet(group, life, msgspec.structs.replace(message, nonce=""), now_s)
            return False
        teller = self._groups.get(group)
        if teller is not None and life < teller.life:
            return False
        if teller is not None and life == teller.life:
            teller.heard_s = now_s
        if teller is not None and teller.life == life and teller.index.apply(group, life, message):
            return False
        return self._may_ask(group, now_s)

    def keep_only(self, groups: Callable[[str], bool]) -> None:
        """Forgets groups that are gone."""
        for group in [group for group in self._groups if not groups(group)]:
            self._groups.pop(group).index.drop(group)
        self._asked = {group: at_s for group, at_s in self._asked.items() if groups(group)}
        self._forget_unused()

    def tick(self, now_s: float) -> None:
        """Forgets what groups have told that say nothing any more. Call it about twice a second."""
        self.expect_sent()
        quiet = {group for group, one in self._groups.items() if now_s - one.heard_s >= QUIET_LOST_S}
        if quiet:
            self.keep_only(lambda group: group not in quiet)
        for index in self._indexes.values():
            index.tick(now_s)

    # ---- of requests ----

    def overlaps(self, request: GenerationRequest) -> PromptPrefix:
        """Returns what groups have of a request's prompt. Any thread; the hashing is here."""
        overlaps, heads = dict[str, tuple[int, int]](), []
        for facts, index in list(self._indexes.items()):
            own: list[bytes] = []
            overlaps.update(index.overlap(_noted(prompt_heads(request, facts), own)))
            heads.append((index, tuple(own)))
        return PromptPrefix(len(request.prompt_token_ids), overlaps, tuple(heads))

    def note(self, request_id: str, prefix: PromptPrefix) -> None:
        """Keeps what is known of a prompt until forget()."""
        self._prompts[request_id] = prefix

    def forget(self, request_id: str) -> None:
        """Forgets a request."""
        self._prompts.pop(request_id, None)

    def sent(self, request_id: str, group: str, now_s: float) -> None:
        """The router has chosen this group: what is sent after this one with the same beginning may find it there.
        O(1), and from any thread, as Serve may have its router on another: expect_sent() does the rest."""
        if (prefix := self._prompts.get(request_id)) is not None:
            self._sent.append((prefix, group, now_s))

    def expect_sent(self, most_keys: int = EXPECT_AT_ONCE) -> None:
        """Has the indexes expect what was sent, about so many keys at once. Called before each question, and by
        take() and tick()."""
        while self._sent and most_keys > 0:
            prefix, group, now_s = self._sent.popleft()
            if (teller := self._groups.get(group)) is None:
                continue
            have = prefix.overlaps.get(group, (0, 0))[0] // teller.facts.index_tokens
            for index, heads in prefix.heads:
                if index is teller.index:
                    index.expect(group, heads[have:][:most_keys], now_s)
                    most_keys -= len(heads) - have

    def found(self, request_id: str, group: str, cached_tokens: int, now_s: float) -> bool:
        """The group says how many prompt tokens it has found. Returns True if it is to be asked for a snapshot."""
        prefix, teller = self._prompts.pop(request_id, None), self._groups.get(group)
        if prefix is None or teller is None:
            return False
        predicted = min(sum(prefix.overlaps.get(group, (0, 0))), prefix.num_tokens)
        self.on_error(predicted - cached_tokens)
        grain = teller.facts.index_tokens
        if max(predicted, cached_tokens) < grain:
            return False
        missed = 0 if 0 <= cached_tokens - predicted < grain else abs(predicted - cached_tokens)
        return self._doubt(group, teller, missed / max(predicted, cached_tokens), now_s)

    # ---- inside ----

    def _meet(self, group: str, life: int, facts: KvFacts, now_s: float) -> None:
        teller = self._groups.get(group)
        if teller is not None and (life < teller.life or (life == teller.life and facts == teller.facts)):
            return
        if teller is not None:
            teller.index.drop(group)
        if (index := self._indexes.get(facts)) is None:  # an empty one is false
            index = PrefixIndex(facts.index_tokens)
        self._groups[group] = _Teller(life, facts, index, now_s)
        self._forget_unused()

    def _forget_unused(self) -> None:
        self._indexes = {teller.facts: teller.index for teller in self._groups.values()}

    def _doubt(self, group: str, teller: _Teller, error: float, now_s: float) -> bool:
        teller.error = MEMORY * teller.error + (1 - MEMORY) * error
        if teller.error <= WRONG_SHARE:
            teller.wrong_since_s = None
            return False
        if teller.wrong_since_s is None:
            teller.wrong_since_s = now_s
        if now_s - teller.wrong_since_s < WRONG_S:
            return False
        teller.error, teller.wrong_since_s = 0.0, None
        return self._may_ask(group, now_s)

    def _may_ask(self, group: str, now_s: float) -> bool:
        if now_s - self._asked.get(group, float("-inf")) < ASK_AGAIN_S:
            return False
        self._asked[group] = now_s
        return True


def _noted(heads: Iterator[bytes], into: list[bytes]) -> Iterator[bytes]:
    for head in heads:
        into.append(head)
        yield head
