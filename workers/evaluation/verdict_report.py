"""A verdict in words for a terminal, and all of it as one JSON object."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tandem.workers.evaluation.evaluate import ScoredText
from tandem.workers.evaluation.judgement import TokenScores, Verdict, worst_of

TOKENS_BEFORE = 12
"""Tokens that are shown ahead of a bad one."""


def report(verdict: Verdict, scores: TokenScores, sample: ScoredText, against: str | None, worst: int) -> list[str]:
    """Returns lines: the figures, and the worst tokens with what stands before them. against: the reference's name."""
    share = "all" if verdict.tokens == sample.total else f"{verdict.tokens} of {sample.total}"
    lines = [
        f"{sample.file.name}: {share} tokens scored, in windows of {sample.window}, each with {sample.stride} new ones",
        f"perplexity         {verdict.perplexity:.4f}",
    ]
    if verdict.bits_per_byte is not None:
        lines.append(f"bits per byte      {verdict.bits_per_byte:.4f}")
    if (beside := verdict.against) is not None:
        lines += [
            f"against {against}, whose perplexity is {beside.perplexity:.4f}:",
            f"KL, nats a token   mean {beside.mean_kl:.3g}, median {beside.median_kl:.3g}, "
            f"99 % below {beside.p99_kl:.3g}, most {beside.max_kl:.3g}",
            f"first choice       the same at {beside.agreement:.2%} of the tokens",
        ]
    return [*lines, *_worst(scores, sample, worst)]


def as_json(verdict: Verdict, scores: TokenScores, sample: ScoredText, worst: int) -> dict[str, Any]:
    """Returns the figures, the worst tokens in words, and under `scores` a list for each field of TokenScores that
    there is, with an item for each token: positions count a text's tokens from 0, logarithms are natural."""
    columns = {name: column for name, column in asdict(scores).items() if column is not None}
    return {
        **verdict.as_json(),
        "window": sample.window,
        "stride": sample.stride,
        "tokens_of_file": sample.total,
        "worst": [_bad_token(scores, sample, place) for place in worst_of(scores, worst)],
        "scores": {name.removesuffix("_N"): column.tolist() for name, column in columns.items()},
    }


def _bad_token(scores: TokenScores, sample: ScoredText, place: int) -> dict[str, Any]:
    text, position = int(scores.text_N[place]), int(scores.position_N[place])
    found = {
        "text": text,
        "position": position,
        "before": sample.text_of(text, position, TOKENS_BEFORE),
        "token": sample.text_of(text, position),
        "logprob": float(scores.logprob_N[place]),
        "best": _shown(sample, int(scores.best_N[place])),
    }
    if scores.kl_N is None or scores.ref_logprob_N is None or scores.ref_best_N is None:
        return found
    beside = {
        "kl": float(scores.kl_N[place]),
        "ref_logprob": float(scores.ref_logprob_N[place]),
        "ref_best": _shown(sample, int(scores.ref_best_N[place])),
    }
    return {**found, **beside}


def _worst(scores: TokenScores, sample: ScoredText, count: int) -> Iterator[str]:
    if not count:
        return
    has_reference = scores.kl_N is not None
    yield "worst tokens: " + ("KL, log probability here and of the reference" if has_reference else "log probability")
    for place in worst_of(scores, count):
        bad = _bad_token(scores, sample, place)
        figures = (
            f"{bad['kl']:8.3f}{bad['logprob']:9.2f}{bad['ref_logprob']:9.2f}"
            if has_reference
            else (f"{bad['logprob']:9.2f}")
        )
        choice = f"{bad['best']!r}, there {bad['ref_best']!r}" if has_reference else f"{bad['best']!r}"
        yield f"{figures}  {bad['before']!r} {bad['token']!r}; first choice {choice}"


def _shown(sample: ScoredText, token_id: int) -> str:
    return sample.tokenizer.decode([token_id], skip_special_tokens=False)
