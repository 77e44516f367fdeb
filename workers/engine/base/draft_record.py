"""DraftRecord, what became of one sequence's drafts, and DraftStats, of all of a group's: drafting/drafting.py."""

from dataclasses import dataclass
from typing import Annotated

from tandem.workers.engine.base.metric_rows import Metric


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Drafts of one sequence, and what became of them (drafting/draft_odds.py)."""

    tried: float = 0.0  # drafts that were compared with the model's token, with weights that fade
    right: float = 0.0  # of those, the accepted ones
    before: float = -1.0  # the chance that it had before any of them; below 0: none was compared yet
    chance: float = -1.0  # of a draft behind right ones to be right too, 0 to 1; below 0: as a new sequence's
    try_at: int = 0  # number of the sequence's tokens from which drafts that do not pay are tried again
    pause: int = 0  # tokens between such tries; 0: its drafts pay
    ask_at: int = 0  # number of tokens from which it is asked for drafts again, after steps in which none was guessed
    num_empty: int = 0  # such steps in a row
    drafted: int = 0  # draft tokens from the start
    accepted: int = 0  # of those


@dataclass(frozen=True)
class DraftStats:
    """Counts from the start, frozen. The first draft of a row has position 0."""

    num_drafts: Annotated[int, Metric("counter", "spec_decode_num_drafts_total", "Rows of steps that had drafts.")]
    num_draft_tokens: Annotated[int, Metric("counter", "spec_decode_num_draft_tokens_total", "Draft tokens.")]
    num_accepted: Annotated[
        int, Metric("counter", "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.")
    ]
    accepted_per_position: Annotated[
        tuple[int, ...],
        Metric(
            "counter",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens that were accepted, by place.",
            "position",
        ),
    ]
