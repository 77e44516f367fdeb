"""The course of a request: how long it waited and for what, its steps, and beside what; made once, at its end."""

import pytest
from builders import Harness, harness, request
from fake_adapters import AdapterPlan

from tandem.workers.messages.course import Course
from tandem.workers.messages.request import Abort


def course_of(h: Harness, name: str) -> Course:
    """The course as the end has it; the last delta has the same, or none."""
    course = h.sink.ends[name].course
    assert isinstance(course, Course)
    deltas = [delta for batch in h.sink.batches for delta in batch if delta.request_id == name]
    assert [delta.course for delta in deltas if delta.course is not None] in ([], [course])
    return course


def test_one_alone() -> None:
    h = harness(device_s=lambda plan: 0.25)
    h.step_s = 2.0
    h.add(request("a", 6, 5))
    h.run()
    course = course_of(h, "a")
    assert course.queue_s == 2.0 and course.waited_s == {}
    assert course.prefill is not None and course.decode is not None
    assert course.prefill.seconds + course.decode.seconds == h.engine.stats().e2e_latency_s.total - 2.0
    assert (course.decode.steps, course.decode.rows, course.decode.device_s) == (4, 4, 1.0)
    assert (course.cached_tokens, course.num_preemptions, course.paused_s) == (0, 0, 0.0)
    (last,) = h.sink.batches[-1]
    assert last.course == course, "its last delta has it too"


def test_beside_others_with_a_prefix_that_is_known() -> None:
    h = harness()
    first = request("a", 16, 4)
    h.add(first)
    h.run()
    h.add(request("b", first.prompt_token_ids, 9), *(request(f"c{i}", 6, 40) for i in range(3)))
    h.run()
    course = course_of(h, "b")
    assert course.cached_tokens == 12 and course.decode is not None
    assert course.decode.rows == 4 * course.decode.steps, "three more in each of its steps"
    assert course.decode.tokens >= course.decode.rows, "and their prompts"


def test_one_that_waits_for_a_row() -> None:
    h = harness(max_num_seqs=1)
    h.step_s = 1.0
    h.add(request("a", 6, 5), request("b", 6, 2))
    h.run()
    assert course_of(h, "b").queue_s > 4.0 and course_of(h, "b").waited_s == {}


def test_one_that_waits_for_its_adapter() -> None:
    h = harness(adapters=AdapterPlan(delay=lambda op, rank: 5), patience=100)
    h.step_s = 1.0
    h.add(request("a", 6, 3, adapter="x"))
    h.run()
    course = course_of(h, "a")
    assert course.waited_s.keys() == {"adapter"} and 0 < course.waited_s["adapter"] <= course.queue_s


def test_one_that_is_preempted() -> None:
    h = harness(num_blocks=10, caching=False)
    h.step_s = 1.0
    h.add(request("a", 8, 20), request("b", 8, 20, priority=1))
    h.run()
    assert h.engine.stats().preemptions
    course = course_of(h, "b")
    assert course.num_preemptions == h.engine.stats().preemptions and course.paused_s >= 1.0
    assert course.decode is not None and course.decode.seconds > course.paused_s
    assert course_of(h, "a").paused_s == 0.0


def test_drafts_are_counted() -> None:
    h = harness(drafts=3)
    h.add(request("a", [2, 3, 4, 2, 3, 4, 2, 3], 24))
    h.run()
    course, drafts = course_of(h, "a"), h.engine.stats().drafts
    assert drafts is not None and drafts.num_draft_tokens
    assert (course.num_drafts, course.num_accepted) == (drafts.num_draft_tokens, drafts.num_accepted)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_one_that_is_aborted_and_others_that_are_refused(steps: int) -> None:
    h = harness(max_num_seqs=1)
    h.step_s = 1.0
    h.add(request("a", 6, 50), request("late", 6, 50, deadline_s=0.5))
    for _ in range(steps):
        h.step()
    h.engine.abort(Abort(request_id="a", attempt=0))
    h.clock.now_s += 1.0
    h.run()
    course = course_of(h, "a")
    assert (course.prefill is None, course.decode is None) == (steps == 0, steps == 0)
    late = course_of(h, "late")
    assert late.prefill is None and late.queue_s >= 0.5


def test_choices_that_wait_for_the_prompt_of_the_first_wait_for_nothing_else() -> None:
    h = harness()
    h.step_s = 1.0
    h.add(request("a", 40, 3, n=3))
    h.run()
    course = course_of(h, "a")
    assert course.waited_s == {} and course.prefill is not None and course.prefill.seconds >= 1.0
