"""with_schemes(): a model's table with the scheme of each matrix, by its WeightPlan, and where a container stores
parameters otherwise than the family does. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tandem.parallel.params import Param
from tandem.parallel.quantization.schemes import Undone
from tandem.parallel.quantization.weight_plan import Departures, WeightPlan
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams, NormParams, ParameterTable

HELD_DENSE: Final = (Role.SHARED_GATE, Role.KV_B)
"""Linear layers whose weights are multiplied by parts, or are a row: held in no other form."""


def with_schemes(table: ParameterTable, plan: WeightPlan) -> ParameterTable:
    """Returns the table in which each matrix that the plan has a scheme for is held by it. Tables of vocabulary stay
    dense but for the head's product."""
    if plan.departures is not None:
        table = _departed(table, plan.departures)
    if not plan.rules:
        return table
    tied = table.head is table.embedding
    head = replace(table.head, scheme=plan.of_head(table.head.module))
    if tied and head.scheme is not None and head.scheme.layout is not None:
        head = table.head  # the table that ids are looked up in is stored as it is
    embedding = head if tied else table.embedding
    stored = plan.of(table.embedding.module) if plan.departures is not None and plan.departures.tables else None
    if stored is not None and stored.layout is not None:
        embedding = replace(table.embedding, scheme=Undone(stored))
        head = replace(table.head, scheme=stored) if tied else head
    return replace(
        table,
        embedding=embedding,
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


def _departed(table: ParameterTable, departures: Departures) -> ParameterTable:
    """Returns the table with parameters where a container has them."""

    def norm(params: NormParams) -> NormParams:
        return NormParams(
            *(None if param is None else _moved(param, departures) for param in (params.weight, params.bias))
        )

    def layer(params: LayerParams) -> LayerParams:
        weights = {role: _moved(param, departures) for role, param in params.weights.items()}
        biases = {role: _moved(param, departures) for role, param in params.biases.items()}
        return replace(params, weights=weights, biases=biases)

    return replace(table, layers=tuple(map(layer, table.layers)), final_norm=norm(table.final_norm))


def _moved(param: Param, departures: Departures) -> Param:
    source = param.source
    if departures.whole_norms and source.add:
        source = replace(source, add=0.0)
    if param.shard.dim == 0 and departures.is_in_pairs(param.module):
        head = param.shard.unit
        order = source.order or tuple(range(head))
        source = replace(source, order=tuple(2 * (row % (head // 2)) + row // (head // 2) for row in order))
    return replace(param, source=source, family=param.source)
