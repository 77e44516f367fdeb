"""user_config: what a gateway takes while it runs, and what it refuses by name."""

import pytest

from tandem.cluster.gateway.app.live_settings import LIVE, LiveSettings, changed
from tandem.cluster.gateway.app.wiring import use_settings
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import error_of, gateway

GIVEN = GatewaySettings(max_text_bytes=9_000, strict_fields=True)


def test_what_is_named_changes_and_all_else_is_as_the_args_say() -> None:
    now = changed(GIVEN, {"queue-timeout": 7, "max_logprobs": 3, "strict_fields": False})
    assert (now.queue_timeout_s, now.max_logprobs, now.strict_fields, now.max_text_bytes) == (7.0, 3, False, 9_000)
    assert changed(GIVEN, {}) == GIVEN


@pytest.mark.parametrize(
    ("user_config", "why"),
    [
        ({"max_model_len": 10}, "max_model_len does not change without a restart"),
        ({"gateway_drain_timeout": 10}, "gateway_drain_timeout does not change without a restart"),
        ({"quue_timeout": 10}, "quue_timeout does not change without a restart"),
        ({"queue_timeout": 0}, "0 must be above 0"),
        ({"max_text_bytes": "much"}, "'much'"),
        ([], "must be a mapping"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name_and_nothing_is_taken(user_config: object, why: str) -> None:
    used: list[GatewaySettings] = []
    live = LiveSettings(GIVEN, used.append)
    live.take(user_config)
    assert why in live.refused and not used
    with pytest.raises(SettingsError):
        changed(GIVEN, user_config)
    live.take({"max_logprobs": 1})
    assert not live.refused and used[0].max_logprobs == 1


@pytest.mark.parametrize("name", LIVE)
def test_every_name_is_an_option(name: str) -> None:
    changed(GIVEN, {name: None})


async def test_requests_are_read_with_what_is_in_force() -> None:
    asked = {"model": "m", "prompt": "a", "max_tokens": 1, "logprobs": 5}
    async with gateway() as rig:
        asked["model"] = rig.text.model_names[0]
        assert (await rig.client.post("/v1/completions", json=asked)).status_code == 200
        use_settings(changed(rig.text.settings, {"max_logprobs": 2}), rig.text, rig.context)
        refused = await rig.client.post("/v1/completions", json=asked)
        assert refused.status_code == 400 and error_of(refused)["param"] == "logprobs"
        assert rig.context.queue_timeout_s is None
        use_settings(changed(rig.text.settings, {"queue_timeout": 2, "max_answer_bytes": 5000}), rig.text, rig.context)
        assert (rig.context.queue_timeout_s, rig.context.max_answer_bytes) == (2.0, 5000)
