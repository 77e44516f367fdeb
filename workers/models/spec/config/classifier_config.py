"""The tokens by which a model that generates judges a pair of texts, such as "no" and "yes" of Qwen3-Reranker: the keys
of --hf-overrides (or config.json) with which vLLM serves it as a classifier. Torch-free.

The score is the logistic function of the difference of the two tokens' logits behind the prompt. Checkpoints with a
head for scores (`score.weight`) are other models, which the decoder does not have.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError

TOKENS, METHOD, ORIGINAL = "classifier_from_token", "method", "is_original_qwen3_reranker"
CLASSIFIER_KEYS: Final = (TOKENS, METHOD, ORIGINAL, "num_labels", "use_pad_token", "use_sep_token")
TWO_WAY: Final = "from_2_way_softmax"
FLAG: Final = "--hf-overrides"
SUFFIX: Final = "ForSequenceClassification"


def generating(architecture: Any, config: Mapping[str, Any]) -> Any:
    """The architecture that generates, of one that vLLM makes a classifier of; any other as it is."""
    if config.get(TOKENS) and isinstance(architecture, str) and architecture.endswith(SUFFIX):
        return architecture.removesuffix(SUFFIX) + "ForCausalLM"
    return architecture


def read_classifier(config: Mapping[str, Any], token_id: Callable[[str], int | None]) -> tuple[int, int] | None:
    """The ids of the tokens that say no and yes, of config.json with its overrides; None: the model judges no pairs.
    token_id: of a token's text, None for no token. Raises UnsupportedModelError for another way to judge, and for
    tokens that the tokenizer lacks."""
    tokens = config.get(TOKENS)
    if tokens is None:
        return None
    if not config.get(ORIGINAL) and config.get(METHOD) != TWO_WAY:
        given = config.get(METHOD)
        raise UnsupportedModelError(f"{METHOD} {given!r} of {TOKENS} is not supported; supported: {TWO_WAY!r}", FLAG)
    if not (isinstance(tokens, list) and len(tokens) == 2 and all(isinstance(one, str) for one in tokens)):
        raise UnsupportedModelError(f'{TOKENS} {tokens!r} must be two tokens, such as ["no", "yes"]', FLAG)
    ids = [token_id(token) for token in tokens]
    for token, found in zip(tokens, ids, strict=True):
        if found is None:
            raise UnsupportedModelError(f"{TOKENS}: the tokenizer has no token {token!r}", FLAG)
    no_id, yes_id = ids
    assert no_id is not None and yes_id is not None
    return no_id, yes_id
