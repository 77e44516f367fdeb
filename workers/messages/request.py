"""Messages between gateway and coordinator: requests, sampling parameters, token deltas, ends.

Frozen msgspec structs encoded as msgpack arrays: field order is the wire format, so new fields are appended. Every
result has the id of what it answers. Structs with many instances have gc=False, as they hold no cycles. Token ids are
ints; positions count a sequence's tokens from 0, output positions count its generated tokens from 0. Torch-free.
"""

from typing import Any, Final, Literal

import msgspec

from tandem.workers.messages.course import Course
from tandem.workers.messages.sampling_check import CheckedCalls, check_together, plain_values
from tandem.workers.messages.sampling_ranges import RequestOutputKind, StructuredOutputsParams
from tandem.workers.messages.thinking import ThinkingBudget

DEFAULT_TENANT = "default"
FinishReason = Literal["stop", "length", "abort", "error"]
Loss = Literal["bystander", "suspect", "alone", "unknown", "excused"]
"""The meaning of a group's loss for a request: it was in no step that may have ended the group; it was in one; it was
alone in one, after an earlier loss had made it suspect; nobody can tell in which step the group ended; it was in one,
but no row is to blame alone (memory ran out, or a transfer failed).
"""


class SamplingParams(msgspec.Struct, metaclass=CheckedCalls, frozen=True, array_like=True, kw_only=True):
    """Sampling parameters of one request, for LLM.generate() and in every GenerationRequest.

    The names, defaults and order of application are vLLM's. The constructor and clone() raise ValueError for a value
    outside its range, naming the parameter; LLM.generate() does where only the model has the range.

    max_tokens: most tokens to generate for each choice, at least 1; 0 in the service only, for a prompt that is
        computed and not continued; None: no bound of its own. A choice also ends with finish_reason "length" at the end
        of the model's context or of the KV pool.
    n: choices for each prompt, at least 1. They share the prompt's KV blocks.
    temperature: divisor of the logits, 0 to 2; 0 (and anything below 1e-5) takes the best token.
    top_k: samples from the k most probable tokens, ties included; 0 or -1: all.
    top_p: samples from the fewest best tokens whose share reaches top_p (nucleus sampling), above 0 to 1; 1: all.
    min_p: drops tokens whose probability is below min_p times the best one's, 0 to 1; 0: none. Applied before top_k,
        which is applied before top_p.
    seed: a whole number of 64 bits, signed. Equal seeds give equal tokens for equal logits, whatever else is in the
        batch (counter-based Philox numbers of seed, choice, position and token). None or -1: the gateway or LLM draws
        one.
    min_tokens: stop tokens, EOS included, cannot be sampled before so many tokens; 0 to max_tokens.
    ignore_eos: True: the model's end-of-sequence tokens do not end a choice.
    stop: texts that end a choice; none of them is empty. The output ends before the text found. LLM takes one text too.
    stop_token_ids: token ids that end a choice, in addition to EOS; the output includes the id.
    logprobs: k adds the natural log probability of each chosen token and of the k best, from the model's logits before
        any adjustment; at most max_logprobs; 0: of the chosen token only; None: no log probabilities.
    presence_penalty: subtracted from the logits of tokens that the output has; -2 to 2, 0: off.
    frequency_penalty: subtracted from a token's logit once for each time the output has it; -2 to 2, 0: off.
    repetition_penalty: divides positive and multiplies other logits of tokens of prompt and output (CTRL, Keskar et
        al. 2019); above 0 to 10, 1: off.
    logit_bias: pairs (token id, value), each value, -100 to 100, added to that token's logit; minus infinity forbids
        the token. LLM takes a dict too.
    allowed_token_ids: the only token ids that can be sampled, at least one; None: all.
    bad_words: texts that are not generated, each with and without a space before it; none of them is empty. The last
        token of such a text cannot be sampled where the output ends with the tokens before it.
    bad_words_token_ids: the same as token ids, in addition to those of bad_words.
    prompt_logprobs: k adds, for each token of the prompt but the first, its natural log probability after the tokens
        before it, and those of the k best, from the model's logits; 0: of the token only; None: none. All of such a
        prompt is computed, whatever the prefix cache has.
    skip_special_tokens: False: the text shows special tokens too, but for the one that ends it (see the next field).
    include_stop_str_in_output: True: the text includes the stop text or the stop token's text that ends it.
    structured_outputs: the form of the text, such as a JSON schema; None: any. The text may end exactly where its form
        is complete, and does so when nothing can follow, even before min_tokens.
    grammar: the same for the engine, as a grammar for llguidance; gateway and LLM make it (workers/text/grammars.py).
    thinking_budget: how many tokens a choice may think, and between which marks; None: as long as it likes.
    detokenize: False: outputs of LLM have token ids and no text; `stop` is then refused.
    output_kind: what AsyncLLM.generate() yields of the request; the others return all of it, whatever this says.
    skip_reading_prefix_cache: True: the whole prompt is computed, whatever the prefix cache has.
    logprob_token_ids: token ids whose log probabilities are added, in place of those of the best tokens; None: none.
    """

    # The gateway looks for `stop` texts, which need a detokenizer; the engine looks for ids. It does not read
    # bad_words, which gateway and LLM turn into ids, or structured_outputs, of which they make `grammar`. Only LLM
    # reads skip_special_tokens and the field behind it, detokenize and output_kind: the gateway has them from the
    # client's body.

    max_tokens: int = 16
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    grammar: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_budget: ThinkingBudget | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None
    logprob_token_ids: tuple[int, ...] | None = None

    def clone(self, **changes: Any) -> "SamplingParams":
        """Returns a copy. changes: fields that it has other values of, since parameters cannot be changed in place;
        checked as by the constructor."""
        changed = msgspec.structs.replace(self, **plain_values(changes))
        check_together(changed)
        return changed


