"""quantization_config of a GGUF file, as gguf_config.py writes it, to a WeightPlan. Torch-free."""

import re
from typing import Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.quantization.layouts.gguf_blocks import FORMS, GgufBlocks
from tandem.parallel.quantization.weight_plan import Departures, Rule, WeightPlan, exactly
from tandem.workers.models.spec.weights.fields import Fields

METHOD: Final = "gguf"
BLOCKS, IN_PAIRS, WHOLE_NORMS = "blocks", "heads_in_pairs", "whole_norms"
IN_PAIRS_OF: Final = r".*\.self_attn\.[qk]_proj"
EXPERT: Final = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
ANY: Final = "*"
"""Stands for every expert in names of layers, whose matrices are one tensor in the file."""


def of_any_expert(module: str) -> str:
    """Returns the name of a layer, with ANY in place of an expert's index."""
    return EXPERT.sub(ANY, module)


def gguf(fields: Fields) -> WeightPlan:
    """Reads the config of a GGUF file: blocks has the layers of each kind."""
    fields.ignore("quant_method")
    rules, blocks = [], fields.within(BLOCKS)
    for kind in () if blocks is None else blocks.all():
        assert blocks is not None
        if kind not in FORMS:
            raise UnsupportedModelError(f"{blocks.where}: {kind} is not read; read are {', '.join(FORMS)}", "MODEL")
        layers = exactly(blocks.texts(kind)).replace(re.escape(ANY), r"\d+")
        rules.append(Rule(layers, GgufBlocks(kind).scheme))
    in_pairs = IN_PAIRS_OF if fields.flag(IN_PAIRS) else None
    departures = Departures(in_pairs, fields.flag(WHOLE_NORMS), tables=True)
    return WeightPlan(tuple(rules), METHOD, departures=departures)
