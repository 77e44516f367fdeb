"""Reads the MLPs and mixtures of experts of a model's layers from config.json, by a family's row. Torch-free.

Called by config_reader.py.
"""

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ClampedSwiglu, ExpertGroups, Gated, Moe, Plain
from tandem.workers.models.spec.config.config_values import ConfigValues, number, whole
from tandem.workers.models.spec.family import Family, GroupKeys, MoeKeys


def layer_mlps(reader: ConfigValues, family: Family, num_layers: int) -> tuple[Gated | Plain | Moe, ...]:
    """Returns what each layer has."""
    if family.moe is None:
        return (_mlp(reader, family),) * num_layers
    are_mixed = _mixed(reader, family.moe, num_layers)
    moe = _moe(reader, family.moe) if any(are_mixed) else None
    mlp = None if all(are_mixed) else _mlp(reader, family)
    found = tuple(moe if is_mixed else mlp for is_mixed in are_mixed)
    return tuple(each for each in found if each is not None)


def _mlp(reader: ConfigValues, family: Family) -> Gated | Plain:
    activation, bias = reader.activation(), reader.flag(family.mlp_bias)
    width = reader.positive("mlp_width", None if family.gated else 4 * reader.positive("hidden_size"))
    return (Gated if family.gated else Plain)(width, activation, bias)


def _mixed(reader: ConfigValues, keys: MoeKeys, num_layers: int) -> list[bool]:
    """Returns whether each layer has experts."""
    first = 0 if keys.first is None else whole(keys.first, reader.get(keys.first, 0), least=0)
    every = 1 if keys.every is None else reader.positive(keys.every, 1)
    dense = (
        [] if keys.dense is None else [whole(keys.dense, each, 0) for each in reader.items_or_none(keys.dense) or ()]
    )
    return [
        layer >= first and (layer + keys.counts_from_one) % every == 0 and layer not in dense
        for layer in range(num_layers)
    ]


def _moe(reader: ConfigValues, keys: MoeKeys) -> Moe:
    num_experts, top_k = reader.positive(keys.num_experts), reader.positive(keys.top_k)
    if top_k > num_experts:
        raise UnsupportedModelError(f"config.json: {keys.top_k} {top_k} of {num_experts} experts", "MODEL")
    width = reader.positive(keys.width or "mlp_width")
    scale = reader.number_or_none(keys.scale, above=0)
    return Moe(
        num_experts,
        top_k,
        width,
        reader.activation(),
        renormalize=reader.flag(keys.renormalize),
        shared=_shared(reader, keys, width),
        shared_gated=keys.shared is not None,
        scoring=keys.scoring,
        groups=_groups(reader, keys.groups, num_experts, top_k) if _is_grouped(reader, keys) else None,
        scale=1.0 if scale is None else scale,
        router_bias=keys.biased,
        correction=keys.correction,
        expert_bias=keys.biased,
        swiglu=_swiglu(reader, keys.swiglu),
    )


def _swiglu(reader: ConfigValues, keys: tuple[str, str] | None) -> ClampedSwiglu | None:
    if keys is None:
        return None
    alpha, limit = (number(reader.spelled(key), reader.get(key, None), above=0) for key in keys)
    return ClampedSwiglu(alpha, limit)


def _shared(reader: ConfigValues, keys: MoeKeys, width: int) -> int | None:
    """Returns the width of the shared expert."""
    if keys.shared_count is not None:
        count = reader.get(keys.shared_count, None)
        return width * whole(keys.shared_count, count, least=0) or None if count is not None else None
    return None if keys.shared is None else reader.positive(keys.shared)


def _is_grouped(reader: ConfigValues, keys: MoeKeys) -> bool:
    return keys.groups is not None and (keys.grouped_if is None or reader.holds(keys.grouped_if))


def _groups(reader: ConfigValues, keys: GroupKeys | None, num_experts: int, top_k: int) -> ExpertGroups:
    """Returns the groups, which must be equal and have as many experts as a token takes."""
    assert keys is not None
    groups = ExpertGroups(reader.positive(keys.count), reader.positive(keys.taken), keys.best)
    size, rest = divmod(num_experts, groups.count)
    if rest or groups.taken > groups.count or size < groups.best or size * groups.taken < top_k:
        raise UnsupportedModelError(
            f"config.json: {keys.count} {groups.count} and {keys.taken} {groups.taken} of {num_experts} experts, of "
            f"which a token takes {top_k}",
            "MODEL",
        )
    return groups
