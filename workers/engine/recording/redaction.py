"""Redaction: a recording without any token id of a prompt or an answer, which replays to the same plans.

The engine asks three things of tokens: how many they are, whether one ends its choice, and which full blocks begin
alike. So each token becomes 0; one that has ended its choice becomes 1, the only stop token there is; and the last one
of each full block becomes a keyed hash of the block's key, which depends on all tokens up to there, on the adapter and
on the salt. Keys of blocks become the same hash, wherever they stand. The hash's key is drawn by the process and never
written: nobody can try out a text. What else a client has written (stop strings, biases, grammars, salts) goes too, as
do the places that adapters are read from.

This reads a whole tape, so it is done when a file is written, never while the engine runs its steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from tandem.offload.kv.block_key import block_key, group_key
from tandem.workers.engine.adapters.adapter_state import Refusal, Refusals
from tandem.workers.engine.base.arrivals import digest_of
from tandem.workers.engine.base.sequence import Sequence as Choice
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.recording.call_records import BoundRow, CallRecord, PinnedInput, RankMessage, RequestInput
from tandem.workers.engine.recording.hidden_messages import (
    END,
    HIDDEN_VOCABULARY,
    hidden_adapter,
    hidden_op,
    hidden_request,
    hidden_row,
    hidden_sampling,
    hidden_source,
    hidden_work,
    without_message,
)
from tandem.workers.engine.recording.recorded_engine import STATE
from tandem.workers.engine.recording.replay import RecordedRanks, engine_of, outside_of
from tandem.workers.engine.recording.state_codec import StateEncoder
from tandem.workers.engine.recording.tape import TapeCopy
from tandem.workers.messages.request import AdapterRef, GenerationRequest
from tandem.workers.messages.step import RowInit, RowWork, StepPlan, StepResult
from tandem.workers.messages.transfer import CompileGrammar, TransferResult

HASH_BYTES = 8
PAUSE_EVERY = 8


class RedactedBlocks(BlockManager):
    """The block manager of a redacted recording, in which the last token of each full block is the block's key.
    group_keys: those of the other groups of layers, by it; all of them as numbers."""

    group_keys: dict[int, list[int]]

    def _keys(self, table: BlockTable, token_ids: Sequence[int], count: int) -> list[bytes]:
        keys, size = table.keys, self.block_size
        for place in range(len(keys) // self.groups.count, count):
            key = token_ids[(place + 1) * size - 1]
            keys += [one.to_bytes(HASH_BYTES, "big") for one in (key, *self.group_keys.get(key, ()))]
        return keys


class Hasher:
    """The keyed hash of keys and words."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_key(self, key: bytes) -> bytes:
        """Returns the hash of a block's key, whose first bit is 0."""
        hashed = blake2b(key, digest_size=HASH_BYTES, key=self._secret).digest()
        return bytes((hashed[0] & 0x7F,)) + hashed[1:]

    def of_text(self, text: str) -> str:
        """Returns a text as long as this one, the same for the same text."""
        hashed = blake2b(text.encode(), key=self._secret).hexdigest()
        return (hashed * (1 + len(text) // len(hashed)))[: len(text)]


class Words(dict[str, str]):
    """Hidden grammars and their digests, by the true ones. All else is hidden as a text is: sources of adapters, and
    the digest of a grammar that the engine has forgotten, as it refused or dropped it."""

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher

    def __missing__(self, word: str) -> str:
        return self._hasher.of_text(word)


class _Hidden:
    """The tokens of one choice as they come, and what becomes of them."""

    def __init__(self, owner: "Redaction", request: GenerationRequest) -> None:
        params, adapter = request.sampling, request.adapter
        self._owner = owner
        self._parent = owner.manager.new_table(None if adapter is None else adapter.digest, request.cache_salt).root
        self._block: list[int] = []
        self._stops = {*(() if params.ignore_eos else owner.eos), *params.stop_token_ids}
        self._min_len = len(request.prompt_token_ids) + (0 if params.grammar is not None else params.min_tokens)
        self._tokens: list[int] = []  # as they were hidden

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Hides tokens that have ended nothing."""
        return [self._one(token) for token in tokens]

    def add_sampled(self, token: int) -> int:
        """Hides a token that may end the choice."""
        hidden = self._one(token)
        return END if token in self._stops and len(self._tokens) >= self._min_len else hidden

    def last(self, count: int) -> list[int]:
        """Returns the last tokens again, as they were hidden."""
        return self._tokens[-count:] if count else []

    def _one(self, token: int) -> int:
        block, hidden = self._block, 0
        block.append(token)
        if len(block) == self._owner.manager.block_size:
            self._parent, hidden = self._owner.end_of_block(self._parent, block)
            block.clear()
        self._tokens.append(hidden)
        return hidden


class Redaction:
    """Redacts one recording, from its state on. secret: the hash's key."""

    def __init__(self, state: bytes, secret: bytes) -> None:
        ranks = RecordedRanks()
        self._outside = outside_of(ranks)
        self._engine: Engine = engine_of(state, self._outside)
        self.manager: BlockManager = self._engine.manager
        self.eos = self._engine.facts.eos_token_ids
        self._hasher = Hasher(secret)
        self._group_keys: dict[int, list[int]] = {}
        self._words = Words(self._hasher)
        self._requests: dict[tuple[str, int], GenerationRequest] = {}
        self._rows: dict[int, _Hidden] = {}
        self._due: deque[list[_Hidden]] = deque()  # of each plan in flight, the rows that have a result
        self._tokens: dict[int, list[int]] = {}
        self._results: dict[int, StepResult] = {}
        self._take_state()

    # ---- the state ----

    def _take_state(self) -> None:
        engine, hidden_of = self._engine, dict[int, _Hidden]()
        for seq in _sequences(engine):
            request = seq.state.request
            self._know(request)
            hidden_of[id(seq)] = hidden = _Hidden(self, request)
            self._tokens[id(seq)] = hidden.add(seq.tokens)
            if seq.row >= 0:
                self._rows[seq.row] = hidden
        for step in engine.in_flight_steps:
            pairs = zip(step.sequences, step.work, strict=True)
            for seq in step.sequences:  # of one that has ended nobody looks at the result
                hidden_of.setdefault(id(seq), _Hidden(self, seq.state.request))
            self._due.append([hidden_of[id(seq)] for seq, work in pairs if work.samples or work.num_scored])
        for result in engine.answers.results:
            self._results[result.step_id] = self._result(result)
        for text in engine.grammars.texts():
            self._know_grammar(text)

    def state(self) -> bytes:
        """Returns the redacted state; called after all calls, whose blocks it has to know."""
        manager = self._engine.manager
        manager.__class__ = RedactedBlocks
        manager.group_keys = self._group_keys  # type: ignore[attr-defined]
        encoder = StateEncoder(self._outside, self._change, self._leaf)
        return encoder.encode({name: getattr(self._engine, name) for name in STATE})

    def _leaf(self, value: Any) -> Any:
        if type(value) is bytes:
            return self._hasher.of_key(value)
        return self._words.get(value, value) if type(value) is str else value

    def _change(self, one: object, name: str, value: Any) -> Any:
        if isinstance(one, msgspec.Struct):
            return self._message(one)
        if isinstance(one, Choice):
            return self._of_choice(one, name, value)
        if name == "_eos":
            return frozenset({END} if value else ())
        if name == "eos_token_ids":
            return (END,) if value else ()
        if name == "vocab_size":
            return HIDDEN_VOCABULARY
        if isinstance(one, Refusals) and name == "_by_digest":
            return {digest: self._refusal(refusal) for digest, refusal in value.items()}
        return {self._words[digest]: "" for digest in value} if name == "_refused" else value

    def _refusal(self, refusal: Refusal) -> Refusal:
        source = refusal.source
        return refusal._replace(source=None if source is None else hidden_source(source, self._words))

    def _message(self, one: msgspec.Struct) -> msgspec.Struct:
        if isinstance(one, GenerationRequest):
            return self._request(one)
        if isinstance(one, AdapterRef):
            return hidden_adapter(one, self._words)
        if isinstance(one, RowInit):
            return replace(one, token_ids=[], sampling=hidden_sampling(one.sampling, self._words))
        if isinstance(one, RowWork):
            return hidden_work(one, [])
        if isinstance(one, StepResult):
            return self._results[one.step_id]
        op: msgspec.Struct = hidden_op(one, self._hasher.of_key, self._words)
        return without_message(op)

    def _of_choice(self, seq: Choice, name: str, value: Any) -> Any:
        if name == "tokens":  # others have ended, and are not forgotten yet
            return self._tokens.get(id(seq), [0] * len(value))
        if name == "guesses":
            return [0] * len(value)
        return frozenset({END} if value else ()) if name == "stop_ids" else value

    # ---- what is known ----

    def _know(self, request: GenerationRequest) -> None:
        self._requests[request.request_id, request.attempt] = request
        if request.sampling.grammar is not None:
            self._know_grammar(request.sampling.grammar)

    def _know_grammar(self, text: str) -> None:
        if text not in self._words:
            hidden = self._words[text] = self._hasher.of_text(text)
            self._words[digest_of(text)] = digest_of(hidden)

    def _request(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.grammar is not None:
            self._know_grammar(request.sampling.grammar)
        hidden = _Hidden(self, request)
        prompt, resumed = hidden.add(request.prompt_token_ids), []
        for token_ids in request.resume_token_ids:
            each = _Hidden(self, request)
            each.add(request.prompt_token_ids)
            resumed.append(each.add(token_ids[:-1]) + [each.add_sampled(token) for token in token_ids[-1:]])
        return hidden_request(request, prompt, resumed, self._words)

    def end_of_block(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """Returns the true key of a full block, and the token that stands for it."""
        key = block_key(parent, tokens)
        of_groups = [key, *(group_key(key, group) for group in range(1, self.manager.groups.count))]
        hashed, *of_others = (int.from_bytes(self._hasher.of_key(one), "big") for one in of_groups)
        if of_others:
            self._group_keys[hashed] = of_others
        return key, hashed

    # ---- calls ----

    def call(self, record: CallRecord) -> CallRecord:
        """Redacts the next call."""
        given = record.input
        if isinstance(given, RequestInput):
            self._know(given.request)
            given = RequestInput(self._request(given.request))
        if isinstance(given, PinnedInput):
            given = PinnedInput([hidden_adapter(ref, self._words) for ref in given.adapters])
        for op in record.ops:
            if isinstance(op, CompileGrammar):
                self._know_grammar(op.text)
        bound = iter(record.bound)
        plans = [self._plan(plan, bound) for plan in record.plans]
        return replace(
            record,
            input=given,
            plans=plans,
            ops=[hidden_op(op, self._hasher.of_key, self._words) for op in record.ops],
            polled=[self._answer(message) for message in record.polled],
        )

    def _plan(self, plan: StepPlan, bound: Iterator[BoundRow]) -> StepPlan:
        new_rows = [self._bind(init, next(bound)) for init in plan.new_rows]
        self._due.append([self._rows[work.row] for work in plan.work if work.samples or work.num_scored])
        work = [self._lacking(one) if one.token_ids or one.draft_ids else one for one in plan.work]
        return replace(plan, new_rows=new_rows, work=work)

    def _lacking(self, work: RowWork) -> RowWork:
        """Hides the known tokens that a plan brings to the ranks: the row's last."""
        return hidden_work(work, self._rows[work.row].last(len(work.token_ids)))

    def _bind(self, init: RowInit, whose: BoundRow) -> RowInit:
        hidden = self._rows[init.row] = _Hidden(self, self._requests[whose.request_id, whose.attempt])
        token_ids = hidden.add(init.token_ids)
        return replace(init, token_ids=token_ids, sampling=hidden_sampling(init.sampling, self._words))

    def _answer(self, message: RankMessage | None) -> RankMessage | None:
        if isinstance(message, StepResult):
            return self._result(message)
        return without_message(message) if isinstance(message, TransferResult) else message

    def _result(self, result: StepResult) -> StepResult:
        whose = self._due.popleft()
        rows = [
            hidden_row(row, [hidden.add_sampled(token) for token in row.token_ids])
            for row, hidden in zip(result.rows, whose, strict=result.failure is None)
        ]
        return replace(result, rows=rows)


def _sequences(engine: Engine) -> Iterator[Choice]:
    return (seq for state in engine.requests for seq in state.sequences)


def redacted(copy: TapeCopy, secret: bytes, pause: Callable[[], object] = lambda: None) -> TapeCopy:
    """Returns what a tape holds without any token id. secret: the hash's key, at most 64 bytes. pause: called after
    every PAUSE_EVERY calls."""
    redaction, decode = Redaction(copy.state, secret), msgspec.msgpack.Decoder(CallRecord).decode
    calls = []
    for number, call in enumerate(copy.calls):
        calls.append(msgspec.msgpack.encode(redaction.call(decode(call))))
        if number % PAUSE_EVERY == 0:
            pause()
    return TapeCopy(redaction.state(), calls, copy.is_whole)
