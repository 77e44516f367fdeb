"""The entry of a listed adapter, and how a client's `model` finds it. Pure: no Redis, no HTTP, no files.

A listed version is `name@digest` and never changes: loading other content under the name lists another version in its
place. Used by the list, the gateway, the command line and the coordinator.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.workers.messages.request import AdapterRef

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
NAME_RULE = "letters, digits, '_', '.', '/' and '-', at most 128, the first a letter or a digit"
LEAST_DIGEST_CHARS = 8


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The version that is served under a name."""

    name: str
    digest: str
    source: str
    tenant: str | None = None  # whose it is, None: everyone's
    pinned: bool = False  # groups keep it on their devices
    listed_at_s: float = 0.0  # wall clock

    @property
    def ref(self) -> AdapterRef:
        """The reference that requests carry."""
        return AdapterRef(name=self.name, digest=self.digest, source=self.source)

    def is_for(self, tenant: str | None) -> bool:
        """True when this tenant may see it. None: an admin, who sees all."""
        return tenant is None or self.tenant is None or self.tenant == tenant


class BaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a list of adapters belongs to: what checking a new one needs."""

    folder: str
    max_rank: int
    overrides: dict[str, Any] = {}  # --hf-overrides
    names: tuple[str, ...] = ()  # all that it is served by, () where that is unknown
    has_weights: bool = True  # False when they are random


def is_name(name: str) -> bool:
    """True when an adapter may be called so. ':' and '@' have a meaning in a request's `model`."""
    return NAME.fullmatch(name) is not None


def changed(before: AdapterEntry | None, after: AdapterEntry | None) -> str:
    """Says what is another about the same content, in words after its name; "" when nothing is."""
    if before is None or after is None or before.digest != after.digest:
        return ""
    words = []
    if before.source != after.source:
        words.append(f"source moved from {before.source} to {after.source}")
    if before.tenant != after.tenant:
        words.append("now everyone's" if after.tenant is None else f"now tenant {after.tenant}'s")
    if before.pinned != after.pinned:
        words.append("pinned" if after.pinned else "no longer pinned")
    return ", ".join(words)


def find(
    model: str, bases: Sequence[str], entries: Mapping[str, AdapterEntry], tenant: str | None
) -> AdapterEntry | None:
    """The adapter that `model` names for this tenant (None: for an admin): its name, `name@digest` (8 hexadecimal
    digits at least), either behind `base:`. None: there is none, or it is another tenant's."""
    behind = [model[len(base) + 1 :] for base in bases if model.startswith(f"{base}:")]
    for wanted in (model, *behind):
        name, at, digest = wanted.partition("@")
        entry = entries.get(name)
        if entry is None or not entry.is_for(tenant):
            continue
        if not at or (len(digest) >= LEAST_DIGEST_CHARS and entry.digest.startswith(digest)):
            return entry
    return None
