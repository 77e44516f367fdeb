"""Ranges of sampling parameters, one table for the service and LLM: the types of the fields of bodies
(cluster/gateway/schemas/generation_body.py), of SamplingParams (sampling_check.py) and of a model's defaults
(workers/text/generation_config.py). Torch-free.

How many log probabilities may be asked for is --max-logprobs, of both. What protects a service from one request, such
as the most choices, is the gateway's alone.
"""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

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
