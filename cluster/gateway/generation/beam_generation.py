"""BeamGeneration: a Generation whose answers are the best beams of each prompt.

    admit --> [ one token for each live beam, in whatever group ]* --> the best beams, each in one step --> settle

A beam's next token is a request of its own: one that is resumed with the beam's tokens, for one token more. It waits
for a row as any request does, but once the prompt has begun no limit of a queue refuses it. It finds the KV of its
prefix, or without prefix caching computes all of it; it is tried again in another group when its own is lost, and is
aborted when the client leaves. The engine and its scheduler know nothing of beams. The bill is that of any
request: the prompt once, and the tokens of the beams that are the answer.
"""

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec

from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import FinishReason, TokenDelta, TokenLogprobs, Usage
from tandem.workers.text.beam_search import Beam, BeamSearch, BeamSearchParams
from tandem.workers.text.choice_text import ChoiceText


class BeamGeneration(Generation):
    """See Generation. Each part has as many choices as beams are kept; part.request.sampling.logprobs: how many
    candidates of each token the answer shows, None: no log probabilities."""

    def __init__(
        self,
        *args: Any,
        length_penalty: float,
        eos_token_ids: Collection[int],
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._length_penalty = length_penalty
        self._eos = eos_token_ids
        self._beams: set[RequestPart] = set()

    def close(self) -> None:
        """The HTTP side is done: the requests of all beams end too."""
        super().close()
        for beam in self._beams:
            beam.news.set()

    async def _serve_prompt(self, part: RequestPart) -> None:
        """Searches until the best beams are known, or the client has left; delivers them."""
        sampling = part.request.sampling
        params = BeamSearchParams(
            beam_width=sampling.n,
            max_tokens=sampling.max_tokens,
            length_penalty=self._length_penalty,
            ignore_eos=sampling.ignore_eos,
        )
        search = BeamSearch(params, self._eos, sampling.max_tokens, num_top=sampling.logprobs or 0)
        number = 0
        while not search.is_over and not self._closing.is_set():
            beams = [
                self._continuation(part, search, beam, f"{number}-{place}") for place, beam in enumerate(search.live)
            ]
            entries = await self._tokens_of(part, beams)
            if entries is None:
                break
            search.advance(entries)
            number += 1
        self._deliver(part, search.best())

    async def _tokens_of(self, part: RequestPart, beams: list["_NextToken"]) -> list[TokenLogprobs] | None:
        """Runs the requests of all live beams together; returns their next tokens, None if the client has left or a KV
        pool below the context is full. Raises the first error, once all have ended."""
        self._beams |= {beam.part for beam in beams}
        try:
            ends = await asyncio.gather(*(self._attempts(beam.part) for beam in beams), return_exceptions=True)
        finally:
            self._beams -= {beam.part for beam in beams}
        part.is_begun |= any(beam.part.is_begun for beam in beams)
        if part.cached_tokens is None:
            part.cached_tokens = beams[0].part.cached_tokens
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        if self._closing.is_set():
            return None
        for beam in beams:
            self._check_rows(beam.part, beam.deltas)
        return None if any(beam.is_cut for beam in beams) else [beam.entry() for beam in beams]

    def _continuation(self, part: RequestPart, search: BeamSearch, beam: Beam, name: str) -> "_NextToken":
        """The request for a beam's next token."""
        request = msgspec.structs.replace(
            part.request,
            request_id=f"{part.request.request_id}-beam-{name}",
            sampling=search.sampling(beam),
            resume_token_ids=[list(beam.token_ids)] if beam.token_ids else [],
            begun=part.is_begun,
            deadline_s=None if part.is_begun else part.request.deadline_s,
        )
        choice = ChoiceText(_NoText(), request.sampling, include_stop=False, eos_token_ids=frozenset())
        one = RequestPart(request=request, choices=[choice], first_choice=0, is_begun=part.is_begun)
        one.delivered[0].extend(beam.token_ids)
        return _NextToken(one)

    def _deliver(self, part: RequestPart, best: list[Beam]) -> None:
        """Gives the beams to the reader, each as a choice with one step. A vocabulary smaller than the beams leaves
        choices empty."""
        sampling = part.request.sampling
        cut: FinishReason = "abort" if self._closing.is_set() else "length"
        beams = [*best, *[Beam([], 0.0, [])] * (len(part.choices) - len(best))]
        usage = Usage(
            prompt_tokens=len(part.request.prompt_token_ids) if part.is_begun else 0,
            completion_tokens=sum(len(beam.token_ids) for beam in beams),
            cached_tokens=part.cached_tokens or 0,
        )
        deltas = [
            TokenDelta(
                request_id=part.request.request_id,
                attempt=0,
                choice=choice,
                first_position=0,
                token_ids=beam.token_ids,
                logprobs=None if sampling.logprobs is None else beam.logprobs,
                finish_reason=beam.finish_reason or cut,
                usage=usage if choice == len(beams) - 1 else None,
            )
            for choice, beam in enumerate(beams)
        ]
        part.take(deltas)


class _NoText:
    """A Detokenizer for tokens that nobody reads as text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _NextToken:
    """A beam's request and the deltas that came of it."""

    def __init__(self, part: RequestPart) -> None:
        self.part = part
        self.deltas: list[TokenDelta] = []
        part.on_step = self.deltas.extend

    @property
    def is_cut(self) -> bool:
        """True if it has ended for lack of room, without a token."""
        return not self._entries() and any(delta.finish_reason == "length" for delta in self.deltas)

    def entry(self) -> TokenLogprobs:
        """Its token, with the candidates. GroupLost if there is none although the request has ended in order."""
        found = self._entries()
        if not found:
            raise GroupLost(f"request {self.part.request.public_id} ended without a token")
        return found[0]

    def _entries(self) -> list[TokenLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs or ()]
