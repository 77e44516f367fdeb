"""The version of what gateways and coordinators send each other: handle calls and the token channel.

While a service is updated, replicas of two releases see each other. Each message of a handle call, which also names the
gateway's end of the token channel, begins with a line that says the version; this line never changes.

    tandem VERSION GROUP\\n      GROUP: the coordinator's, in its answers
"""

WIRE_VERSION = 1
"""Counts up with each change of handle calls or of the token channel that the other end cannot read."""
_NAME = b"tandem"
_LONGEST_LINE = 200


class OtherVersion(Exception):
    """A message of another version than ours. version: as it says, empty when it says none. group: of the coordinator
    that sent it, empty when a gateway did."""

    def __init__(self, version: str, group: str) -> None:
        self.version = version
        self.group = group
        said = f"version {version}" if version else "no version"
        super().__init__(f"{said} of the token channel was sent, this process has version {WIRE_VERSION}")


def with_version(body: bytes, group: str = "") -> bytes:
    """Puts the line of this process's version in front of a body."""
    return b"%s %d %s\n%s" % (_NAME, WIRE_VERSION, group.encode(), body)


def without_version(message: bytes) -> memoryview:
    """The body of a message. OtherVersion when it is not of this process's version."""
    end = message.find(b"\n", 0, _LONGEST_LINE)
    name, version, group = (*message[: max(end, 0)].split(b" "), b"", b"")[:3]
    if name != _NAME:
        raise OtherVersion("", "")
    if version != b"%d" % WIRE_VERSION:
        raise OtherVersion(version.decode(errors="replace"), group.decode(errors="replace"))
    return memoryview(message)[end + 1 :]
