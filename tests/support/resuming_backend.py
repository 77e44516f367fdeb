"""A FakeBackend whose groups can be lost: the next attempt of a request goes on behind the tokens that came."""

from typing import Any

import msgspec

from tandem.cluster.routing.route_hint import RouteHint
from tandem.workers.messages.refusals import lost
from tests.support.fake_backend import FakeBackend


class ResumingBackend(FakeBackend):
    """See the module."""

    def send(self, part: Any, hint: RouteHint) -> None:
        super().send(part, hint)
        request = part.request
        stream = self.streams[request.request_id]
        for choice, tokens in zip(stream.choices, request.resume_token_ids, strict=False):
            choice.position = choice.billed = len(tokens)
        for choice in request.ended_choices:
            stream.choices[choice].finish_reason = "stop"

    def lose_all(self) -> None:
        """Ends the group: every request that runs is lost, and tried again by its owner."""
        for stream in list(self.streams.values()):
            self.drop(stream.request.request_id)
            ended = lost(stream.request, "the fake group died", "bystander")
            stream.part.end(msgspec.structs.replace(ended, group="g0"))
