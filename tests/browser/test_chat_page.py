"""The page at / in a browser, over a gateway whose model says what the test wants. With a real service:
tests/integration/one_tenancy/test_multi_tenancy_page.py."""

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.configs.schema import GatewaySettings
from tests.support.browser import SMALL, enter_key, open_browser, overflow, say, tab
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.support.invented_format import InventedReasoning, InventedToolFormat
from tests.unit.gateway.rig import EOS, Rig, gateway, served
from tests.unit.gateway.test_tool_calls import TEMPLATE, saying

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
SETTINGS = GatewaySettings(enable_auto_tool_choice=True)
KEYS = {"auth": StaticKeys(api_keys=["user"], admin_keys=["boss"])}
LONG = {"max_model_len": 65536}
HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1"> and <b onclick="hacked=1">bold</b>

<iframe src="http://example.invalid/"></iframe>

![picture](http://example.invalid/x.png) [run](javascript:window.hacked=1) [data](data:text/html,<script>1</script>)
[web](https://example.invalid/page) **<i>strong</i>** &lt;u&gt;

| a | <script>window.hacked=1</script> |
|---|---|
| <img src=x onerror=hacked=1> | `<b>` |

```html
<script>window.hacked = 1</script>
```
"""
DEEP = "> " * 3000 + "deep " + "[" * 3000 + "*_" * 3000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator["Browser"]:
    async with open_browser() as opened:
        yield opened


@contextlib.asynccontextmanager
async def shown(
    browser: "Browser", backend: FakeBackend, *, options: dict[str, Any] | None = None, **given: Any
) -> AsyncIterator[tuple["Page", Rig]]:
    """The page, of a gateway that thinks and calls tools. options: of the tab."""
    formats = {"tool_format": InventedToolFormat(), "reasoning_format": InventedReasoning(), **LONG}
    async with gateway(backend, settings=SETTINGS, template=TEMPLATE, text=formats, **given) as rig:
        async with served(rig.app) as url, tab(browser, url, **(options or {})) as page:
            await page.goto(f"{url}/")
            yield page, rig


def fleet() -> tuple[tuple[GroupRecord, GroupReport], ...]:
    record = GroupRecord(group="g1", life=1, model="m", state="serving", host="node", pid=7, running=3, kv_tokens=4096)
    other = GroupRecord(
        group="g2", life=1, model="m", state="loading", host="node", pid=8, loaded_bytes=1, total_bytes=4
    )
    return (
        (record, GroupReport(group="g1", model="m", rank_pids=[70, 71])),
        (other, GroupReport(group="g2", model="m")),
    )


async def test_a_key_opens_the_chat_and_is_nowhere_else(browser: "Browser") -> None:
    async with shown(browser, saying("Hello."), **KEYS) as (page, _):
        await page.get_by_role("heading", name="This service asks for a key").wait_for()
        await enter_key(page, "wrong")
        await page.get_by_role("alert").get_by_text("unknown API key").wait_for()
        await enter_key(page, "user")
        await page.get_by_role("heading", name="Chat with echo").wait_for()
        assert await page.get_by_role("button", name="Service").count() == 0, "that is for admins"
        assert "user" not in page.url and "user" not in await page.content()
        await page.reload()
        await page.get_by_role("heading", name="This service asks for a key").wait_for()


async def test_hostile_answers_are_text(browser: "Browser") -> None:
    async with shown(browser, saying(HOSTILE, tokens_per_step=64)) as (page, rig):
        await say(page, "hi")
        await page.get_by_role("button", name="Answer again").wait_for()
        answer = page.locator(".message.assistant")
        text = await answer.inner_text()
        for line in ("<script>window.hacked = 1</script>", '<img src=x onerror="window.hacked = 1">', "<iframe"):
            assert line in text, text
        assert "![picture](http://example.invalid/x.png)" in text and "[run](javascript:window.hacked=1)" in text
        forbidden = "script, img, iframe, object, b, i, style, svg, [onerror], [onclick], a:not([href^='https://'])"
        assert await answer.locator(forbidden).count() == 0
        assert await page.evaluate("window.hacked") is None
        link = answer.get_by_role("link", name="web")
        assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert await answer.locator("strong, table, .code pre").count() == 3, "and Markdown is rendered"
        assert await overflow(page) <= 0
        rig.backend.script = fixed_script([*DEEP.encode(), EOS])
        await page.get_by_role("button", name="Answer again").click()
        await answer.get_by_text("deep [[[").first.wait_for()
        await page.get_by_role("button", name="Answer again").wait_for()


async def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(browser: "Browser") -> None:
    async with shown(browser, saying("one two three", ends=False, manual=True)) as (page, rig):
        for stops in (page.get_by_role("button", name="Stop").click, lambda: page.keyboard.press("Escape")):
            rig.backend.submitted.clear()
            rig.backend.aborted.clear()
            await say(page, "hi")
            await rig.backend.submitted.wait()
            await page.get_by_text("Waiting for the first token").wait_for()
            rig.backend.step(3)
            await page.locator(".message.assistant").last.get_by_text("one", exact=True).wait_for()
            await stops()
            await rig.backend.aborted.wait()
            await page.locator(".message.assistant").last.get_by_text("stopped").wait_for()
            assert await page.evaluate("document.activeElement.id") == "message"
        await page.get_by_role("button", name="New chat").click()
        await page.get_by_role("heading", name="Chat with echo").wait_for()


async def test_thinking_tools_and_results(browser: "Browser") -> None:
    backend = saying('<think>I look it up.</think>\n\n<call>get_weather {"city": "Rome"}</call>')
    async with shown(browser, backend) as (page, rig):
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Functions as JSON").fill("[{]")
        await page.get_by_role("alert").get_by_text("Tools are no JSON").wait_for()
        await page.get_by_label("Functions as JSON").fill("")
        await page.get_by_role("button", name="Fill in an example").click()
        await say(page, "Is it warm?")
        call = page.get_by_role("group", name="Call of get_weather")
        await call.get_by_text('"city": "Rome"').wait_for()
        thinking = page.locator("details.thinking")
        assert await thinking.get_attribute("open") is None, "closed once the answer has begun"
        await thinking.locator("summary").click()
        await thinking.get_by_text("I look it up.").wait_for()
        await page.get_by_label("What get_weather returns").fill("18 degrees")
        rig.backend.submitted.clear()
        await page.get_by_role("button", name="Send result").click()
        await rig.backend.submitted.wait()
        prompt = bytes(i for i in rig.backend.requests[-1].prompt_token_ids if i < 256).decode()
        assert "tool:18 degrees" in prompt and 'get_weather{"city": "Rome"}' in prompt
        await page.get_by_role("article", name="Result of get_weather").wait_for()


async def test_settings_are_sent_and_a_refusal_is_shown(browser: "Browser") -> None:
    async with shown(browser, saying("Hello there.")) as (page, rig):
        await page.get_by_role("button", name="Settings").click()
        given = {"Temperature": "0.5", "Top-k": "7", "Max tokens": "5", "Seed": "3", "System prompt": "Be brief."}
        for label, value in given.items():
            await page.get_by_label(label, exact=True).fill(value)
        await page.get_by_label("Stop texts, one a line").fill("there\nnowhere")
        await say(page, "hi")
        await page.get_by_text("cut at its most tokens").wait_for()
        request = rig.backend.requests[-1]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.5, 7, 5, 3)
        assert "system:Be brief." in bytes(i for i in request.prompt_token_ids if i < 256).decode()
        await page.get_by_text("tokens in, 5 out").wait_for()
        assert await page.get_by_role("button", name="Copy request id").count() == 1
        await page.get_by_label("Temperature", exact=True).fill("7")
        await say(page, "again")
        await page.get_by_role("alert").get_by_text("temperature").wait_for()
        await page.get_by_role("button", name="Reset").click()
        await page.get_by_role("button", name="Try again").click()
        await page.get_by_text("Hello there.").wait_for()


async def test_everything_works_by_keyboard(browser: "Browser") -> None:
    async with shown(browser, saying("Hello."), options={"size": SMALL}) as (page, _):

        async def reach(name: str) -> None:
            """Tab, until the focus is there and can be seen."""
            for _ in range(40):
                await page.keyboard.press("Tab")
                focus = await page.evaluate(
                    "(e => [e.innerText || e.labels?.[0]?.innerText || '', getComputedStyle(e).outlineStyle])"
                    "(document.activeElement)"
                )
                if focus[0].strip() == name:
                    assert focus[1] == "solid"
                    return
            raise AssertionError(f"{name} is not reached")

        await page.get_by_label("Message", exact=True).wait_for()
        assert await page.evaluate("document.activeElement.id") == "message", "one may type at once"
        await page.keyboard.type("hi")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("there")
        await page.keyboard.press("Enter")
        await page.get_by_text("Hello.").wait_for()
        assert await page.locator(".bubble").inner_text() == "hi\nthere"
        await reach("Settings")
        await page.keyboard.press("Enter")
        await reach("Temperature")
        await page.keyboard.type("1")
        await page.keyboard.press("Escape")
        assert not await page.get_by_label("Temperature", exact=True).is_visible()
        await reach("Service")
        await page.keyboard.press("Space")
        await page.get_by_role("heading", name="Service Tandem").wait_for()


async def test_the_state_of_the_service_for_admins(browser: "Browser") -> None:
    metrics = [
        'vllm:generation_tokens_total{engine="g1",model_name="m"} 10\n',
        'vllm:kv_cache_usage_perc{engine="g1"} 0.25\nvllm:kv_host_blocks{engine="g1"} 3\n',
        'vllm:kv_host_slots{engine="g1"} 6\nvllm:kv_offload_store_bytes{engine="g1"} 2048\n',
        'vllm:adapter_residency{adapter="pirate",engine="g1",pinned="true",tier="device"} 1\n',
        'vllm:tenant_tokens_total{kind="prompt",tenant="al\\"ice"} 1500\n',
    ]
    backend = FakeBackend(fleet=fleet(), more_metrics="".join(metrics))
    async with shown(browser, backend, **KEYS) as (page, rig):
        await enter_key(page, "boss")
        await page.get_by_role("button", name="Service").click()
        table = page.get_by_role("table", name="Groups")
        await table.get_by_role("row", name="g1 serving 3 0").get_by_text("0: pid 70, 1: pid 71").wait_for()
        await table.get_by_text("loading 25 %").wait_for()
        tiers = page.get_by_role("table", name="KV cache").get_by_role("row", name="g1")
        assert "25 % of 4.1K tokens" in (text := await tiers.inner_text()) and "3 of 6 blocks" in text
        assert "2.0 KiB" in text
        tenants = page.get_by_role("table", name="Tenants").get_by_role("row", name='al"ice')
        assert "1.5K" in await tenants.inner_text()
        rig.backend.more_metrics = metrics[0].replace(" 10\n", " 900\n") + "".join(metrics[1:])
        await page.get_by_role("img", name=re.compile("Tokens a second, now: generated [1-9]")).wait_for()
        assert await page.locator(".chart").count() == 4
        assert await page.get_by_role("img", name="KV cache in use, now: g1 25 %").count() == 1


async def test_narrow_dark_and_asleep(browser: "Browser") -> None:
    """360 pixels without a horizontal scroll, in every view; the colours of who prefers dark ones."""
    backend = saying("b" * 400 + " " + json.dumps({"x": "y" * 300}), sleeps=True, fleet=fleet(), tokens_per_step=64)
    options = {"size": SMALL, "colors": "dark"}
    async with shown(browser, backend, options=options) as (page, _):
        await page.get_by_text("Asleep", exact=True).wait_for()
        await page.get_by_text("The service is asleep: no group runs").wait_for()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 23)"
        await say(page, "a" * 200)
        await page.get_by_role("button", name="Answer again").wait_for()
        assert await overflow(page) <= 0
        await page.get_by_role("button", name="Settings").click()
        assert await overflow(page) <= 0
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("button", name="Service").click()
        await page.get_by_role("table", name="Groups").wait_for()
        assert await overflow(page) <= 0


async def test_the_reference_tries_routes_with_a_key_under_any_path(browser: "Browser") -> None:
    """A proxy has put the service under /llm, and takes that away. In a narrow window, dark."""
    async with gateway(saying("Hello."), text=LONG, **KEYS) as rig:

        async def proxied(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith("/llm/"), scope["path"]
            path = scope["path"].removeprefix("/llm")
            await rig.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

        async with served(proxied) as url, tab(browser, url, size=SMALL, colors="dark") as page:  # type: ignore[arg-type]
            await page.goto(f"{url}/llm/")
            await enter_key(page, "user")
            await say(page, "hi")
            await page.get_by_text("Hello.").wait_for()
            await page.get_by_role("link", name="API").click()
            await page.get_by_role("button", name="Authorize").click()
            await page.get_by_label("auth-bearer-value").fill("user")
            await page.get_by_role("button", name="Apply credentials").click()
            await page.get_by_role("button", name="Close").click()
            models = page.locator("#operations-Models_and_tokens-get_v1_models")
            await models.locator(".opblock-summary-control").click()
            await models.get_by_role("button", name="Try it out").click()
            await models.get_by_role("button", name="Execute").click()
            await models.get_by_text("alias/echo").first.wait_for()
            assert f"{url}/llm/v1/models" in await models.locator(".request-url").inner_text()
            assert await overflow(page) <= 0
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 23)"
