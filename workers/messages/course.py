"""Course: what a request met in a group, for who asks why it was slow. Sent once, with its end. Torch-free."""

import msgspec


class Phase(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A time in which a request had a row, and the steps of its engine meanwhile. rows: sequences in these steps, added
    up, the request's own among them; tokens: what they computed; device_s: seconds that the device took for them."""

    seconds: float
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    device_s: float = 0.0


class Course(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One attempt of a request in one group. Where it ended before it had a row, or a token, the phases are None.

    queue_s: from its arrival in the group to its first step. waited_s: those of these seconds in which it waited for
    something else than a row and blocks, by cause (engine/base/blockers.py). prefill: from there to its first token;
    decode: from there to its end. paused_s: seconds without a row after the first step, of all choices together.
    """

    queue_s: float
    waited_s: dict[str, float] = {}
    prefill: Phase | None = None
    decode: Phase | None = None
    cached_tokens: int = 0  # of its prompt, found in the prefix cache of this group
    num_drafts: int = 0  # draft tokens
    num_accepted: int = 0
    num_preemptions: int = 0
    paused_s: float = 0.0
