"""Eight clients that talk to one engine at once, each waiting for its answer before it goes on: for tests of KV tiers.

A client's turn is what was said so far and a few words more, with n choices, one of which the talk goes on with; now
and then it gives up in the middle of an answer, or begins anew. What it asks depends on its own answers alone, so two
engines that say the same are asked the same, whatever the order.
"""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, SamplingParams, TokenDelta

LONGEST_TALK = 48
OPENING = 16
GIVES_UP = 0.05
FEW = 3
"""Tokens that a sampled one is drawn from: the more there are, the more draws fall so near to a tie of two that the
order in which float32 sums are made decides."""
STALL_S = 60.0
"""An engine without output for so long is stuck."""


@dataclass(frozen=True)
class Exchange:
    """One turn: what was asked and what was heard, choice by choice; all of it, unless the client gave up."""

    request: GenerationRequest
    heard: list[list[int]]
    is_whole: bool


@dataclass(eq=False)
class Client:
    number: int
    draw: random.Random
    talk: list[int] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    turns: int = 0
    running: GenerationRequest | None = None
    gives_up: bool = False
    heard: list[list[int]] = field(default_factory=list)

    def ask(self, choices: int) -> GenerationRequest:
        if len(self.talk) > LONGEST_TALK:
            self.talk = [] if self.draw.random() < 0.5 else self.talk[:OPENING]
        self.turns += 1
        self.gives_up = self.draw.random() < GIVES_UP
        self.heard = [[] for _ in range(choices)]
        sampling = SamplingParams(
            max_tokens=self.draw.randint(1, 14),
            ignore_eos=True,
            seed=self.draw.getrandbits(31),
            temperature=self.draw.choice([0.0, 0.8]),
            top_k=FEW,
            n=choices,
        )
        prompt = [*self.talk, *(self.draw.randrange(3, 190) for _ in range(self.draw.randint(1, 9)))]
        self.running = GenerationRequest(
            request_id=f"{self.number}-{self.turns}", prompt_token_ids=prompt, sampling=sampling
        )
        return self.running

    def end(self, ended: Ended) -> None:
        assert self.running is not None and ended.refused is None
        if not self.gives_up:
            assert set(ended.finish_reasons) == {"length"}, ended
            self.talk = [*self.running.prompt_token_ids, *self.draw.choice(self.heard)]
        self.exchanges.append(Exchange(self.running, self.heard, not self.gives_up))
        self.running = None


class Clients:
    """OutputSink of one engine; converse() is the whole test run. Another seed: other talks."""

    def __init__(self, count: int = 8, choices: int = 2, seed: int = 0) -> None:
        self._choices = choices
        self._clients = [Client(number, random.Random(seed * count + number)) for number in range(count)]
        self._given_up: list[Abort] = []
        self._heard_s = time.monotonic()

    def deltas(self, deltas: list[TokenDelta]) -> None:
        self._heard_s = time.monotonic()
        for delta in deltas:
            client = self._of(delta.request_id)
            client.heard[delta.choice].extend(delta.token_ids)
            if client.gives_up:
                self._given_up.append(Abort(request_id=delta.request_id, attempt=delta.attempt))

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        self._of(ended.request_id).end(ended)

    def converse(self, engine: Engine, turns: int) -> list[Exchange]:
        """Every client's turns, that many each."""
        while any(client.turns < turns or client.running for client in self._clients):
            for client in self._clients:
                if client.running is None and client.turns < turns:
                    engine.add_request(client.ask(self._choices))
            engine.turn(0.05)
            while self._given_up:
                engine.abort(self._given_up.pop())
            assert time.monotonic() < self._heard_s + STALL_S, f"silent for {STALL_S:.0f} s: {engine.stats()}"
        return [exchange for client in self._clients for exchange in client.exchanges]

    def _of(self, request_id: str) -> Client:
        return self._clients[int(request_id.partition("-")[0])]


class Listener:
    """OutputSink of an engine that is asked everything at once."""

    def __init__(self) -> None:
        self._heard: dict[str, list[list[int]]] = {}
        self._open: set[str] = set()

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._heard[delta.request_id][delta.choice].extend(delta.token_ids)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert set(ended.finish_reasons) == {"length"}, ended
        self._open.remove(ended.request_id)

    def answers(self, engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, list[list[int]]]:
        """Of each request, by its id: the tokens of each choice."""
        for request in requests:
            self._heard[request.request_id] = [[] for _ in range(request.sampling.n)]
            self._open.add(request.request_id)
            engine.add_request(request)
        while self._open:
            assert engine.turn(0.05), "it has requests and does nothing"
        return self._heard
