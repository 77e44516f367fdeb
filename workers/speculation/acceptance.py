"""DraftAcceptance: what became of the draft tokens of one request, as vLLM's answers report it
(--per-request-spec-decode-metrics): docs.vllm.ai, features/speculative_decoding/acceptance_metrics."""

from typing import Any


class DraftAcceptance:
    """Counts of one choice, step by step. most: draft tokens of a step at most; detailed: each step is kept too.

    Memory grows with the steps only where detailed: at most two small integers for each output token.
    """

    def __init__(self, most: int, *, detailed: bool) -> None:
        self._most = most
        self._steps_by_length: dict[int, list[int]] = {}
        self._steps: list[tuple[int, int]] | None = [] if detailed else None

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Adds a step that verified num_drafts >= 1 draft tokens."""
        self._steps_by_length.setdefault(num_drafts, [0] * (num_drafts + 1))[num_accepted] += 1
        if self._steps is not None:
            self._steps.append((num_drafts, num_accepted))

    def report(self) -> dict[str, Any]:
        """The object `metrics.speculative_decoding` of the answer, zeros where nothing was drafted."""
        rows = sorted(self._steps_by_length.items())
        histogram = [0] * (self._most + 1)
        for _, counts in rows:
            for accepted, steps in enumerate(counts):
                histogram[accepted] += steps
        num_steps = sum(histogram)
        num_accepted = sum(accepted * steps for accepted, steps in enumerate(histogram))
        num_drafts = sum(length * sum(counts) for length, counts in rows)
        report: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": num_accepted / num_drafts if num_drafts else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(length): counts for length, counts in rows},
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafts,
            "num_spec_tokens": self._most,
        }
        if self._steps is not None:
            report["per_step_accepted"] = [accepted for _, accepted in self._steps]
            report["per_step_drafted"] = [drafted for drafted, _ in self._steps]
        return report
