"""Errors about settings and checkpoints, which a user corrects by changing a flag, a file or a model.

They are in configs/ because every folder may raise them. Errors of one request are in workers/messages/errors.py.
"""

import re


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class SettingsError(TandemError):
    """A setting that cannot be honoured. `flag` is the one to change, and the message names its value. As text: the
    message, with the flag in front of it unless the message contains the flag."""

    def __init__(self, message: str, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag

    def __str__(self) -> str:
        message = super().__str__()
        is_named = not self.flag or re.search(rf"(?<![\w-]){re.escape(self.flag)}(?![\w-])", message)
        return message if is_named else f"{self.flag}: {message}"  # --record is not named by --record-mib


class UnsupportedModelError(SettingsError):
    """A checkpoint of an architecture or a format that is not supported (workers/models/spec/family_rows/)."""
