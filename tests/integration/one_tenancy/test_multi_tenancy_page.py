"""docs/multi-tenancy.md, pasted from the top to the end into one shell: only the port is the test service's."""

import asyncio
import re
import subprocess

import pytest

from tests.support.browser import enter_key, open_browser, say, tab
from tests.support.service import BIN, REPOSITORY, Service, wait_for
from tests.support.verbs import run_verb_of

PAGE = (REPOSITORY / "docs" / "multi-tenancy.md").read_text()


def statuses(output: str) -> list[int]:
    return [int(status) for status in re.findall(r"^HTTP/1.1 (\d+)", output, re.MULTILINE)]


def rows(usage: str) -> int:
    """Of alice's requests."""
    return usage.count("\nalice,") + usage.count(",alice,")


def paste(service: Service, commands: str) -> str:
    """What a shell says to them, with the service's address in place of the page's."""
    script = commands.replace("http://127.0.0.1:8000", service.url).replace(".venv/bin/tandem", str(BIN / "tandem"))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env=service.environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_as_a_newcomer_pastes_it(closed: Service) -> None:
    *blocks, bill = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    tenants, adapters, answers, refusals, limit = paste(closed, "\necho ---\n".join(blocks)).split("---\n")
    accepted = 2 + statuses(limit).count(200)

    def billed() -> bool:
        return rows(run_verb_of(closed.temp, "usage", "--tenant", "alice", "--format", "csv").stdout) >= accepted

    wait_for(billed, 60, "rows come a second or so after their requests")
    usage = paste(closed, bill)
    assert "alice" in tenants and "bob" in tenants
    assert "pirate@" in adapters and "alice" in adapters and "public" in adapters
    assert statuses(answers) == [200, 200, 200]
    assert "I am fine" in answers and "Arr!" in answers and "I AM" in answers
    assert statuses(refusals) == [404, 401]
    assert "model_not_found" in refusals and "invalid_api_key" in refusals
    codes = statuses(limit)
    assert len(codes) == 5 and codes[0] == 200 and set(codes) == {200, 429}
    assert "x-ratelimit-remaining-requests: 0" in limit.lower() and "retry-after:" in limit.lower()
    assert re.search(r"alice +pirate +pirate@", usage) and re.search(r"bob +shout +shout@", usage)
    assert rows(usage) == accepted, "a row for each request that was accepted"


@pytest.mark.browser
async def test_the_pages_in_a_browser(closed: Service) -> None:
    """The walk is over, but its service still has two adapters and a tenant: an admin looks at them, and chats."""
    async with open_browser() as browser, tab(browser, closed.url) as page:
        await page.goto(closed.url)
        await enter_key(page, "boss")
        model = page.get_by_label("Model", exact=True)
        await model.select_option("shout")
        assert "pirate" not in await model.inner_text(), "it is alice's"
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Temperature", exact=True).fill("0")
        await say(page, "Hello! How are you?")
        answer = page.get_by_role("article", name="Answer of shout").last
        await answer.get_by_text(re.compile(r"tokens in.* out .* first token after")).wait_for()
        assert "I AM" in await answer.inner_text()
        await page.get_by_role("button", name="Fill in an example").click()
        await page.get_by_label("Tool choice").select_option("required")
        await say(page, "What is the weather in Paris?")
        await page.get_by_role("group", name="Call of get_weather").get_by_text('"city"').wait_for()
        await page.get_by_role("button", name="Reset").click()
        await page.get_by_label("Min tokens", exact=True).fill("1800")  # seconds, at any speed
        await model.select_option("demo")
        await page.get_by_role("button", name="New chat").click()
        await say(page, "Tell me a long story.")
        await page.get_by_role("article", name="Answer of demo").last.locator(".markdown").wait_for()
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_text(re.compile("^stopped · first token after")).wait_for()
        await asyncio.to_thread(wait_for, lambda: closed.get("/load").json()["num_requests_running"] == 0, 30, "ended")
        await page.get_by_role("button", name="Service").click()
        await page.get_by_role("table", name="Groups").get_by_text("serving").wait_for()
        await page.get_by_role("table", name="Adapters").get_by_role("row", name="pirate alice 1 group").wait_for()
        assert re.search("alice.*[1-9]", await page.get_by_role("table", name="Tenants").inner_text(), re.DOTALL)
        asked = {"model": "demo", "prompt": "Once", "max_tokens": 4}
        await asyncio.to_thread(closed.post, "/v1/completions", asked, headers={"authorization": "Bearer boss"})
        await page.get_by_role("img", name=re.compile("Time to the first token, now: half within [1-9]")).wait_for()
