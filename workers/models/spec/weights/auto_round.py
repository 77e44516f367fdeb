"""quantization_config of auto-round in its own form, to a WeightPlan: packed as GPTQ or AWQ do. Torch-free."""

from dataclasses import replace
from typing import Any, Final

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.weight_plan import Rule, WeightPlan, exactly
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import as_expression
from tandem.workers.models.spec.weights.word_formats import WIDE, awq, gptq, rounding_keys

V1, V2, AWQ = "auto_round:auto_gptq", ("auto_round", "auto_round:gptqmodel"), "auto_round:auto_awq"
"""Its forms: zeros stored less 1, as they are, and AWQ's."""
ROUNDED: Final = ("bits", "group_size", "sym")
"""Keys that each layer may have of its own."""
EXPRESSION: Final = frozenset("*+?^$()[]{}|\\")
"""Characters of expressions, which no layer's name has."""


def auto_round(fields: Fields) -> WeightPlan:
    """Reads a config of auto-round. extra_config has layers whose keys differ, by name or expression."""
    packing = fields.one_of("packing_format", (V1, *V2, AWQ))
    given, remarks = {key: fields.get(key) for key in ROUNDED}, rounding_keys(fields)
    fields.ignore("quant_method")
    named, matched, head = [], [], None
    if (extra := fields.within("extra_config")) is not None:
        for name in extra.all():
            changes = extra.within(name) or Fields({}, extra.where)
            scheme = _scheme(packing, {key: changes.get(key, given[key]) for key in ROUNDED}, f"{extra.where}.{name}")
            if EXPRESSION.isdisjoint(name):
                named.append(Rule(exactly((name,)), scheme))
            else:
                matched.append(Rule(f".*(?:{as_expression(name)}).*", scheme))
            head = scheme if "." not in name else head
    plan = _plan(packing, given, fields.where)
    rules = (*named, *matched, *plan.rules)  # names before expressions
    return replace(plan, method="auto-round", rules=rules, head_scheme=head, remarks=remarks)


def _plan(packing: str, given: dict[str, Any], where: str) -> WeightPlan:
    """Returns the plan of a model with these bits, groups and symmetry everywhere."""
    if packing == AWQ:
        return awq(Fields(given, where))
    return gptq(Fields({**given, "checkpoint_format": "gptq" if packing == V1 else "gptq_v2"}, where))


def _scheme(packing: str, given: dict[str, Any], where: str) -> Scheme | None:
    """Returns the scheme of a layer with these; None where it stays dense."""
    if isinstance(given["bits"], int) and given["bits"] >= WIDE:
        return None
    return _plan(packing, given, where).of("")
