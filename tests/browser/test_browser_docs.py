"""/docs in a real browser: the routes of /openapi.json, their fields, the filter."""

from typing import Any

import pytest

from tests.browser.conftest import keep, unnamed, until

pytestmark = pytest.mark.model


def test_routes_can_be_found_and_opened(open_page: Any) -> None:
    page = open_page("/docs")
    until(page, "document.querySelectorAll('details.route').length > 40")
    assert page.inner_text("#version").startswith("Octavo ")
    page.fill("#filter", "post logprob_token_ids")
    shown = page.locator("details.route:not(.hidden) > summary code").all_inner_texts()
    assert {"/v1/chat/completions", "/v1/completions"} <= set(shown) and len(shown) < 10
    assert page.inner_text("#note") == f"{len(shown)} routes"
    chat = page.locator("details.route", has=page.locator("summary code", has_text="/v1/chat/completions")).first
    chat.locator("summary").click()
    fields = chat.locator("table").first.locator("tr")
    row = fields.filter(has=page.locator("td:first-child code", has_text="messages")).first
    assert "required" in row.inner_text() and "list of object" in row.inner_text()
    assert (
        "curl -X POST" in chat.locator("pre").inner_text()
        and "/v1/chat/completions" in chat.locator("pre").inner_text()
    )
    keep(page, "docs")
    assert unnamed(page) == []
    page.fill("#filter", "no such thing")
    assert page.inner_text("#note") == "0 routes"


def test_a_link_opens_its_route(open_page: Any) -> None:
    page = open_page("/docs#get%20/v1/models")
    page.wait_for_selector("details.route[open]")
    assert page.locator("details.route[open] summary code").inner_text() == "/v1/models"
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= 390"), "a phone shows it without sideways scrolling"
