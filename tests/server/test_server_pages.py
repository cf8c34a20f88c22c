"""The pages as files: whole, shown with a key only, and made of nothing from elsewhere. What they do is tried in a browser (tests/browser)."""

import posixpath
import re

import httpx
import msgspec
import pytest

from tests.doubles import REPORT, ScriptedEngine, byte_text
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
        here = posixpath.dirname(name).lstrip("/")
        names += [posixpath.normpath(f"{here}/{part}") for part in re.findall(r'from "(\.[^"]+)"', response.text)]
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
    for path in (*PAGES, "/pages/style/base.css", "/pages/nothing.js"):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = await client.get(path, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == 'Basic realm="octavo"'
    for path in (*PAGES, "/pages/style/base.css", "/v1/models", "/v1/requests", "/metrics"):
        assert (await client.get(path, auth=("anybody", "secret"))).status_code == 200, path
        assert (await client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200, path


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "cockpit.html",
        "api.html",
        "..%2fapp.py",
        "%2e%2e",
        "style/base.css.js",
        "style",
        "chat/",
        "chat/../../app.py",
    ],
)
async def test_no_other_file_can_be_had(serve: Serve, name: str) -> None:
    error_of(await serve().get(f"/pages/{name}"), 404)


async def test_an_encoder_has_a_page_of_its_own(serve: Serve) -> None:
    encoder = ScriptedEngine(report=msgspec.structs.replace(REPORT, can_generate=False, hidden_size=4, num_pages=0))
    client = serve(encoder)
    found = await parts(client, "/play")
    assert "/pages/embed/app.js" in found and "/pages/chat/app.js" not in found
    card = (await client.get("/v1/models")).json()["data"][0]
    assert card["capabilities"] == ["embedding"] and card["default_sampling"] == {}


async def test_a_model_says_what_it_can_do_and_its_defaults(serve: Serve) -> None:
    text = byte_text(generation_config='{"temperature": 0.6, "top_k": 20}')
    card = (await serve(text=text).get("/v1/models")).json()["data"][0]
    assert card["capabilities"] == ["chat", "completion", "embedding"]
    assert card["default_sampling"] == {"temperature": 0.6, "top_k": 20}


async def test_no_script_writes_markup(serve: Serve) -> None:
    """A model's text must have no way into markup: the scripts make nodes, and never parse a text as HTML."""
    client = serve()
    for path in PAGES:
        for name, text in (await parts(client, path)).items():
            if name.endswith(".js"):
                for way in (
                    "innerHTML =",
                    "innerHTML=",
                    "insertAdjacentHTML",
                    "document.write",
                    "outerHTML =",
                    "DOMParser",
                    "eval(",
                    "new Function",
                ):
                    assert way not in text, (name, way)
