"""The line in front of each message of a handle call."""

import asyncio
import re
from unittest.mock import Mock

import msgspec
import pytest

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.group.coordinator import Coordinator
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.wire import version
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.cluster.wire.version import OtherModel, OtherVersion, with_version, without_version
from tandem.workers.messages.refusals import GROUP_UNUSABLE
from tandem.workers.messages.request import Ended, GenerationRequest, SamplingParams, Usage
from tests.support.fake_group import FakeFleet, serving


@pytest.mark.parametrize("body", [b"", b"\n", b"a b\nc", bytes(range(256))])
@pytest.mark.parametrize("group", ["", "g1"])
def test_a_body_comes_back_as_it_was(body: bytes, group: str) -> None:
    assert without_version(with_version(body, group)) == body


def test_another_version_is_refused_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "WIRE_VERSION", 7)
    message = with_version(b"body", "g1")
    monkeypatch.undo()
    with pytest.raises(OtherVersion, match=f"version 7 .* this process has version {version.WIRE_VERSION}") as refused:
        without_version(message)
    assert (refused.value.version, refused.value.group) == ("7", "g1")


@pytest.mark.parametrize("message", [b"", b"tandem 1", b"\x9ftandem 1 \nbody", b"x" * 1000, b"\n"])
def test_a_message_that_says_no_version_is_of_another(message: bytes) -> None:
    with pytest.raises(OtherVersion, match="no version") as refused:
        without_version(message)
    assert (refused.value.version, refused.value.group) == ("", "")


def test_a_message_for_another_model_is_refused_with_what_it_says() -> None:
    message = with_version(b"body", "g1", "aaaa")
    assert without_version(message, "aaaa") == b"body"
    with pytest.raises(OtherModel, match=r"for another model \(aaaa\), this process has bbbb") as refused:
        without_version(message, "bbbb")
    assert refused.value.group == "g1"


@pytest.mark.parametrize(("theirs", "ours"), [("", "aaaa"), ("aaaa", ""), ("", "")])
def test_a_model_that_is_not_known_is_taken_to_be_the_same(theirs: str, ours: str) -> None:
    assert without_version(with_version(b"body", "g1", theirs), ours) == b"body"


def test_a_release_that_names_no_model_and_this_one_read_each_other() -> None:
    number = b"%d" % version.WIRE_VERSION
    assert without_version(b"tandem %s g1\nbody" % number, "aaaa") == b"body"
    line = with_version(b"", "g1", "aaaa").rstrip(b"\n")
    assert line.split(b" ")[:3] == [b"tandem", number, b"g1"], "it reads three words"


class Group:
    """A group of one model, whose engine is not there: what it takes is written down."""

    generate = Coordinator.generate

    def __init__(self, model: str) -> None:
        self._group = f"group of {model}".replace(" ", "-")
        self._facts = ServiceFacts(single_node=True, device="cpu", model_digest=model)
        self.taken: list[bytes] = []

    async def _generate(self, body: memoryview, hint: RouteHint) -> bytes:
        self.taken.append(bytes(body))
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        ended = Ended(request_id="r", attempt=1, positions=[1], finish_reasons=["length"], usage=usage)
        return msgspec.msgpack.encode(ended)


async def answer(gateways_model: str, group: Group) -> Ended:
    """The answer to a request of a gateway, through the handle that both have."""
    method = Mock(remote=lambda payload, hint: asyncio.create_task(group.generate(payload, hint)))
    request = GenerationRequest(request_id="r", attempt=1, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
    handle, fleet = Mock(options=lambda **_: method), FakeFleet(serving())
    gateway = ServeDispatch(handle, fleet, "cd" * 32, "127.0.0.1", "tandem", model=gateways_model)
    part = RequestPart(request=request, choices=[], first_choice=0)
    gateway.send(part, RouteHint(request_id="r", cost_tokens=1))
    async with asyncio.timeout(30):
        while (ended := part.look()) is None:
            await part.news.wait()
            part.news.clear()
    await gateway.close()
    return ended


async def test_a_group_of_another_model_takes_no_prompt_that_was_made_for_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While a service is updated to another model, its old gateways see its new groups."""
    same, other = Group("aaaa"), Group("bbbb")
    assert (await answer("aaaa", same)).refused is None
    refused = await answer("aaaa", other)
    assert refused.refused is not None and refused.refused[1] == GROUP_UNUSABLE
    assert "for another model" in refused.refused[3]
    assert refused.group == "group-of-bbbb", "which the gateway avoids from now on"
    assert len(same.taken) == 1 and not other.taken
    assert re.search(
        r"a request of gateway \w+ is refused: it is for another model \(aaaa\), this process has bbbb", caplog.text
    )
