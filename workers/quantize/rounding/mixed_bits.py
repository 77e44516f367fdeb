"""Mixed bits: which linear layers get eight bits for four, for an average between (--bits 4.5).

Those whose outputs rounding to four bits changes most, for the bits that eight cost: measured on the dense model with
the calibration text, layer by layer, before anything is rounded. Layers that share their inputs get the same, as
servers multiply them together; so do all experts of a model, for which transformers reads one form.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tandem.workers.quantize.rounding.recorded_linear import RecordedLinear

MIXED: Final = (4, 8)
"""The bits that are mixed for an average between them."""


@dataclass(frozen=True, slots=True)
class MeasuredUnit:
    """One unit. few, many: its error with four bits and with eight."""

    unit: str
    elements: int
    few: float
    many: float


def unit_of(linear: RecordedLinear) -> str:
    """Returns the name of what gets the same bits as a linear layer."""
    first = linear.params[0]
    return "experts" if first.expert is not None else f"{first.layer} {first.merge}"


def joined(measured: Iterable[MeasuredUnit]) -> Iterator[MeasuredUnit]:
    """Yields units, of what was measured by parts: with the mean of the parts' errors."""
    parts: dict[str, list[MeasuredUnit]] = {}
    for one in measured:
        parts.setdefault(one.unit, []).append(one)
    for unit, own in parts.items():
        elements = sum(one.elements for one in own)
        few, many = (sum(getattr(one, name) * one.elements for one in own) / elements for name in ("few", "many"))
        yield MeasuredUnit(unit, elements, few, many)


def choose_bits(measured: Iterable[MeasuredUnit], average: float) -> Mapping[str, int]:
    """Returns the bits of each unit, on average at most so many for a weight."""
    units = list(joined(measured))
    few, many = MIXED
    left = (average - few) * sum(one.elements for one in units)
    found = {one.unit: few for one in units}
    for one in sorted(units, key=lambda one: (-(one.few - one.many) / one.elements, one.unit)):
        if (cost := (many - few) * one.elements) <= left:
            found[one.unit], left = many, left - cost
    return found
