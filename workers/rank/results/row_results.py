"""The answers of a step's rows, from what was sampled. Called by model_runner.py on the rank that samples. S sampled
tokens."""

from collections.abc import Mapping, Sequence

from tandem.workers.messages.step import RowResult
from tandem.workers.rank.drafts import Accepted
from tandem.workers.sampling.sampler import Sampled


def row_results(
    rows_S: Sequence[int], sampled: Sampled, errors: Mapping[int, str], accepted: Sequence[Accepted] | None
) -> list[RowResult]:
    """Returns one RowResult for each sampling row, in the plan's order. rows_S: the row of each sampled token. errors:
    why rows have no token, by row. accepted: the outcome of each row; None: of a step without drafts."""
    if accepted is not None:
        return [_result_of(outcome, sampled, errors) for outcome in accepted]
    if any(sampled.failed) or errors:
        singles = (Accepted(row, place, 1, 0, 0) for place, row in enumerate(rows_S))
        return [_result_of(single, sampled, errors) for single in singles]
    return [
        RowResult(row=row, token_ids=[token], logprobs=None if entry is None else [entry])
        for row, token, entry in zip(rows_S, sampled.token_ids, sampled.logprobs, strict=True)
    ]


def _result_of(outcome: Accepted, sampled: Sampled, errors: Mapping[int, str]) -> RowResult:
    """The tokens up to the first that could not be sampled, and why."""
    own = slice(outcome.first, outcome.first + outcome.count)
    error = errors.get(outcome.row)
    if error is not None:
        return RowResult(row=outcome.row, token_ids=[], error=error, num_drafts=outcome.num_drafts)
    if any(sampled.failed[own]):
        own = slice(own.start, sampled.failed.index(True, own.start))
        error = sampled.reasons[own.stop]
    entries = [entry for entry in sampled.logprobs[own] if entry is not None]
    return RowResult(
        row=outcome.row,
        token_ids=sampled.token_ids[own],
        logprobs=entries or None,
        error=error,
        num_drafts=outcome.num_drafts,
    )
