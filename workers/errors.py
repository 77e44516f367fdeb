"""Errors that cross from the engine to whoever asked: few, typed, each with the words the user will read.

Raised by the engine, the text helpers and the executors; mapped to HTTP statuses in cluster/gateway/http_errors.py.
Asserts are for our own invariants; these are for what users and the world do.
"""

from configs.errors import SettingsError, TandemError, UnsupportedModelError

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
    """One request cannot be served: contracts' `code`, the `param` at fault, its HTTP `status`."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


class ContextLengthExceeded(RequestRefused):
    """Prompt and wanted output do not fit the model's context or the KV pool. `param` is the prompt's name: "prompt"
    for the engine, in a client's body perhaps another."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, code="context_length_exceeded", param=param)


class QueueFull(RequestRefused):
    """The group's waiting queue is at its limit: come back later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="slow_down", status=429)


class AdapterRefused(TandemError):
    """A LoRA adapter cannot be served: what is wrong with its files, in words that name the tensor or the field. The
    source is "it": whoever was given one names it in front."""


class AdapterUnreadable(AdapterRefused):
    """Its files cannot be read now, which may pass; the words name paths and causes and are not for clients."""


class GroupLost(TandemError):
    """A rank or the coordinator of a group died; its unfinished requests must go to another group."""
