"""DistillSettings: what is made of a target, checked; everything by which two runs may differ in what they write.
Torch-free."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from tandem.configs.errors import SettingsError

DRAFT: Final = "draft"
EAGLE: Final = "eagle"
MEDUSA: Final = "medusa"
METHODS: Final = (DRAFT, EAGLE, MEDUSA)
SERVED_AS: Final = {DRAFT: "draft_model", EAGLE: "eagle3", MEDUSA: "medusa"}
"""The `method` of --speculative-config."""
TEMPERATURES: Final = (0.7, 1.0)
"""Temperatures of the answers to learn from, in turn."""
DRAFT_VOCABULARY: Final = 32000
"""Tokens of an EAGLE-3 head's vocabulary unless the user says otherwise, as most published ones have it."""
LONGEST_RUN: Final = 16
"""The most places, as of --speculative-config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """method: see METHODS. minutes: for answers and training together; steps: of training, in place of what the minutes
    leave. layers: of a draft model, or of a Medusa head's block. hidden, heads: of a draft model. draft_vocab: of an
    EAGLE-3 head. places: tokens that are guessed ahead, of which the report tells, and a Medusa has as many heads.
    answers: to a prompt, at most. max_tokens: of an answer. learning_rate: the highest; None: the student's own."""

    method: str = DRAFT
    minutes: float = 10.0
    steps: int | None = None
    layers: int = 1
    hidden: int | None = None
    heads: int | None = None
    draft_vocab: int | None = None
    places: int = 4
    answers: int = 8
    max_tokens: int = 256
    learning_rate: float | None = None
    seed: int = 0

    def checked(self) -> "DistillSettings":
        """Returns them. SettingsError, by flag, for values that there are not or do not fit."""
        if self.method not in METHODS:
            raise SettingsError(f"{self.method}: there are {', '.join(METHODS)}", "METHOD")
        if not 0 < self.minutes < float("inf"):
            raise SettingsError(f"{self.minutes:g}: more than 0", "--minutes")
        for flag, value in (
            ("--steps", self.steps),
            ("--layers", self.layers),
            ("--hidden", self.hidden),
            ("--heads", self.heads),
            ("--draft-vocab", self.draft_vocab),
            ("--answers", self.answers),
        ):
            if value is not None and value < 1:
                raise SettingsError(f"{value}: at least 1", flag)
        if self.max_tokens < 8:
            raise SettingsError(f"{self.max_tokens}: at least 8", "--max-tokens")
        if not 1 <= self.places <= LONGEST_RUN:
            raise SettingsError(f"{self.places}: from 1 to {LONGEST_RUN}", "--num-speculative-tokens")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise SettingsError(f"{self.learning_rate:g}: between 0 and 1", "--learning-rate")
        self._check_unread()
        return self

    def _check_unread(self) -> None:
        """SettingsError for flags that the method does not read."""
        if self.method != DRAFT and (self.hidden is not None or self.heads is not None):
            flag = "--hidden" if self.hidden is not None else "--heads"
            raise SettingsError(f"{self.method} has the target's; draft has its own", flag)
        if self.method == EAGLE and self.layers != 1:
            raise SettingsError(f"{self.layers}: an EAGLE-3 head has one layer", "--layers")
        if self.method != EAGLE and self.draft_vocab is not None:
            raise SettingsError(
                f"{self.method} has the target's whole vocabulary; eagle may have less", "--draft-vocab"
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
