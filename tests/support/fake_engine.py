"""An engine without a model: token i of a request is (last prompt token + i), one token a step. For transport tests."""

import math
import struct
from collections.abc import Iterable, Mapping

from tandem.workers.engine.base.request_figures import RequestFigures
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tandem.workers.messages.errors import GroupLost, QueueFull
from tandem.workers.messages.request import Abort, AdapterRef, Ended, GenerationRequest, TokenDelta, Usage


class FakeEngine:
    """Engine of an EngineThread. A prompt of [666] breaks it, one of [429] is refused. Suspects run
    alone, one at a time, for PROBATION_TOKENS tokens, in every second step."""

    def __init__(self, sink: object) -> None:
        self.sink = sink
        self.kv: GroupKv | None = None  # nobody is told
        self.in_step: list[str] = []
        self.is_alone = False
        self.begun: set[tuple[str, int]] = set()
        self.cached_tokens = 0
        self.live: dict[str, tuple[GenerationRequest, int]] = {}
        self.aborts: list[Abort] = []
        self.steps = 0
        self.residency: dict[str, str] = {}
        self.pinned: set[AdapterRef] = set()
        self.weights: dict[str, float] = {}
        self.charged_here: dict[str, float] = {}
        self.remote_charges: dict[str, float] = {}

    def add_request(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids == [429]:
            raise QueueFull("the queue is full")
        resumed = len(request.resume_token_ids[0]) if request.resume_token_ids else 0
        self.live[request.request_id] = (request, resumed)

    def abort(self, abort: Abort) -> None:
        self.aborts.append(abort)
        request, position = self.live.pop(abort.request_id, (None, 0))
        if request is not None:
            kept = position if abort.keep_positions is None else abort.keep_positions
            self._end(request, kept, "abort")

    def has_work(self) -> bool:
        return bool(self.live)

    is_copying = False
    idle_s = math.inf

    def close(self) -> None:
        """It writes no log."""

    def flush_transfers(self, timeout_s: float) -> None:
        """It copies nothing."""

    def turn(self, timeout_s: float) -> bool:
        self.steps += 1
        self.in_step = self._choose()
        chosen = [self.live[name] for name in self.in_step]
        for request, _ in chosen:
            if (request.request_id, request.attempt) not in self.begun:
                self.begun.add((request.request_id, request.attempt))
                self.sink.begun(request, self.cached_tokens)
        deltas = [self._next(request, position) for request, position in chosen]
        self.sink.deltas(deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                request, position = self.live.pop(delta.request_id)
                self._end(request, position, delta.finish_reason)
        return True

    def losses(self) -> dict[str, str]:
        found = {name: "suspect" if name in self.in_step else "bystander" for name in self.live}
        return found | ({self.in_step[0]: "alone"} if self.is_alone else {})

    def _choose(self) -> list[str]:
        """The requests of the next step."""
        on_probation = [name for name, live in self.live.items() if self._is_new_suspect(*live)]
        others = [name for name in self.live if name not in on_probation]
        self.is_alone = bool(on_probation) and not (self.is_alone and others)
        return on_probation[:1] if self.is_alone else others

    @staticmethod
    def _is_new_suspect(request: GenerationRequest, position: int) -> bool:
        before = len(request.resume_token_ids[0]) if request.resume_token_ids else 0
        return request.suspect and position - before < PROBATION_TOKENS

    def adapter_residency(self) -> dict[str, str]:
        return self.residency

    def set_pinned_adapters(self, adapters: Iterable[AdapterRef]) -> None:
        self.pinned = set(adapters)
        self.residency |= {adapter.digest: "device" for adapter in adapters}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def drain_charges(self) -> dict[str, float]:
        taken, self.charged_here = self.charged_here, {}
        return taken

    def merge_remote_charges(self, charges: Mapping[str, float]) -> None:
        for tenant, charge in charges.items():
            self.remote_charges[tenant] = self.remote_charges.get(tenant, 0.0) + charge

    def stats(self) -> EngineStats:
        return EngineStats(
            requests=RequestFigures.for_contexts(2048),
            waiting_for={"capacity": 0, "deferred": 0},
            running=len(self.live),
            waiting=0,
            waiting_tokens=0,
            in_flight_steps=0,
            num_blocks=8,
            block_size=16,
            used_blocks=0,
            cached_blocks=0,
            kv_usage=0.25,
            reserved_blocks=0,
            allocated_slots=0,
            empty_slots=0,
            generation_tokens=self.steps,
            steps=self.steps,
            schedule_s=0.5,
        )

    def _next(self, request: GenerationRequest, position: int) -> TokenDelta:
        if request.prompt_token_ids == [666]:
            raise GroupLost("rank 0 has died")
        self.live[request.request_id] = (request, position + 1)
        self.charged_here[request.tenant] = self.charged_here.get(request.tenant, 0.0) + 1.0
        if request.pool is not None:
            self.live[request.request_id] = (request, 0)
            return self._embedded(request)
        last = position + 1 >= request.sampling.max_tokens
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=0,
            first_position=position,
            token_ids=[request.prompt_token_ids[-1] + position],
            finish_reason="length" if last else None,
            usage=self._usage(request, position + 1) if last else None,
        )

    def _embedded(self, request: GenerationRequest) -> TokenDelta:
        """The embedding of a request with a Pool: its last token and its length."""
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=0,
            first_position=0,
            token_ids=[],
            finish_reason="stop",
            usage=self._usage(request, 0),
            embedding=struct.pack("<2f", request.prompt_token_ids[-1], len(request.prompt_token_ids)),
        )

    def _end(self, request: GenerationRequest, position: int, reason: str) -> None:
        ended = Ended(
            request_id=request.request_id,
            attempt=request.attempt,
            positions=[position],
            finish_reasons=[reason],
            usage=self._usage(request, position),
        )
        self.sink.ended(ended, request)

    def _usage(self, request: GenerationRequest, completion: int) -> Usage:
        is_begun = (request.request_id, request.attempt) in self.begun or request.begun or completion
        return Usage(prompt_tokens=len(request.prompt_token_ids) if is_begun else 0, completion_tokens=completion)
