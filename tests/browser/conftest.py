"""A real server on the embedded model and a real browser: Debian's chromium, driven by Playwright. Without them the tests are
skipped. `make test-browser` installs Playwright; the browser is the system's (OCTAVO_TEST_BROWSER names another)."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server

ARTEFACTS = Path(os.environ.get("OCTAVO_TEST_ARTEFACTS", "build/screenshots"))
KEY = "browser-key"
PATIENCE_S = 120  # for a click, a page or a condition: a busy machine is slow, and nothing is measured here


@pytest.fixture(scope="module")  # not longer: while Playwright runs, no test of this process can have an event loop
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs Playwright")
    program = os.environ.get("OCTAVO_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium is installed (Debian: apt install chromium)")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Few pages, so that a few requests fill them and some are preempted.
    with Server("--api-key", KEY, "--kv-cache-memory-bytes", "60M") as started:
        yield started


@pytest.fixture
def open_page(browser: Any, server: Any) -> Iterator[Any]:
    """open_page(path, scheme) opens a page of `server`, with the API key as HTTP credentials. An error in the page's scripts, or
    anything that its content policy has refused, fails the test. A page has a context of its own: nothing is stored yet."""
    errors: list[str] = []
    contexts: list[Any] = []

    def start(path: str, scheme: str = "light", is_phone: bool = False) -> Any:
        size = {"width": 390, "height": 780} if is_phone else {"width": 1366, "height": 768}  # else a laptop
        context = browser.new_context(
            viewport=size,
            color_scheme=scheme,
            http_credentials={"username": "anybody", "password": KEY},
            **({"has_touch": True, "is_mobile": True, "device_scale_factor": 2} if is_phone else {}),
        )
        context.set_default_timeout(PATIENCE_S * 1000)
        contexts.append(context)
        page = context.new_page()
        watch(page, errors)
        page.goto(server.base + path)
        return page

    yield start
    for context in contexts:
        context.close()
    assert errors == []


def watch(page: Any, errors: list[str]) -> None:
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)


def keep(page: Any, name: str) -> None:
    """Save a screenshot as an artefact of the test."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(ARTEFACTS / f"{name}.png"), full_page=True)


def unnamed(page: Any) -> list[str]:
    """Elements that have no name for a screen reader."""
    found: list[str] = page.eval_on_selector_all(
        "button, a, input, canvas, select, textarea, dialog, [tabindex]",
        "all => all.filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length || one.getAttribute('aria-labelledby'))).map(one => one.outerHTML)",
    )
    return found


def until(page: Any, expression: str, seconds: float = PATIENCE_S) -> None:
    """Poll an expression from outside: the pages' content policy forbids polling inside the page."""
    for _ in range(int(seconds * 10)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"for {seconds} s this did not come true: {expression}")
