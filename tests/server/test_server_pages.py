"""The pages as files: whole, open to all, and made of nothing from elsewhere. What they do is tried in a browser (tests/browser)."""

import re

import httpx
import pytest

from tests.server.conftest import Serve, error_of

PAGES = ("/", "/play")


async def parts(client: httpx.AsyncClient, path: str) -> dict[str, str]:
    """A page and all that it is made of, by path."""
    found: dict[str, str] = {}
    wanted = [path]
    while wanted:
        name = wanted.pop()
        response = await client.get(name)
        assert response.status_code == 200, name
        found[name] = response.text
        names = re.findall(r'(?:href|src)="(pages/[^"]+)"', response.text) if name == path else []
        names += [f"pages/{part}" for part in re.findall(r'from "\./([^"]+)"', response.text)]
        wanted += [f"/{part}" for part in names if f"/{part}" not in found]
    return found


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_and_its_parts_are_served_and_nothing_comes_from_elsewhere(serve: Serve, path: str) -> None:
    client = serve()
    found = await parts(client, path)
    assert {name.rpartition(".")[2] for name in found} == {path, "css", "js", "svg"}
    for name, text in found.items():
        outside = [address for address in re.findall(r"https?://[^\s\"'`<)]*", text) if "www.w3.org" not in address]
        assert outside == [], name
    assert " style=" not in found[path] and "<script>" not in found[path], "the content policy refuses what is inline"
    policy = (await client.get(path)).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


async def test_pages_need_no_key_and_what_they_ask_for_does(serve: Serve) -> None:
    client = serve(api_key="secret")
    for path in (*PAGES, "/pages/style.css"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/live", "/v1/models", "/v1/requests", "/metrics"):
        assert (await client.get(path)).status_code == 401, path


@pytest.mark.parametrize("name", ["nothing.js", "cockpit.html", "..%2fapp.py", "%2e%2e", "style.css.js"])
async def test_no_other_file_can_be_had(serve: Serve, name: str) -> None:
    error_of(await serve().get(f"/pages/{name}"), 404)
