"""The pages as files: whole, shown to whoever has a key, and made of nothing from elsewhere. What they do is tried in a browser (tests/browser)."""

import re

import httpx
import pytest

from tests.server.conftest import Serve, error_of

PAGES = ("/", "/play", "/docs")


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


async def test_a_browser_asks_for_the_key_as_a_password_and_sends_it_with_what_the_page_asks(serve: Serve) -> None:
    client = serve(api_key="secret")
    for path in (*PAGES, "/pages/style.css", "/pages/nothing.js"):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = await client.get(path, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == 'Basic realm="octavo"'
    for path in (*PAGES, "/pages/style.css", "/v1/models", "/v1/requests", "/metrics"):
        assert (await client.get(path, auth=("anybody", "secret"))).status_code == 200, path
        assert (await client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200, path


@pytest.mark.parametrize("name", ["nothing.js", "cockpit.html", "docs.html", "..%2fapp.py", "%2e%2e", "style.css.js"])
async def test_no_other_file_can_be_had(serve: Serve, name: str) -> None:
    error_of(await serve().get(f"/pages/{name}"), 404)
