"""The pictures of docs/serving/ui.md, of a service with an admin key that has two groups, adapters and a host tier:

    .venv/bin/tandem serve demo -dp 2 --enable-lora --lora-modules pirate=configs/demo/adapters/pirate \\
      shout=configs/demo/adapters/shout --kv-offloading-size 0.1 --num-gpu-blocks-override 512 --admin-api-key boss
    .venv/bin/python -m tests.browser.screenshots http://127.0.0.1:8000 boss
"""

import asyncio
import contextlib
import io
import itertools
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
from PIL import Image

from tests.support.browser import SMALL, enter_key, open_browser, say, tab
from tests.support.service import REPOSITORY

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

WIDE: Any = {"width": 1100, "height": 720}
TENANTS = ("alice", "bob", "carol")
COLORS = 96
WATCHED_S = 50.0
"""Time for the charts to have something to show."""


@contextlib.asynccontextmanager
async def traffic(url: str, key: str) -> AsyncIterator[None]:
    """Requests of a few tenants, more and fewer in turns, as long as the pictures are taken."""
    async with httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"}) as admin:
        keys = [await _tenant(admin, name) for name in TENANTS]
        running = [asyncio.create_task(_client(admin, at, own)) for at, own in enumerate(keys)]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _tenant(admin: httpx.AsyncClient, name: str) -> str:
    await admin.delete(f"/admin/tenants/{name}")
    key: str = (await admin.post("/admin/tenants", json={"name": name})).raise_for_status().json()["key"]
    return key


async def _client(admin: httpx.AsyncClient, number: int, key: str) -> None:
    models = itertools.cycle(("demo", "pirate", "shout"))
    for turn in itertools.count():
        body = {
            "model": next(models),
            "prompt": "Once upon a time there was a fox. " * 12,
            "max_tokens": 60 + 40 * (turn * (number + 2) % 5),
            "n": 1 + (turn + number) % 4,
            "ignore_eos": True,
        }
        await admin.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        await asyncio.sleep(0.3 * number)


async def picture(page: "Page", name: str) -> None:
    """Saves what is seen, with few colours."""
    shot = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    few = shot.quantize(COLORS, dither=Image.Dither.NONE)
    few.save(REPOSITORY / "docs" / "serving" / f"ui-{name}.png", optimize=True)


async def chat(browser: "Browser", url: str, key: str, name: str, **options: Any) -> None:
    async with tab(browser, url, **options) as page:
        await page.goto(url)
        await enter_key(page, key)
        await page.get_by_label("Model", exact=True).select_option("pirate")
        await say(page, "Tell me a short story about a whale.")
        await page.get_by_role("button", name="Answer again").wait_for()
        await page.get_by_label("Model", exact=True).select_option("demo")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_role("button", name="Fill in an example").click()
        await page.get_by_label("Tool choice").select_option("required")
        await page.get_by_label("Temperature", exact=True).fill("0")
        await page.get_by_role("heading", name="Settings").scroll_into_view_if_needed()
        if options["size"] == SMALL:
            await page.get_by_role("button", name="Close").click()
        await say(page, "What is the weather in Paris?")
        await page.get_by_label("What get_weather returns").fill("18 degrees and sunny")
        await picture(page, name)


async def main(url: str, key: str) -> None:
    """Takes all pictures."""
    async with open_browser() as browser, traffic(url, key):
        await chat(browser, url, key, "chat", size=WIDE)
        await chat(browser, url, key, "small", size=SMALL)
        async with tab(browser, url, size=WIDE, colors="dark") as page:
            await page.goto(url)
            await enter_key(page, key)
            await page.get_by_role("button", name="Service").click()
            await asyncio.sleep(WATCHED_S)  # charts take time
            await page.mouse.move(5, 400)
            await picture(page, "service")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
