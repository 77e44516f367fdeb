"""Questions of one gateway to all others for the record of a request, which only the one that had it has.

A question is an entry of a list in Redis, which is announced: a fresh name, the request's id and, where that matters,
its tenant. Whoever knows the request answers under that name; who asks looks for the answer for a second or so.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from tandem.cluster.fleet.group_reports import is_cancelled
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, announcement
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
ANSWER_S = 1.5
"""Time for an answer: more than a poll of who has no announcements."""
FIRST_LOOK_S, MOST_PAUSE_S = 0.01, 0.1
POLL_S, SUBSCRIBED_POLL_S = 1.0, 5.0
MOST_QUESTIONS = 64
NAME_BYTES = 8


class RecordQuestions:
    """Both sides, in one gateway. find: its own record of a request, by its id and its tenant, '' for any; None when it
    has none. One event loop."""

    def __init__(
        self, redis: Commands, service: str, find: Callable[[str, str], bytes | None], changes: Announcements
    ) -> None:
        self._redis = redis
        self._service = service
        self._find = find
        self._changes = changes
        self._seen: set[bytes] = set()

    async def ask(self, request_id: str, tenant: str) -> bytes | None:
        """Returns the record that another gateway has; None when none has answered in time, or Redis is away. tenant:
        whose; '': anybody's."""
        name, key = secrets.token_hex(NAME_BYTES), keys.records_asked(self._service)
        with suppress(RedisUnavailable):
            await self._redis.pipeline(
                [
                    ["RPUSH", key, " ".join((name, request_id, tenant)).rstrip()],
                    ["LTRIM", key, -MOST_QUESTIONS, -1],
                    ["EXPIRE", key, keys.RECORDS_ASKED_TTL_S],
                    announcement(key),
                ]
            )
            return await self._answer_to(name)
        return None

    async def _answer_to(self, name: str) -> bytes | None:
        """Looks until the time is over: by the clock, as a call of the Redis library may lose a cancellation, also that
        of a timeout."""
        pause_s, now = FIRST_LOOK_S, asyncio.get_running_loop().time
        until_s = now() + ANSWER_S
        while now() < until_s:
            answer = await self._redis.command("GET", keys.record_answer(self._service, name))
            if isinstance(answer, bytes):
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        return None

    async def run(self) -> None:
        """Answers the questions of others until it is cancelled."""
        while not is_cancelled():
            try:
                await self.answer()
            except RedisUnavailable as error:
                log.debug("nobody could ask for a request's record: %s", error)
            except Exception:
                log.exception("questions for requests' records were not answered")
            if is_cancelled():
                return
            period_s = SUBSCRIBED_POLL_S if self._changes.is_subscribed else POLL_S
            await self._changes.wait(keys.records_asked(self._service), period_s)

    async def answer(self) -> None:
        """Answers the questions that are new and that this gateway knows. RedisUnavailable."""
        asked = await self._redis.command("LRANGE", keys.records_asked(self._service), 0, -1)
        assert isinstance(asked, list), asked
        new = [entry for entry in asked if entry not in self._seen]
        self._seen = set(asked)
        for entry in new:
            name, request_id, *tenants = entry.decode(errors="replace").split(" ")
            if (record := self._find(request_id, "".join(tenants))) is not None:
                key = keys.record_answer(self._service, name)
                await self._redis.command("SET", key, record, "PX", keys.RECORD_ANSWER_TTL_MS)
