"""Errors about settings and checkpoints: what a user can mend by changing a flag, a file or a model.

Lives in configs/ because every folder may raise them; workers/errors.py adds those that belong to one request.
"""


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class SettingsError(TandemError):
    """A setting cannot be honoured. `flag` is what the user should change, and the message names its value. As text:
    the message, with the flag in front unless it is named there."""

    def __init__(self, message: str, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag

    def __str__(self) -> str:
        message = super().__str__()
        return message if not self.flag or self.flag in message else f"{self.flag}: {message}"


class UnsupportedModelError(SettingsError):
    """The checkpoint is of an architecture or a form that the registry has no row for."""
