"""The order of waiting, the queue's bookkeeping, the chunk limiter's bound, histograms."""

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.observers.chunk_limiter import StepChunkLimiter
from tandem.workers.engine.waiting.arrival_queue import ArrivalQueue


def waiting(priority: int, arrival: int) -> SimpleNamespace:
    class Waiting(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    return Waiting(order=(priority, arrival, 0), bound_step=0)


def test_the_queue_orders_by_priority_then_arrival_with_removals_anywhere():
    draw = random.Random(3)
    queue, model = ArrivalQueue(), []
    for arrival in range(2000):
        if model and draw.random() < 0.55:
            victim = min(model, key=lambda s: s.order) if draw.random() < 0.5 else draw.choice(model)
            queue.remove(victim)
            model.remove(victim)
            if draw.random() < 0.3:
                queue.push(victim)
                model.append(victim)
        else:
            model.append(waiting(draw.randrange(3), arrival))
            queue.push(model[-1])
        assert len(queue) == len(model)
        assert queue.peek() is min(model, key=lambda s: s.order, default=None)
    assert len(queue._heap) <= 2 * len(queue) + 66


def affine(tokens: int) -> float:
    return 0.004 + 0.0001 * tokens


def flat_then_steep(tokens: int) -> float:
    return max(0.010, 0.0001 * tokens)


@pytest.mark.parametrize("device_s", [affine, flat_then_steep], ids=lambda f: f.__name__)
def test_the_chunk_limiter_approaches_the_bound_from_below(device_s: Callable[[int], float]):
    chunk_limiter = StepChunkLimiter(0.040, min_chunk=16, max_chunk=4096)
    for _ in range(5):
        chunk_limiter.observe(0, device_s(0))
    for _ in range(40):
        chunk = chunk_limiter.limit()
        assert device_s(chunk) <= 0.040
        chunk_limiter.observe(chunk, device_s(chunk))
    assert device_s(chunk_limiter.limit()) > 0.030


def test_the_chunk_limiter_learns_from_long_prefills_that_ran_alone():
    chunk_limiter = StepChunkLimiter(0.040, min_chunk=16, max_chunk=4096)
    chunk_limiter.observe(0, affine(0))
    chunk_limiter.observe(4096, affine(4096))
    assert 0.030 < affine(chunk_limiter.limit()) <= 0.040


def test_a_prompts_short_last_chunk_does_not_shrink_the_next():
    chunk_limiter = StepChunkLimiter(0.040, min_chunk=16, max_chunk=4096)
    chunk_limiter.observe(0, affine(0))
    for _ in range(10):
        chunk_limiter.observe(chunk_limiter.limit(), affine(chunk_limiter.limit()))
    before = chunk_limiter.limit()
    chunk_limiter.observe(3, affine(3))
    assert chunk_limiter.limit() == before


def test_a_bound_that_cannot_hold_still_lets_prefills_advance():
    chunk_limiter = StepChunkLimiter(0.001, min_chunk=16, max_chunk=4096)
    for _ in range(5):
        chunk_limiter.observe(0, affine(0))
        chunk_limiter.observe(chunk_limiter.limit(), affine(chunk_limiter.limit()))
    assert chunk_limiter.limit() == 16


def test_histogram_bounds_are_inclusive_and_the_last_count_is_the_rest():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(9.0, times=2)
    snapshot = histogram.snapshot()
    assert snapshot.counts == [2, 2, 3] and snapshot.count == 7 and snapshot.total == 32.0
