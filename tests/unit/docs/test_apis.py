"""docs/serving/ on the Responses API and Anthropic's: its commands are answered, its refusals are the gateway's."""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.gateway.anthropic import messages_body
from tandem.cluster.gateway.responses import responses_body
from tandem.cluster.gateway.schemas.reading import Neutral
from tests.support.private_redis import ReusedRedis
from tests.unit.gateway.rig import MODEL, gateway, served
from tests.unit.gateway.test_response_store import ByKey, store_of
from tests.unit.gateway.test_tool_calls import saying
from tests.unit.tenants.tenant_rig import patient

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving" / "responses-and-messages.md").read_text()
PATHS = {"Responses API": "/v1/responses", "Anthropic's Messages API": "/v1/messages"}
NEUTRAL = {"Responses API": responses_body.NEUTRAL, "Anthropic's Messages API": messages_body.NEUTRAL}


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("title", PATHS)
async def test_its_commands_are_answered(
    title: str, reused_redis: ReusedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = re.findall(r"-d '(\{.*?\})'", section(title), re.DOTALL)
    script = "".join(re.findall(r"```python\n(.*?)```", section(title), re.DOTALL))
    assert bodies and script
    assert f"http://127.0.0.1:8000{PATHS[title]}" in section(title)
    redis = patient(reused_redis.empty())
    async with gateway(saying("A whale."), auth=ByKey(), store=store_of(redis)) as rig, served(rig.app) as url:
        key = {"x-api-key": "none"}
        for body in bodies:
            answer = await rig.client.post(PATHS[title], json={**json.loads(body), "model": MODEL}, headers=key)
            assert answer.status_code == 200, answer.text
        script = script.replace("http://127.0.0.1:8000", url).replace('"demo"', f'"{MODEL}"')
        await asyncio.to_thread(exec, script, {})
    await redis.close()
    assert capsys.readouterr().out.count("A whale.") == (3 if title == "Responses API" else 1)


@pytest.mark.parametrize("title", PATHS)
def test_its_refused_fields_are_those_of_the_gateway(title: str) -> None:
    table = section(title).partition("| refused | accepted |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \| ?(.*?) ?\|$", table, re.MULTILINE)
    neutral: Mapping[str, Neutral] = NEUTRAL[title]
    beside = {"safety_identifier", "prompt_cache_key"}  # of any value, below the table
    listed: dict[str, list[Any]] = {}
    for names, accepted in rows:
        values = [json.loads(value.strip("`")) for value in accepted.split(" and ")] if accepted else []
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), values)
    assert set(listed) | (beside & set(neutral)) == set(neutral)
    for name, values in listed.items():
        assert all(neutral[name].accepts(value) for value in values), name
        assert not neutral[name].accepts({"x": 1}) and not neutral[name].accepts("x"), name


@pytest.mark.parametrize("title", PATHS)
def test_every_served_field_is_listed(title: str) -> None:
    body = responses_body.ResponsesBody if title == "Responses API" else messages_body.MessagesBody
    table = section(title).partition("| refused | accepted |")[0]
    assert {name for name in body.__struct_fields__ if not re.search(rf"`{name}[`.]", table)} == set()
