"""Everything that crosses a process line: gateway <-> coordinator and coordinator <-> ranks.

Frozen msgspec structs encoded as msgpack arrays (field order is the wire format: append only). Torch-free. Every
result names what it answers. gc=False where there are many: they hold no cycles. Token ids are plain ints; positions
count a sequence's tokens from 0, output positions count generated tokens from 0.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a request wants its tokens chosen; already validated, defaults resolved.

    seed None: whoever takes the request in (gateway, LLM) draws one. temperature 0 is greedy; top_k 0 and top_p 1 and
    min_p 0 are off. `logprobs` None: none; k: the chosen token's and the k best. `stop` strings are watched by the
    gateway; ids (EOS included, unless ignore_eos) by the engine.
    """

    max_tokens: int
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


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """Where token deltas go: the gateway's ZeroMQ endpoint and the nonce that names this life of the gateway."""

    endpoint: str
    nonce: str


def is_url(source: str) -> bool:
    """Something for fsspec, not a folder of this machine."""
    return "://" in source


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A LoRA adapter as a request carries it, so that a group needs no registry to serve it.

    digest: hex SHA-256 of its content (workers/peft_folder.py); it names KV and memory, never `name`, which
    is what clients say. source: a folder or an fsspec URL; what lies there must still have that digest when it is read.
    """

    name: str
    digest: str
    source: str

    @property
    def is_remote(self) -> bool:
        """Whether the source is a URL (s3://, hf://, file://) rather than a folder."""
        return is_url(self.source)


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One prompt, `sampling.n` choices. `resume_token_ids[i]`: tokens of choice i delivered by another group."""

    request_id: str
    epoch: int = 0
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    tenant: str = "default"
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    resume_token_ids: list[list[int]] = []
    trace_ids: dict[str, str] = {}
    reply_to: ReplyTo | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Natural log probabilities of one position: the chosen token's, and the best `top` as (token id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Billed counts of one request: prompt once (0 while it only queued), all choices' output, prompt tokens found in
    the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenDelta(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """New tokens of one choice. `first_position` is the output position of token_ids[0]; the last delta has a reason.

    `stop_reason` is the stop token id that ended it, None for EOS. `usage` comes with the request's last delta.
    """

    request_id: str
    epoch: int
    choice: int
    first_position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    usage: Usage | None = None
    error: str | None = None


class DeltaBatch(msgspec.Struct, frozen=True, array_like=True, tag="deltas"):
    """All deltas of one step for one gateway: one message, numbered so that a gap is seen."""

    sequence_number: int
    nonce: str
    deltas: list[TokenDelta]


class Abort(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="abort"):
    """Stop a request (or one choice). Tokens from `keep_positions` on are neither sent nor billed; None keeps all."""

    request_id: str
    epoch: int
    choice: int | None = None
    keep_positions: int | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The handle call's answer, once per request: output positions sent per choice, why each ended, and the bill.

    `refused` carries (status, code, param, message) when the request never ran.
    """

    request_id: str
    epoch: int
    positions: list[int]
    finish_reasons: list[FinishReason]
    usage: Usage
    refused: tuple[int, str, str | None, str] | None = None


# ---- coordinator <-> ranks: one step ----------------------------------------------------------------------------


class RowSampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The part of SamplingParams that ranks need, per row. `stop_token_ids` (EOS too) are masked before min_tokens."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class RowInit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Binds a row (a place in the ranks' tables) to a sequence; replaces whatever the row held.

    token_ids: every token known so far (prompt, then output). The first num_computed of them have their KV in the
    blocks that the first RowWork names. prompt_len: the original prompt, for penalties and min_tokens.
    """

    row: int
    token_ids: list[int]
    prompt_len: int
    num_computed: int
    sampling: RowSampling
    adapter_slot: int | None = None


class RowWork(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One row's share of a step: compute the next num_tokens tokens.

    The rank knows the row's computed count and derives positions. `samples`: the work reaches the last known token, so
    one token is sampled. token_ids: tokens that the coordinator knows and this rank lacks (PP > 1: the ones sampled
    earlier). new_block_ids are appended to the row's block table; replaced_blocks are (index, block id), after a
    copy-on-write.
    """

    row: int
    num_tokens: int
    samples: bool
    new_block_ids: list[int] = []
    token_ids: list[int] = []
    replaced_blocks: list[tuple[int, int]] = []


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="step"):
    """What every rank does next. Order: free rows, bind new rows, extend tables, copy blocks, forward, sample.

    work holds each row at most once. block_copies are (source, destination) block ids on the device. awaits: tickets of
    loads that rows of this plan use; each layer waits for its own part.
    """

    step_id: int
    work: list[RowWork]
    new_rows: list[RowInit] = []
    freed_rows: list[int] = []
    block_copies: list[tuple[int, int]] = []
    awaits: list[int] = []


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Answer to one RowWork with samples=True: accepted tokens (one, more with speculation), or why there is none."""

    row: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True, tag="result"):
    """Answer to a StepPlan: one RowResult per sampling RowWork, in the plan's order. Seconds, on the last stage."""

    step_id: int
    rows: list[RowResult]
    device_s: float = 0.0
    wait_s: float = 0.0


