"""Patterns of layers in config.json: those that rotate, and those with a sliding window. Torch-free."""

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.config.config_values import ConfigValues, text, whole
from tandem.workers.models.spec.family import Family, Window


def rotary_layers(reader: ConfigValues, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer rotates: where `no_rope_layers` is 1 (sic); else all but each `interval`-th."""
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    given = reader.items_or_none("no_rope_layers")
    if given is None:
        interval = reader.positive("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(given) < num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers names {len(given)} of {num_layers} layers", "MODEL")
    unknown = [rotates for rotates in given if rotates not in (0, 1)]
    if unknown:
        raise reader.unsupported("no_rope_layers", unknown[0], ("0", "1"))
    return tuple(bool(rotates) for rotates in given[:num_layers])


def layer_windows(reader: ConfigValues, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None where attention is full."""
    if_used = family.window is Window.IF_USED and reader.flag("use_sliding_window")
    layer_types = None if family.window is Window.NEVER else reader.items_or_none("layer_types")
    used = if_used or family.window in (Window.ALWAYS, Window.ALTERNATING, Window.PATTERN)
    if not used or reader.get("sliding_window", None) is None:
        return (None,) * num_layers
    window = reader.positive("sliding_window")
    if layer_types is None:
        slides = _by_pattern(reader, family, num_layers)
    else:
        slides = _by_type(reader, layer_types, num_layers)
    return tuple(window if one else None for one in slides)


def _by_pattern(reader: ConfigValues, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has a window, by the family's rule."""
    layers = range(num_layers)
    if family.window is Window.ALWAYS:
        return (True,) * num_layers
    if family.window is Window.ALTERNATING:
        return tuple(layer % 2 == 0 for layer in layers)
    if family.window is Window.PATTERN:
        pattern = reader.positive("sliding_window_pattern", 6)
        return tuple((layer + 1) % pattern != 0 for layer in layers)
    if family.has_no_rope_layers:
        return tuple(not rotates for rotates in rotary_layers(reader, family, num_layers))
    first = whole("max_window_layers", reader.get("max_window_layers", 28), least=0)
    return tuple(layer >= first for layer in layers)


def _by_type(reader: ConfigValues, layer_types: list[str], num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has a window, as `layer_types` says."""
    by_type = {"full_attention": False, "sliding_attention": True}
    unknown = [kind for kind in layer_types if text("layer_types", kind) not in by_type]
    if unknown:
        raise reader.unsupported("layer_types", unknown[0], tuple(by_type))
    if len(layer_types) != num_layers:
        words = f"config.json: layer_types names {len(layer_types)} layers, {reader.key('num_layers')} is {num_layers}"
        raise UnsupportedModelError(words, "MODEL")
    return tuple(by_type[kind] for kind in layer_types)
