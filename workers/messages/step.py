"""Messages between coordinator and ranks for steps: StepPlan and StepResult, and questions about steps.

Encoded as in request.py.
"""

from typing import Final

import msgspec

from tandem.workers.messages.request import Pool, PromptLogprobs, TokenLogprobs
from tandem.workers.messages.thinking import ThinkingBudget


class RowSampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling parameters of one row, as in SamplingParams."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0  # selects the random numbers of one choice
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # ids, EOS included, that cannot be sampled before min_tokens
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    # digest of a grammar that the ranks have compiled (CompileGrammar), which the output follows; None: any text
    grammar: str | None = None
    thinking_budget: ThinkingBudget | None = None
    # whose log probabilities are reported, in place of the best tokens'; `logprobs` is set too
    logprob_token_ids: tuple[int, ...] | None = None


class RowInit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Binds a row of the ranks' tables to a sequence; replaces what the row held."""

    row: int
    token_ids: list[int]  # all known tokens, prompt first, then output
    prompt_len: int  # tokens of the prompt, for penalties and min_tokens
    num_computed: int  # of the first tokens, whose KV is in the blocks that the row's first RowWork names
    sampling: RowSampling
    adapter_slot: int | None = None  # device slot of the LoRA adapter; None: the base model
    pool: Pool | None = None  # the row ends with an embedding in place of a token


class RowWork(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Work of one row in a step: the next num_tokens tokens are computed, and up to max_drafts guesses behind them.
    Ranks keep the row's computed count and derive positions from it."""

    row: int
    num_tokens: int
    # the work reaches the last known token, so one token is sampled, and one more for each guess (draft) that proves
    # equal to the token sampled in its place (speculative decoding), or the row's embedding is made
    samples: bool
    new_block_ids: list[int] = []  # appended to the row's block table
    token_ids: list[int] = []  # known tokens that the ranks lack (with PP > 1, the ones sampled earlier)
    replaced_blocks: list[tuple[int, int]] = []  # (index, new block id) after a copy-on-write
    max_drafts: int = 0  # above 0 only for a row with one token left
    # of so many of the tokens, from the first on, the log probabilities of the token behind are wanted
    # (prompt_logprobs)
    num_scored: int = 0
    # with PP > 1 the row's drafts, max_drafts of them; otherwise the ranks guess them when the step begins
    draft_ids: list[int] = []
    # with PP > 1: how many tokens may be guessed behind those that the step samples, for the row's next step
    num_guesses: int = 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="step"):
    """One step of all ranks. Order: roll back rows, free rows, bind new rows, extend tables, copy blocks, forward,
    sample."""

    step_id: int
    work: list[RowWork]  # each row at most once
    new_rows: list[RowInit] = []
    freed_rows: list[int] = []
    block_copies: list[tuple[int, int]] = []  # (source, destination) block ids on the device
    # tickets of loads that rows of this plan use; each layer waits for its own part of them (overlapped load)
    awaits: list[int] = []
    # the newest plan that was out when the last failure arrived; plans made before that was known fail too
    known_failure: int = 0
    # (row, known tokens, computed tokens) of each row of failed plans, which ranks count as though they had been
    # computed
    rolled_back: list[tuple[int, int, int]] = []


NOT_FINITE: Final = "the model's output for this request is not finite"
"""The error of a row whose logits, of its prompt or behind it, or whose embedding are not finite."""
NOTHING_LEFT: Final = (
    "every token is forbidden for this request, by its allowed_token_ids, bad_words, logit_bias, min_tokens or grammar "
    "together"
)
"""The error of a row whose own parameters leave no token to choose."""
GRAMMAR_FAILED: Final = "the grammar of this request cannot be followed any further: "
"""The beginning of the error of a row whose grammar has failed in a step; why follows."""


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Result of one RowWork that samples or has num_scored. If it samples, it has tokens, an embedding or an error."""

    row: int
    token_ids: list[int]  # the sampled token and those behind accepted drafts, of which there are as many, less one
    logprobs: list[TokenLogprobs] | None = None  # one entry for each token, if asked for
    error: str | None = None  # the reason why there is neither token nor embedding
    num_drafts: int = 0  # guessed ones, accepted or not
    embedding: bytes | None = None  # of a row with a Pool: float32, little-endian
    prompt_logprobs: PromptLogprobs | None = None  # of the tokens of the prompt behind the num_scored ones
    draft_ids: list[int] = []  # guessed behind token_ids, up to RowWork.num_guesses


class StepResult(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True, tag="result"):
    """Result of a StepPlan: one RowResult for each RowWork that has one, in the plan's order."""

    step_id: int
    rows: list[RowResult]
    # the reason why the step counts for nothing, as a device ran out of memory. What the plan freed, bound, copied and
    # appended to tables stands; its rows are as they were before it once a plan has rolled them back
    failure: str | None = None
    device_s: float = 0.0  # seconds that the last stage computed
    wait_s: float = 0.0  # seconds that it waited for the plan and for hidden states
    # tokens computed in places for drafts where nothing was guessed: on a device, places are made before guesses
    num_unguessed: int = 0
    is_replayed: bool = False  # its layers were a capture's, on the last stage
    draft_s: float = 0.0  # of device_s, the seconds in which drafts were guessed


class CountExperts(msgspec.Struct, frozen=True, array_like=True, tag="count_experts"):
    """Order to every rank to say what its experts have got in the plans before it. One rank of each stage answers."""


class ExpertTokens(msgspec.Struct, frozen=True, array_like=True, tag="expert_tokens"):
    """Answer of a stage to CountExperts: by layer of it with experts, tokens that each has got since the start."""

    by_layer: dict[int, list[int]]


class AskActivity(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="ask_activity"):
    """Question to every rank, while a step runs long: does it compute? Answered beside the step."""

    number: int


class RankActivity(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True, tag="activity"):
    """Answer of a rank to AskActivity."""

    rank: int
    number: int
    computes: bool  # its process works on a step, or waits for a core or a disk to do so
    waits_for_device: bool  # steps are launched whose end the device has not told
