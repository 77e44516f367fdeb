"""Fields that clients of the Messages API send beside what changes an answer, by place in the body."""

from tandem.cluster.gateway.schemas.ignored_fields import Ignorable, Ignorables, ignorable
from tandem.cluster.gateway.schemas.reading import neutral_values

CACHED = {"cache_control": Ignorable(is_usual=True)}
"""Places where a prefix may be cached: prefixes always are."""
BLOCK: dict[str, Ignorable] = {**CACHED, "citations": Ignorable(neutral_values([]))}
COUNT_HINTS: Ignorables = {
    "": {
        **CACHED,
        "speed": Ignorable(neutral_values("standard")),
        "context_management": Ignorable(neutral_values({}, {"edits": []})),
        **ignorable("betas", "billing_policy", "user_profile_id", "workspace_id"),
    },
    "system[]": BLOCK,
    "messages[]": ignorable("id", "type", "model", "stop_reason", "stop_sequence", "usage", "container"),
    "messages[].content[]": {**BLOCK, "caller": Ignorable(neutral_values({"type": "direct"}))},
    "messages[].content[].content[]": BLOCK,
    "tools[]": {**CACHED, **ignorable("eager_input_streaming", "defer_loading", "allowed_callers")},
}
HINTS: Ignorables = {
    **COUNT_HINTS,
    "": {
        **COUNT_HINTS[""],
        "service_tier": Ignorable(neutral_values("auto", "standard_only")),
        **ignorable("diagnostics", "inference_geo", "fallbacks", "fallback_credit_token"),
    },
}
