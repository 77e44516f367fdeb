"""The course of a request, made once, at its end, of counts that exist: the engine's own at three moments of it.

The steps of a phase are those whose results came between two of these moments. With steps in flight this is a step off
at each end, as the others' are.
"""

from tandem.workers.engine.base.sequence import RequestState, StepMark
from tandem.workers.engine.base.stats import Collector
from tandem.workers.messages.course import Course, Phase


def mark(collector: Collector) -> StepMark:
    """Returns the steps so far."""
    tokens = int(collector.iteration_tokens.total)
    return StepMark(collector.returned_steps, collector.returned_rows, tokens, collector.device_s)


def take_course(state: RequestState, collector: Collector, now_s: float) -> Course:
    """Returns the course of a request whose choices have all ended, and keeps it in its state. Idempotent."""
    if state.course is None:
        state.course = _course(state, mark(collector), now_s)
    return state.course


def _course(state: RequestState, end: StepMark, now_s: float) -> Course:
    prefill = decode = None
    if state.first_step is not None and state.first_step_s is not None:
        until_s, until = now_s, end
        if state.first_token is not None and state.first_token_s is not None:
            until_s, until = state.first_token_s, state.first_token
            decode = _phase(state.first_token, end, now_s - until_s)
        prefill = _phase(state.first_step, until, until_s - state.first_step_s)
    drafting = [seq.drafting for seq in state.sequences]
    began_s = now_s if state.first_step_s is None else state.first_step_s
    return Course(
        queue_s=began_s - state.arrival_s,
        waited_s={cause: seconds for cause, seconds in state.waited_s.items() if seconds > 0},
        prefill=prefill,
        decode=decode,
        cached_tokens=state.cached_tokens,
        num_drafts=sum(record.drafted for record in drafting),
        num_accepted=sum(record.accepted for record in drafting),
        num_preemptions=state.num_preemptions,
        paused_s=state.paused_s,
    )


def _phase(begin: StepMark, end: StepMark, seconds: float) -> Phase:
    steps, rows, tokens, device_s = (after - before for before, after in zip(begin, end, strict=True))
    return Phase(seconds, int(steps), int(rows), int(tokens), float(device_s))
