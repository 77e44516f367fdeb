"""--max-logprobs bounds every log probability that a request may ask for, as vLLM's."""

from typing import Any

import pytest

from tandem.cluster.gateway.app.wiring import build_metrics, build_text_services
from tandem.configs.load import build_settings
from tandem.configs.schema import GatewaySettings
from tests.support.service import DEMO
from tests.unit.gateway.rig import CHAT, COMPLETE, MINIMAL, gateway


@pytest.mark.parametrize(
    ("route", "param", "more"),
    [
        (COMPLETE, "logprobs", {}),
        (COMPLETE, "prompt_logprobs", {}),
        (CHAT, "prompt_logprobs", {}),
        (CHAT, "top_logprobs", {"logprobs": True}),
    ],
)
async def test_a_request_may_ask_for_as_many_as_the_flag_says(route: str, param: str, more: dict[str, Any]) -> None:
    async with gateway(settings=GatewaySettings(max_logprobs=25)) as rig:
        body = {**MINIMAL[route], "max_tokens": 1, **more}
        refused = await rig.client.post(route, json={**body, param: 26})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param}: 26 exceeds the limit of 25.")
        assert (await rig.client.post(route, json={**body, param: 25})).status_code == 200


@pytest.mark.parametrize(("given", "most"), [({}, 20), ({"max_logprobs": 0}, 0), ({"max_logprobs": -1}, 768)])
def test_minus_one_stands_for_the_vocabulary(given: dict[str, int], most: int) -> None:
    settings = build_settings(str(DEMO), given)
    assert build_text_services(settings, build_metrics(settings)).settings.max_logprobs == most
