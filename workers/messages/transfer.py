"""Messages between coordinator and ranks for work beside the steps: moves of KV and adapters, grammars to compile.

Encoded as in request.py. Every rank carries out every TransferOp for its own shard, on the lane of lane_of(), and
answers it once with a TransferResult. Tickets are numbered by the coordinator
(workers/engine/transfers/transfer_manager.py).
"""

from typing import Literal

import msgspec

from tandem.workers.messages.request import AdapterRef

CopyKind = Literal["store", "load", "spill", "fetch"]
FailureKind = Literal["content", "source", "disk", "internal"]
LaneKind = Literal["memory", "disk", "placement", "folder", "url", "grammar"]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a transfer failed on a rank. Only the message of kind "content" may reach clients.

    content: what was asked for cannot be used, and no later try will help. source: it could not be read, or is not what
    was listed. disk: the disk accepts no more writes. internal: a fault of the rank.
    """

    kind: FailureKind
    message: str


class CopyKV(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="copy_kv"):
    """Order to copy the KV of these blocks between tiers. The lists that are used have one entry for each block, in the
    same order."""

    ticket: int = 0
    kind: CopyKind  # store is device -> host, load host -> device, spill host -> disk, fetch disk -> host
    slots: list[int]  # host slots
    block_ids: list[int] = []  # device blocks, for store and load
    keys: list[bytes] = []  # names of files, for spill and fetch
    dropped: list[bytes] = []  # keys whose files are removed first


class FetchAdapter(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="fetch_adapter"):
    """Order to read an adapter's source into host memory and to check it whole."""

    ticket: int = 0
    adapter: AdapterRef


class PlaceAdapter(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="place_adapter"):
    """Order to copy an adapter from host memory to device `pages`; plans name it by `slot` from then on."""

    ticket: int = 0
    adapter: AdapterRef
    slot: int
    pages: list[int]


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="drop_adapter"):
    """Order to remove an adapter from host memory."""

    ticket: int = 0
    adapter: AdapterRef


class CompileGrammar(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="compile_grammar"):
    """Order to compile a grammar (llguidance's text), which rows name by its digest from then on. Ranks that do not
    sample have nothing to do."""

    ticket: int = 0
    digest: str
    text: str


class DropGrammar(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="drop_grammar"):
    """Order to forget a compiled grammar, unless a later order than this has compiled it again."""

    ticket: int = 0
    digest: str


GrammarOp = CompileGrammar | DropGrammar
TransferOp = CopyKV | FetchAdapter | PlaceAdapter | DropAdapter | CompileGrammar | DropGrammar


class TransferResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="transferred"):
    """Answer of a rank to a TransferOp."""

    rank: int
    ticket: int
    # indices in a CopyKV's lists whose bytes did not arrive; other ops have failed if `failure` is set
    failed: list[int] = []
    failure: Failure | None = None  # the reason of the last failure
    copy_s: float = 0.0  # seconds the copy took
    pages: int = 0  # device pages that a fetched adapter needs on this rank


def lane_of(op: TransferOp) -> LaneKind:
    """Returns the lane of a rank that carries out an op: local folders never wait for a remote source."""
    if isinstance(op, CopyKV):
        return "memory" if op.kind in ("store", "load") else "disk"
    if isinstance(op, FetchAdapter):
        return source_lane(op.adapter)
    if isinstance(op, CompileGrammar | DropGrammar):
        return "grammar"
    return "placement"


def source_lane(ref: AdapterRef) -> LaneKind:
    """Returns the lane that reads an adapter's source."""
    return "url" if ref.is_remote else "folder"
