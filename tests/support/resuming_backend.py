"""A FakeBackend whose groups can be lost: the next attempt of a request goes on behind the tokens that came."""

from typing import Any

import msgspec

from tandem.cluster.gateway.generation.dispatch import lost
from tandem.cluster.routing.route_hint import RouteHint
from tandem.workers.messages.request import GenerationRequest
from tests.support.fake_backend import FakeBackend, FakeStream


class ResumingBackend(FakeBackend):
    """See the module."""

    def send(self, request: GenerationRequest, hint: RouteHint, to: Any) -> FakeStream:
        stream = super().send(request, hint, to)
        for choice, tokens in zip(stream.choices, request.resume_token_ids, strict=False):
            choice.position = choice.billed = len(tokens)
        for choice in request.ended_choices:
            stream.choices[choice].finish_reason = "stop"
        return stream

    def lose_all(self) -> None:
        """Ends the group: every request that runs is lost, and tried again by its owner."""
        for stream in list(self.streams.values()):
            self.drop(stream.request.request_id)
            ended = lost(stream.request, "the fake group died", "bystander")
            stream.end(msgspec.structs.replace(ended, group="g0"))
