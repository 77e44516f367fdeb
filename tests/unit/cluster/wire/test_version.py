"""The line in front of each message of a handle call."""

import pytest

from tandem.cluster.wire import version
from tandem.cluster.wire.version import OtherVersion, with_version, without_version


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