# ---- coordinator <-> ranks: KV between tiers -------------------------------------------------------------------

TransferKind = Literal["store", "load", "spill", "fetch"]


class Transfer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="transfer"):
    """To every rank, beside the plans: move the KV of these blocks, each rank its own shard.

    store: device -> host, load: host -> device, spill: host -> disk, fetch: disk -> host. `slots` are host slots;
    block_ids (store, load) device blocks; keys (spill, fetch) name files; `dropped` files are removed first.
    """

    ticket: int
    kind: TransferKind
    slots: list[int]
    block_ids: list[int] = []
    keys: list[bytes] = []
    dropped: list[bytes] = []


AdapterMoveKind = Literal["fetch", "place", "drop"]


class AdapterMove(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="adapter"):
    """To every rank, beside the plans: move an adapter, each rank its own shard.

    fetch: source -> host memory, checked whole; the answer says how many device pages it takes on that rank. place:
    host memory -> these device pages, known to plans as `slot` from then on. drop: out of host memory.
    """

    ticket: int
    kind: AdapterMoveKind
    adapter: AdapterRef
    slot: int = -1
    pages: list[int] = []


class TransferDone(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="transferred"):
    """From a rank: its part of a ticket is over. `failed`: places in the ticket whose bytes did not arrive; an
    AdapterMove has failed when there is an error. pages: what a fetched adapter takes on this rank's device.

    Ticket 0 is the first word of a rank's mover: it listens. `error` says what went wrong, `disk_error` that the disk
    takes no more; of an AdapterMove, that not its content was wrong: its files could not be read now, or the rank
    failed, and `error` is for logs, not for clients. copy_s: seconds the bytes took.
    """

    rank: int
    ticket: int
    failed: list[int] = []
    error: str | None = None
    disk_error: bool = False
    copy_s: float = 0.0
    pages: int = 0


class RankTiers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The lower tiers as one rank sees them: host slots (of its own block_bytes each), where their memory comes from
    (None: its own), its folder on disk, and the digest of what makes bytes readable (offload/layout.py)."""

    num_slots: int
    layout: bytes
    host_socket: str | None = None
    host_token: str | None = None
    disk_folder: str | None = None


# ---- coordinator <-> ranks: life cycle --------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame from a rank: who it is. pid is for the log and for tests that kill it."""

    rank: int
    pid: int
    host: str


class RankSetup(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="setup"):
    """To every rank: build your shard. `settings`: EngineSettings as msgpack; master_*: torch.distributed's address.

    master_port None, to rank 0: listen on a free port of master_address and tell it (RankListening).
    ranks_on_node: how many ranks share this rank's machine, those of other groups that it may hold included (threads
    and memory are divided by it). pulse_endpoint: where to echo probes (rank/pulse_echo.py).
    """

    settings: bytes
    world_size: int
    master_address: str
    master_port: int | None
    ranks_on_node: int
    pulse_endpoint: str | None = None


class RankListening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """From rank 0 of several: the port where it holds the rendezvous; the others are set up with it."""

    rank: int
    port: int


class RankLoading(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="loading"):
    """From a rank, while it reads its weights: how many bytes of its own shard it has, of how many."""

    rank: int
    loaded_bytes: int
    total_bytes: int


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="loaded"):
    """From a rank: weights are in memory. num_blocks is the most KV blocks this rank can hold; kv_dtype is what they
    hold (--kv-cache-dtype's names), None: dtype.

    host_weight_bytes of weight_bytes are the matrices of streamed_layers, kept in host memory; they pass through
    buffer_bytes of the device. adapter_pages: room for LoRA adapters on the device (0: --enable-lora is off).
    """

    rank: int
    num_blocks: int
    weight_bytes: int
    block_bytes: int
    device: str
    dtype: str
    threads: int
    load_s: float
    kv_dtype: str | None = None
    resident_layers: int = 0
    streamed_layers: int = 0
    host_weight_bytes: int = 0
    buffer_bytes: int = 0
    adapter_pages: int = 0
    adapter_page_bytes: int = 0


class AllocateKV(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """To every rank: allocate this many KV blocks (the least that any rank can hold), warm up, and say Ready."""

    num_blocks: int
    tiers: RankTiers | None = None


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """From a rank: steps may come. `tiers_error`: why it has no lower tiers although they were asked for."""

    rank: int
    tiers_error: str | None = None


class RankFailed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="failed"):
    """From a rank: it cannot go on. `flag` names the setting to change, when one would help."""

    rank: int
    message: str
    flag: str | None = None


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """To every rank: finish and exit with status 0."""


ToRank = RankSetup | AllocateKV | StepPlan | Shutdown
FromRank = Hello | RankListening | RankLoading | RankLoaded | RankReady | RankFailed | StepResult | TransferDone
ToGateway = DeltaBatch
FromGateway = Abort
