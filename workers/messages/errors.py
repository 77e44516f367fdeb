"""Typed errors of the engine, the text helpers and the executors, with the message that the user reads.

cluster/gateway/http/error_answers.py maps them to HTTP statuses. Asserts check our own invariants; these errors are for
wrong input and for failures of the environment.
"""

from tandem.configs.errors import SettingsError, TandemError, UnsupportedModelError

__all__ = [
    "AdapterRefused",
    "AdapterUnreadable",
    "ContextLengthExceeded",
    "GroupLost",
    "QueueFull",
    "RequestRefused",
    "SettingsError",
    "TandemError",
    "UnsupportedModelError",
]


class RequestRefused(TandemError):
    """Refusal of one request, with the error `code` and HTTP `status` of the API and the `param` at fault, if any."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


class ContextLengthExceeded(RequestRefused):
    """Refusal of a prompt that does not fit the model's context or the KV pool (status 400). `param` names the prompt:
    "prompt" in the engine; a client's body may have another name for it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, code="context_length_exceeded", param=param)


class QueueFull(RequestRefused):
    """Refusal because the group's waiting queue is at its limit (status 429, code "slow_down"); may be tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="slow_down", status=429)


class AdapterRefused(TandemError):
    """Refusal of a LoRA adapter whose content cannot be served. The message names the tensor or the field, and calls
    the source "it": callers put the source's name in front."""


class AdapterUnreadable(AdapterRefused):
    """Refusal of an adapter whose files cannot be read now; a later attempt may succeed. The message names paths and
    causes and is not sent to clients."""


class GroupLost(TandemError):
    """Loss of a group: a rank or its coordinator died or hangs. Its unfinished requests must go to another group.
    by_step: whether the step under way may have caused it. is_planned: a rank was told to end."""

    def __init__(self, message: str, *, by_step: bool = True, is_planned: bool = False) -> None:
        super().__init__(message)
        self.by_step = by_step
        self.is_planned = is_planned
