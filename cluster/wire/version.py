"""The version of what gateways and coordinators send each other, and the model that they send it for.

While a service is updated, replicas of two releases see each other, and of two models. Each message of a handle call,
which also names the gateway's end of the token channel, begins with a line that says the version and the model; this
line only ever gains words at its end.

    tandem VERSION GROUP MODEL\\n      GROUP: the coordinator's, in its answers; MODEL: digest, empty: not known
"""

WIRE_VERSION = 3
"""Counts up with each change of handle calls or of the token channel that the other end cannot read, and of what is
sampled for a seed: a stream that moved between two rules would be no text of its seed."""
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


class OtherModel(OtherVersion):
    """A message for another model than ours. model, ours: digests."""

    def __init__(self, version: str, group: str, model: str, ours: str) -> None:
        super().__init__(version, group)
        self.args = (f"it is for another model ({model}), this process has {ours}",)


def kind_of(model: str) -> str:
    """Returns what replicas must have alike to work for each other: the wire version and the model's digest. Empty: the
    model is not known."""
    return f"{WIRE_VERSION}.{model}" if model else ""


def are_of_two_kinds(kind: str, other: str) -> bool:
    """Returns whether replicas of these kinds (kind_of()) can do nothing for each other, as far as both are known."""
    return bool(kind and other) and kind != other


def with_version(body: bytes, group: str = "", model: str = "") -> bytes:
    """Puts the line of this process's version in front of a body. model: digest of this process's."""
    return b"%s %d %s %s\n%s" % (_NAME, WIRE_VERSION, group.encode(), model.encode(), body)


def without_version(message: bytes, model: str = "") -> memoryview:
    """The body of a message. OtherVersion when it is not of this process's version, or, as OtherModel, not for `model`;
    a release that names none is taken to have the same."""
    end = message.find(b"\n", 0, _LONGEST_LINE)
    name, version, group, theirs = (*message[: max(end, 0)].split(b" "), b"", b"", b"")[:4]
    if name != _NAME:
        raise OtherVersion("", "")
    if version != b"%d" % WIRE_VERSION:
        raise OtherVersion(version.decode(errors="replace"), group.decode(errors="replace"))
    if model and theirs and theirs != model.encode():
        raise OtherModel(version.decode(), group.decode(errors="replace"), theirs.decode(errors="replace"), model)
    return memoryview(message)[end + 1 :]
