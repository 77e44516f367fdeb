"""Debian's Chromium, driven by Playwright: the browser, and a tab that notes what a page of ours must never do.

Playwright brings no browser here: the one that is installed is used (`apt-get install chromium`).
"""

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_MS = 30_000
SMALL: "ViewportSize" = {"width": 360, "height": 740}
WIDE: "ViewportSize" = {"width": 1100, "height": 760}
ORDINARY = ("the server responded with a status of 40", "the server responded with a status of 5")
"""What a console says of a refusal, as of a missing key."""


def chromium() -> str:
    """The path of the browser; skips the test where there is none, or no Playwright."""
    pytest.importorskip("playwright.async_api", reason="Playwright is not here: make dev")
    path = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if path is None:
        pytest.skip("Chromium is not here: apt-get install chromium")
    return path


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator["Browser"]:
    """A headless browser."""
    path = chromium()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def tab(
    browser: "Browser", url: str, *, size: "ViewportSize" = WIDE, colors: Literal["light", "dark"] = "light"
) -> AsyncIterator["Page"]:
    """A tab. When it closes, nothing was asked of others than `url`, no script failed, the policy of the page was not
    broken, and nothing was stored."""
    context = browser.contexts[0] if browser.contexts else await browser.new_context()
    context.set_default_timeout(DEADLINE_MS)
    page = await context.new_page()
    await page.set_viewport_size(size)
    await page.emulate_media(color_scheme=colors, reduced_motion="reduce")
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if _is_own(request.url, url) else wrong.append(request.url))
    page.on("console", lambda said: wrong.append(said.text) if _is_complaint(said) else None)
    try:
        yield page
        await _check_nothing_stored(context, page)
    finally:
        await page.close()
    assert not wrong, wrong


def _is_complaint(said: "ConsoleMessage") -> bool:
    return said.type in ("error", "warning") and not any(words in said.text for words in ORDINARY)


def _is_own(asked: str, url: str) -> bool:
    return asked.startswith((url, "data:", "blob:"))


async def _check_nothing_stored(context: "BrowserContext", page: "Page") -> None:
    kept = await page.evaluate("[localStorage.length, sessionStorage.length]")
    assert kept == [0, 0] and await context.cookies() == []
    assert "#" not in page.url and "?" not in page.url


async def enter_key(page: "Page", key: str) -> None:
    """Types a key as a user does."""
    await page.get_by_label("Key", exact=True).fill(key)
    await page.keyboard.press("Enter")


async def say(page: "Page", text: str) -> None:
    """Sends a message of the chat."""
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def overflow(page: "Page") -> int:
    """Pixels by which the page, or a part of it that scrolls up and down, is wider than the window."""
    boxes = "[document.documentElement, ...document.querySelectorAll('.log, .overview, aside, .conversation')]"
    shown = f"{boxes}.filter(box => box.clientWidth).map(box => box.scrollWidth - box.clientWidth)"
    wider: int = await page.evaluate(f"Math.max(...{shown})")
    return wider