class Pool(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Task of a request that wants the embedding of its prompt in place of new tokens.

    kind: "last" takes the hidden state of the last token, "mean" the mean over all tokens, both after the final norm.
    dimensions: how many leading components to keep; None: all. normalize: the result has length 1 (L2).
    """

    kind: Literal["last", "mean"] = "last"
    normalize: bool = True
    dimensions: int | None = None


NO_TOKENS: Final = msgspec.structs.replace(SamplingParams(temperature=0.0), max_tokens=0)
"""The sampling parameters of a request with a Pool: it has one choice, of no tokens."""


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """Destination of token deltas: the gateway's ZeroMQ endpoint, and the nonce of the present life of that gateway."""

    endpoint: str
    nonce: str


def is_url(source: str) -> bool:
    """Returns whether an adapter source is a URL for fsspec; otherwise it is a folder of this machine."""
    return "://" in source


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Reference to a LoRA adapter, carried in each request so that a group needs no registry.

    name: the name that clients use. digest: hex SHA-256 of the adapter's content (workers/lora/peft/peft_folder.py),
    which identifies its KV blocks and its memory. source: a folder or an fsspec URL, whose content must have that
    digest when a rank reads it.
    """

    name: str
    digest: str
    source: str

    @property
    def is_remote(self) -> bool:
        """True if the source is a URL (s3://, hf://, file://); otherwise it is a folder."""
        return is_url(self.source)


IDLE_PRIORITY: Final = 2**31 - 1
"""The last priority, of work for idle rows: one that has it gives its row to any other request that finds none."""


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Request for `sampling.n` choices of one prompt, or for its embedding."""

    request_id: str
    attempt: int = 0  # number of this dispatch of the request, from 0; a newer one replaces an older one
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # the smaller the earlier
    # longest wait in the queue, in seconds from its acceptance by the engine; None: no limit
    deadline_s: float | None = None
    cache_salt: str = ""  # prefix hits are found only under the same salt
    resume_token_ids: list[list[int]] = []  # empty, or for each choice the tokens that another group has delivered
    trace_ids: dict[str, str] = {}  # headers of distributed tracing
    reply_to: ReplyTo | None = None  # None: there is no gateway
    begun: bool = False  # a group has computed the prompt, which is charged and counted once
    suspect: bool = False  # a group was lost while it ran this request, so that at first it runs alone
    # choices that need no further token although their resume_token_ids do not show it (a stop string was found)
    ended_choices: list[int] = []
    pool: Pool | None = None  # None to generate; else the prompt is embedded, and sampling is NO_TOKENS

    @property
    def public_id(self) -> str:
        """The id that the client, request lines, traces and `tandem explain` have for it: its x-request-id. One request
        with several prompts is several of these."""
        return self.trace_ids.get("x-request-id") or self.request_id

    @property
    def is_idle_work(self) -> bool:
        """True if it is for idle rows only, as a line of a batch is."""
        return self.priority >= IDLE_PRIORITY

    @property
    def finds_prefix(self) -> bool:
        """True if its prompt may begin with KV that exists; False if all of it is computed whatever there is. Log
        probabilities of its prompt are an exception of their own: they are wanted until they have been delivered."""
        return not (self.sampling.skip_reading_prefix_cache or (self.pool is not None and self.pool.kind == "mean"))

    @property
    def is_resumed(self) -> bool:
        """True if another group has accepted it before."""
        return self.attempt > 0 or any(self.resume_token_ids)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Natural log probabilities of one position: its token's, and in `top` those of the best tokens, as (token id,
    logprob), best first. rank: 1 + the number of tokens that are more probable; 0 where nobody has counted."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log probabilities of consecutive tokens of a prompt. first_position: the position of entries[0] in the prompt,
    at least 1.
    """

    first_position: int
    entries: list[TokenLogprobs]


class Usage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Billed token counts of one request.

    prompt_tokens: of the prompt, once for all choices; 0 if it never got a row. completion_tokens: of all choices.
    cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenDelta(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """New tokens of one choice, from one step."""

    request_id: str
    attempt: int
    choice: int
    first_position: int  # output position of token_ids[0]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one entry for each token, if asked for
    finish_reason: FinishReason | None = None  # set in the choice's last delta only
    stop_reason: int | None = None  # the stop token id that ended the choice; None for EOS and for other reasons
    usage: Usage | None = None  # set in the request's last delta only
    error: str | None = None  # the reason why the choice ended with "error"
    # prompt tokens whose KV was found; set in a delta without tokens that tells that the request has got its first row,
    # so that its prompt is billed from now on
    cached_tokens: int | None = None
    # of a request with a Pool, in its last delta: the components as float32, little-endian
    embedding: bytes | None = None
    # of a request that asks for them, in deltas without tokens that come before the first token; `choice` is the one
    # that computes the prompt for all
    prompt_logprobs: PromptLogprobs | None = None
    # (guessed, accepted) draft tokens of the step, if its row had any; accepted ones behind the end of the choice are
    # counted, not sent
    drafts: tuple[int, int] | None = None
    course: Course | None = None  # may be set where usage is


class DeltaBatch(msgspec.Struct, frozen=True, array_like=True, tag="deltas"):
    """All deltas of one step for one gateway, with a sequence number from which the gateway detects gaps."""

    sequence_number: int
    nonce: str
    deltas: list[TokenDelta]


class Abort(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="abort"):
    """Order to end a request, or one choice of it (None: all choices).

    Tokens from output position `keep_positions` on are neither sent nor billed; None: all tokens are kept.
    """

    request_id: str
    attempt: int
    choice: int | None = None
    keep_positions: int | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """End of one request, sent exactly once: output tokens and finish reason of each choice, and the billed counts.

    `refused` is (status, code, param, message) of a request that did not run (to its end) here; otherwise None. group:
    the group that refused it. loss: set if the group was lost.
    """

    request_id: str
    attempt: int
    positions: list[int]
    finish_reasons: list[FinishReason]
    usage: Usage
    refused: tuple[int, str, str | None, str] | None = None
    group: str = ""
    loss: Loss | None = None
    course: Course | None = None  # None: it was not accepted, or nobody knows
