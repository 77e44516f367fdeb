"""Records of a recording: one for each call of the engine, with all that it read and all that it gave its ranks.

Encoded as messages are (workers/messages/): msgpack arrays, whose field order is the format.
"""

from typing import Final

import msgspec

from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest
from tandem.workers.messages.step import ExpertTokens, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferOp, TransferResult

FORMAT: Final = 1
"""Number of this format; a file of another one is refused."""


class TurnInput(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Engine.turn(timeout_s)."""

    timeout_s: float


class RequestInput(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Engine.add_request(request)."""

    request: GenerationRequest


class ResetInput(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Engine.reset_prefix_cache()."""


class WeightsInput(msgspec.Struct, frozen=True, array_like=True, tag="weights"):
    """Engine.set_weights(weights)."""

    weights: dict[str, float]


class DrainInput(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Engine.drain_charges()."""


class ChargesInput(msgspec.Struct, frozen=True, array_like=True, tag="charges"):
    """Engine.merge_remote_charges(charges)."""

    charges: dict[str, float]


class PinnedInput(msgspec.Struct, frozen=True, array_like=True, tag="pinned"):
    """Engine.set_pinned_adapters(adapters), in the order in which the engine went through them."""

    adapters: list[AdapterRef]


EngineInput = TurnInput | RequestInput | Abort | ResetInput | WeightsInput | DrainInput | ChargesInput | PinnedInput
RankMessage = StepResult | TransferResult | ExpertTokens


class BoundRow(msgspec.Struct, frozen=True, array_like=True):
    """The choice that a row of a plan's new_rows belongs to."""

    request_id: str
    attempt: int
    choice: int


class CallRecord(msgspec.Struct, frozen=True, array_like=True):
    """One call. clock: readings, in seconds. polled: what each look at the ranks gave, None for nothing. plans, ops,
    num_questions: what went to the ranks; bound: the choices of the plans' new rows, in order. error: the class of the
    exception that the call ended with, and what tells it from others of the class; None: it returned."""

    input: EngineInput
    clock: list[float]
    polled: list[RankMessage | None]
    plans: list[StepPlan]
    ops: list[TransferOp]
    num_questions: int = 0
    bound: list[BoundRow] = []
    error: str | None = None


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first record of a file. product: the version of Tandem that wrote it, whose plans another one need not make.
    mode: "full" with token ids, "redacted" without. settings: EngineSettings as msgpack. num_blocks: KV blocks of the
    group. is_whole: the recording begins with the group's life."""

    format: int = FORMAT
    product: str
    mode: str
    group: str
    written_s: float
    settings: bytes
    num_blocks: int
    is_whole: bool
    num_calls: int


def error_word(error: BaseException) -> str:
    """Returns the class of an exception, and its code if it is a refusal: its words may have a client's."""
    code = getattr(error, "code", None)
    return type(error).__name__ if code is None else f"{type(error).__name__}: {code}"
