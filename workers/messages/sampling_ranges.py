"""Ranges and kinds of sampling parameters, one table for the service and LLM: the types of the fields of bodies
(cluster/gateway/schemas/generation_body.py), of SamplingParams (sampling_check.py) and of a model's defaults
(workers/text/generation_config.py). Torch-free.

How many log probabilities may be asked for is --max-logprobs, of both. What protects a service from one request, such
as the most choices, is the gateway's alone.
"""

from enum import IntEnum
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, lt=2**31)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Whole
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NO_SEED: Final = -1
"""Seed of requests without one, as in vLLM."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
LEAST_BIAS: Final = -100.0
MOST_BIAS: Final = 100.0
Bias = Annotated[float, Meta(ge=LEAST_BIAS, le=MOST_BIAS)]
Text = Annotated[str, Meta(min_length=1)]


class RequestOutputKind(IntEnum):
    """Kinds of outputs that AsyncLLM.generate() yields of a request: with all text and tokens so far, with those since
    the last output, or one at its end. The names and numbers are vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(Struct, frozen=True, array_like=True, kw_only=True):
    """The form of each choice's text, for SamplingParams of LLM; exactly one of the first six is given.

    json: a JSON schema, as an object or as JSON text. regex: a regular expression for the whole text. choice: texts, of
    which it is one. grammar: a grammar in llguidance's Lark syntax or in GBNF. json_object: True: any JSON object.
    structural_tag: {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}, as an
    object or as JSON text: free text, in which behind each trigger one of the structures stands.

    disable_any_whitespace: JSON without spaces or line breaks between its parts. whitespace_pattern: a regular
    expression for what may stand between them. Both go with json, json_object and structural_tag.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
