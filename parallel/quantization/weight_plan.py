"""WeightPlan: the scheme of each matrix of a model, by the name of its stored layer. Torch-free.

Made once, of config.json (workers/models/spec/weights/) or of --quantization; the table of parameters is made by it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.parallel.stored.idle_tensors import Idle


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
    idle: endings of tensors that may be there with values that change nothing, which is checked.
    head: rules hold for the head too. head_scheme: the head's own, whatever the rules say. departures: None for
    checkpoints in safetensors.
    """

    rules: tuple[Rule, ...] = ()
    method: str | None = None
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    head: bool = True
    head_scheme: Scheme | None = None
    idle: tuple[tuple[str, Idle], ...] = ()
    departures: Departures | None = None

    def of(self, module: str) -> Scheme | None:
        """Returns the scheme of a stored layer's matrix."""
        return next((rule.scheme for rule in self.rules if _compiled(rule.pattern).fullmatch(module)), None)

    def of_head(self, module: str) -> Scheme | None:
        """Returns the scheme of the matrix that makes logits."""
        return self.head_scheme or (self.of(module) if self.head else None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Its different schemes."""
        held = (*(rule.scheme for rule in self.rules), self.head_scheme)
        return tuple(dict.fromkeys(scheme for scheme in held if scheme is not None))

    @property
    def words(self) -> str:
        """The forms of weights, for the user."""
        return ", ".join(dict.fromkeys(scheme.words for scheme in self.schemes))

    def unstored(self) -> "WeightPlan":
        """Returns the plan of weights that are made up, in no checkpoint's layout."""
        rules = tuple(replace(rule, scheme=rule.scheme and rule.scheme.unstored()) for rule in self.rules)
        head_scheme = self.head_scheme and self.head_scheme.unstored()
        return replace(self, rules=rules, head_scheme=head_scheme, departures=None)

    def digest(self) -> str:
        """Returns hex digits that differ for plans that compute differently."""
        return blake2b(repr((self.rules, self.head, self.head_scheme)).encode(), digest_size=8).hexdigest()


DENSE = WeightPlan()
ANY = ".*"
INT4 = Coded(group=128, zeros=True)
AT_LOAD = {
    "int8": WeightPlan((Rule(ANY, Int8Rows()),)),
    "w8a8": WeightPlan((Rule(ANY, Int8Rows(Inputs.INT8)),)),
    "int4": WeightPlan((Rule(ANY, INT4),), head_scheme=Int8Rows()),
    "w4a8": WeightPlan((Rule(ANY, replace(INT4, inputs=Inputs.INT8)),), head_scheme=Int8Rows(Inputs.INT8)),
    "nf4": WeightPlan((Rule(ANY, Coded(Codes.NF4, group=64)),), head_scheme=Int8Rows()),
    "fp8": WeightPlan((Rule(ANY, Coded(Codes.E4M3, bits=8, group=None)),)),
}
"""The plans of --quantization that are made of dense weights. w8a8 and w4a8 hold the same weights as int8 and int4, and
multiply them by rounded inputs."""


def exactly(modules: Iterable[str]) -> str:
    """Returns the pattern of layers with these names, and of those within them."""
    return f"(?:{'|'.join(map(re.escape, modules))})(?:\\..*)?"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
