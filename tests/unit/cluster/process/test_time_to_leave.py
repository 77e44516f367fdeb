"""How long a replica that is taken down may go on, by a clock of the test."""

import pytest

from tandem.cluster.process.time_to_leave import TimeToLeave


class Time:
    """A clock that moves when somebody waits. ends_at_s: when the application begins to end; None: never."""

    def __init__(self, ends_at_s: float | None = None) -> None:
        self.now_s = 1000.0
        self.asked = 0
        self._ends_at_s = None if ends_at_s is None else 1000.0 + ends_at_s

    def clock(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    async def is_ending(self) -> bool:
        self.asked += 1
        return self._ends_at_s is not None and self.now_s >= self._ends_at_s


@pytest.mark.parametrize(
    ("ends_at_s", "over_s"),
    [
        (None, 600.0),
        (0.0, 30.0),
        (100.0, 130.0),
        (590.0, 600.0),  # it has no more time than when it is replaced
        (599.9, 600.0),
    ],
)
async def test_streams_have_minutes_while_the_application_stays(ends_at_s: float | None, over_s: float) -> None:
    time = Time(ends_at_s)
    await TimeToLeave(600.0, 30.0, time.is_ending, time.clock, time.pause).wait()
    assert time.now_s - 1000.0 == pytest.approx(over_s, abs=0.1)


async def test_nobody_is_asked_any_more_once_it_ends() -> None:
    time = Time(10.0)
    await TimeToLeave(600.0, 30.0, time.is_ending, time.clock, time.pause).wait()
    assert time.asked == 6, "at 0, 2, 4, 6, 8 and 10 s"


async def test_no_time_at_all() -> None:
    time = Time()
    await TimeToLeave(0.0, 0.0, time.is_ending, time.clock, time.pause).wait()
    assert time.now_s == 1000.0
