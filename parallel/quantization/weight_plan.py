"""WeightPlan: the scheme of each matrix of a model, by the name of its stored layer. Torch-free.

Made once, of config.json (workers/models/spec/weights/) or of --quantization; the table of parameters is made by it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.schemes import Inputs, Int8Rows


@dataclass(frozen=True, slots=True)
class Rule:
    """A scheme for layers whose whole name a regular expression matches; None: they are dense."""

    pattern: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Departures:
    """Ways in which a container stores otherwise than a family's checkpoints.

    in_pairs: the pattern of layers whose heads' rows are stored with those of their halves in turn. whole_norms: norms
    that others store less one are stored as they multiply. tables: the table that ids are looked up in may have a
    scheme's layout.
    """

    in_pairs: str | None = None
    whole_norms: bool = False
    tables: bool = False

    def is_in_pairs(self, module: str) -> bool:
        """Returns whether the rows of a stored layer are."""
        return self.in_pairs is not None and _compiled(self.in_pairs).fullmatch(module) is not None


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Rules, of which the first that matches counts; layers that none matches are dense.

    method: what the checkpoint says that it is quantized with; None: its weights are dense, whatever is made of them.
    ignored: endings of the names of stored tensors that are not read. remarks: lines about what is not, for the start.
    head: rules hold for the head too. departures: None for checkpoints in safetensors.
    """

    rules: tuple[Rule, ...] = ()
    method: str | None = None
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    head: bool = True
    departures: Departures | None = None

    def of(self, module: str) -> Scheme | None:
        """Returns the scheme of a stored layer's matrix."""
        return next((rule.scheme for rule in self.rules if _compiled(rule.pattern).fullmatch(module)), None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Its different schemes."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    @property
    def words(self) -> str:
        """The forms of weights, for the user."""
        return ", ".join(dict.fromkeys(scheme.words for scheme in self.schemes))

    def unstored(self) -> "WeightPlan":
        """Returns the plan of weights that are made up, in no checkpoint's layout."""
        rules = tuple(replace(rule, scheme=rule.scheme and rule.scheme.unstored()) for rule in self.rules)
        return replace(self, rules=rules, departures=None)

    def digest(self) -> str:
        """Returns hex digits that differ for plans that compute differently."""
        return blake2b(repr(self.rules).encode(), digest_size=8).hexdigest()


DENSE = WeightPlan()
ANY = ".*"
AT_LOAD = {
    "int8": WeightPlan((Rule(ANY, Int8Rows()),)),
    "w8a8": WeightPlan((Rule(ANY, Int8Rows(Inputs.INT8)),)),
}
"""The plans of --quantization that are made of dense weights. w8a8 holds the same weights as int8, and multiplies them
by rounded inputs."""


def exactly(modules: Iterable[str]) -> str:
    """Returns the pattern of layers with these names, and of those within them."""
    return f"(?:{'|'.join(map(re.escape, modules))})(?:\\..*)?"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
