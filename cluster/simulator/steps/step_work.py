"""PlanWork: what a step computes, as far as its time depends on it, counted from its plan as the ranks would.

The same count is made of plans that a real group has logged (step_fit.py) and of those that a simulated one makes, so a
fit of the one holds for the other.
"""

from typing import NamedTuple

from tandem.workers.messages.step import StepPlan


class PlanWork(NamedTuple):
    """The work of one step. decodes: rows that are one token behind, as the scheduler has it. prefill_tokens: those of
    all other rows. context_tokens: tokens whose KV is there before the step, summed over its rows."""

    decodes: int
    prefill_tokens: int
    context_tokens: int


class WorkCounter:
    """Follows the plans of one group, in their order."""

    def __init__(self) -> None:
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}

    def count(self, plan: StepPlan) -> PlanWork:
        """Returns the work of the next plan. Rows that were bound before the first plan begin at nothing computed."""
        computed, known = self._computed, self._known
        for row, num_known, num_computed in plan.rolled_back:
            computed[row], known[row] = num_computed, num_known
        for init in plan.new_rows:
            computed[init.row], known[init.row] = init.num_computed, len(init.token_ids)
        decodes = prefill_tokens = context_tokens = 0
        for work in plan.work:
            row, num_tokens = work.row, work.num_tokens
            before = computed.get(row, 0)
            computed[row] = before + num_tokens
            context_tokens += before
            if num_tokens == 1 and before + 1 >= known.get(row, 0):
                decodes += 1
            else:
                prefill_tokens += num_tokens
        return PlanWork(decodes, prefill_tokens, context_tokens)
