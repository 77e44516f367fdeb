"""with_schemes(): a model's table with the scheme of each matrix, by its WeightPlan. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tandem.parallel.params import Param
from tandem.parallel.quantization.schemes import Undone
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams, ParameterTable

HELD_DENSE: Final = (Role.SHARED_GATE, Role.KV_B)
"""Linear layers whose weights are multiplied by parts, or are a row: held in no other form."""


def with_schemes(table: ParameterTable, plan: WeightPlan) -> ParameterTable:
    """Returns the table in which each matrix that the plan has a scheme for is held by it. Tables of vocabulary stay
    dense but for the head's product."""
    if not plan.rules:
        return table
    tied = table.head is table.embedding
    head = replace(table.head, scheme=plan.of_head(table.head.module))
    if tied and head.scheme is not None and head.scheme.layout is not None:
        head = table.head  # the table that ids are looked up in is stored as it is
    return replace(
        table,
        embedding=head if tied else table.embedding,
        head=head,
        layers=tuple(_layer(layer, plan) for layer in table.layers),
    )


def _layer(layer: LayerParams, plan: WeightPlan) -> LayerParams:
    weights: Mapping[Role, Param] = {
        role: _with_scheme(param, plan) if param.is_matrix else param for role, param in layer.weights.items()
    }
    shared = None if layer.shared is None else _layer(layer.shared, plan)
    return replace(layer, weights=weights, experts=tuple(_layer(one, plan) for one in layer.experts), shared=shared)


def _with_scheme(param: Param, plan: WeightPlan) -> Param:
    scheme = plan.of(param.module)
    if scheme is None or param.role not in HELD_DENSE:
        return replace(param, scheme=scheme)
    return replace(param, scheme=None if scheme.layout is None else Undone(scheme))
