"""StepTurns: which rows share the step that is planned: a request on probation has its steps to itself, and adapters
beyond --max-loras take turns (waiting/probation.py, waiting/max_loras.py). The scheduler asks."""

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.max_loras import MaxLoras
from tandem.workers.engine.waiting.probation import Probation


class StepTurns:
    """The turns of one engine. adapters: None without adapters."""

    def __init__(self, probation: Probation, adapters: MaxLoras | None) -> None:
        self._probation = probation
        self._adapters = adapters

    def begin_step(self, *, has_room: bool) -> bool:
        """Chooses who shares the step that is planned next. has_room: the first in the queue may get a row in it.
        Returns whether some running sequence may be left out."""
        probation, adapters = self._probation, self._adapters
        leaves_out = probation.current is not None
        if adapters is None:
            return leaves_out
        if probation.is_alone and probation.current is not None:
            adapters.begin_step_of(probation.current)
            return True
        return adapters.begin_step(probation.first_waiting() if has_room else None) or leaves_out

    def shares_step(self, seq: Sequence) -> bool:
        """Returns whether a sequence has, or may get, a part in the step."""
        return self._probation.shares_step(seq.state) and (self._adapters is None or self._adapters.shares_step(seq))
