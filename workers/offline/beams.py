"""Beam search of LLM: its outputs, and the loop that asks for one token of every live beam of every prompt.

Each step is a batch of ordinary requests of one token. A beam's KV is found in the prefix cache but for its last,
unfinished block.
"""

from collections.abc import Callable, Sequence

import msgspec
from tqdm import tqdm

from tandem.workers.messages.request import FinishReason, SamplingParams, TokenLogprobs
from tandem.workers.offline.outputs import Logprobs, TokenText, logprobs_of
from tandem.workers.text.beam_search import Beam, BeamSearch, BeamSearchParams


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam of a prompt, with vLLM's names.

    tokens: those of the prompt and of the output. text: theirs, without special tokens. cum_logprob: the sum of the
    output tokens' log probabilities. logprobs: for each output token, as a Completion's. finish_reason: "stop" after an
    end-of-sequence token, which is in tokens, or "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[Logprobs] = []
    finish_reason: FinishReason | None = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt: its beams, best first. error: why there are none."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


class Step(msgspec.Struct):
    """Answer to a request for one token: its candidates, or an error."""

    found: list[Logprobs] | None
    error: str | None = None

    def entry(self) -> TokenLogprobs:
        """Returns the candidates, best first; the chosen one is the best."""
        (one,) = self.found or [{}]
        return TokenLogprobs(0, 0.0, [(token_id, each.logprob) for token_id, each in one.items()])


Ask = Callable[[list[tuple[int, list[int], SamplingParams]]], list[Step]]
"""Runs requests for one token (number of the prompt, token ids, parameters) together; returns their answers."""


class PromptSearch:
    """One prompt and its search. error: why it has ended early."""

    def __init__(
        self, token_ids: list[int], params: BeamSearchParams, eos_token_ids: Sequence[int], max_len: int
    ) -> None:
        self.token_ids = token_ids
        self.error: str | None = None
        self.search = BeamSearch(params, eos_token_ids, max(1, min(params.max_tokens, max_len - len(token_ids))))

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.search.is_over

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and parameters of the next requests: one for each live beam, each for one token."""
        one = msgspec.structs.replace(self.search.sampling(self.search.live[0]), max_tokens=1)
        return [([*self.token_ids, *beam.token_ids], one) for beam in self.search.live]

    def take(self, steps: Sequence[Step]) -> None:
        """Takes the answers to requests()."""
        self.error = next((step.error for step in steps if step.error is not None), None)
        if self.error is None:
            self.search.advance([step.entry() for step in steps])

    def output(self, text_of: Callable[[list[int]], str], token_text: TokenText) -> BeamSearchOutput:
        """The result. text_of: the text of token ids; token_text: of one by itself."""
        if self.error is not None:
            return BeamSearchOutput(sequences=[], error=self.error)
        return BeamSearchOutput(sequences=[self._sequence(beam, text_of, token_text) for beam in self.search.best()])

    def _sequence(self, beam: Beam, text_of: Callable[[list[int]], str], token_text: TokenText) -> BeamSearchSequence:
        tokens = [*self.token_ids, *beam.token_ids]
        return BeamSearchSequence(
            tokens=tokens,
            text=text_of(tokens),
            cum_logprob=beam.cum_logprob,
            logprobs=[logprobs_of(entry, token_text) for entry in beam.logprobs],
            finish_reason=beam.finish_reason,
        )


def run_searches(searches: Sequence[PromptSearch], ask: Ask, max_tokens: int, use_tqdm: bool) -> None:
    """Runs all searches to their ends, step by step together."""
    with tqdm(total=max_tokens, disable=not use_tqdm, desc="beam search", unit="token") as bar:
        while open_ones := [(number, one) for number, one in enumerate(searches) if not one.is_over]:
            wanted = [(number, *request) for number, one in open_ones for request in one.requests()]
            answers = iter(ask(wanted))
            for _, one in open_ones:
                one.take([next(answers) for _ in one.search.live])
            bar.update()
