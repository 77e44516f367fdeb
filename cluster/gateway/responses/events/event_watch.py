"""EventWatch: looks into Redis for all readers of events on one gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.responses.events.event_batch import Seen

LEAST_S, PER_S = 0.05, 1000.0
"""Time between two calls to Redis for one response: at least, and calls a second of all together."""


def pause_s(number: int) -> float:
    """Time between two calls for each of a number of responses or readers."""
    return max(LEAST_S, number / PER_S)


class Question(NamedTuple):
    """A reader's: the batches of a response from a number on."""

    tenant: str
    response_id: str
    number: int
    answer: "asyncio.Future[Seen]"


class EventWatch:
    """Answers the questions of all readers, one after the other, in a task that lives while there are some.

    So readers share one connection, however many they are, and never wait for Redis themselves: one that leaves is gone
    at once. A blocking XREAD would take a connection for each, or a wake-up of all when one comes.
    """

    def __init__(self, look: Callable[[str, str, int], Awaitable[Seen]], tasks: TaskOwner) -> None:
        self._look = look
        self._tasks = tasks
        self._questions: list[Question] = []
        self._is_looking = False

    def ask(self, tenant: str, response_id: str, number: int) -> "asyncio.Future[Seen]":
        """The answer, which comes with the next look. It may be cancelled."""
        question = Question(tenant, response_id, number, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        if not self._is_looking:
            self._is_looking = True
            self._tasks.start(self._answer_all(), "look for events")
        return question.answer

    async def _answer_all(self) -> None:
        try:
            while self._questions:
                questions, self._questions = self._questions, []
                for question in questions:
                    if not question.answer.done():
                        await self._answer(question)
                await asyncio.sleep(pause_s(len(questions)))
        finally:
            self._is_looking = False

    async def _answer(self, question: Question) -> None:
        tenant, response_id, number, answer = question
        try:
            seen = await self._look(tenant, response_id, number)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(seen)
