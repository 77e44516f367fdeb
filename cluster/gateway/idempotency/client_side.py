"""The side of an answer on which its client is, where the answer is made whether the client reads it or not.

Who makes the answer hands its messages over and goes on; the task of the client's connection sends them, for as long
as the client is there and reads.
"""

import asyncio
import logging
from collections import deque

from starlette.types import Message, Receive, Send

from tandem.cluster.gateway.generation.delivery import disconnected

log = logging.getLogger("tandem.gateway")
PIECE_BYTES = 64 * 1024
"""Bytes that a client must take in `stuck_s`."""


class ClientSide:
    """One client. most_bytes: what it may leave unread before who makes the answer waits for it. stuck_s: how long it
    may take nothing. One event loop."""

    def __init__(self, most_bytes: int, stuck_s: float) -> None:
        self._most_bytes = most_bytes
        self._stuck_s = stuck_s
        self._messages: deque[Message] = deque()
        self._unread = 0
        self._is_ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self.is_there = True

    # ---- of who makes the answer ----

    async def put(self, message: Message) -> None:
        """Hands a message over. Waits while too much is unread and more will come, and for no client that has gone."""
        if not self.is_there:
            return
        self._messages.append(message)
        self._unread += len(message.get("body", b""))
        self._news.set()
        while self._unread > self._most_bytes and message.get("more_body", False):
            self._room.clear()
            await self._room.wait()

    def end(self) -> None:
        """Nothing more comes."""
        self._is_ended = True
        self._news.set()

    # ---- of the client's connection ----

    async def serve(self, receive: Receive, send: Send) -> bool:
        """Sends what comes. Returns True once all is sent; False when the client has left or does not read."""
        leaving = asyncio.create_task(disconnected(receive), name="client of a keyed request leaves")
        sending = asyncio.create_task(self._send_all(send), name="client of a keyed request reads")
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
            return sending.done() and sending.result()
        finally:
            self.is_there = False
            self._messages.clear()
            self._unread = 0
            self._room.set()
            leaving.cancel()
            sending.cancel()

    async def _send_all(self, send: Send) -> bool:
        try:
            while self._messages or not self._is_ended:
                if not self._messages:
                    self._news.clear()
                    await self._news.wait()
                    continue
                message = self._messages.popleft()
                await self._send(send, message)
                self._unread -= len(message.get("body", b""))
                self._room.set()
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    break
        except Exception as error:
            log.debug("a client takes no more of its answer: %s", type(error).__name__)
            return False
        return True

    async def _send(self, send: Send, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            piece = message
            if len(body) > PIECE_BYTES:
                is_last = start + PIECE_BYTES >= len(body)
                piece = {**message, "body": body[start : start + PIECE_BYTES], "more_body": more or not is_last}
            async with asyncio.timeout(self._stuck_s):
                await send(piece)
