"""The pages' files: open to all, from nowhere else, and everything that they name is there."""

import re

import pytest

from tests.server.conftest import Serve, error_of


@pytest.mark.parametrize(("path", "num_files"), [("/", 2), ("/play", 3)])
async def test_pages_and_their_files_need_no_key_and_load_nothing_from_elsewhere(
    serve: Serve, path: str, num_files: int
) -> None:
    client = serve(api_key="secret")
    page = await client.get(path)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    names = re.findall(r'(?:src|href)="(pages/[^"]+)"', page.text)
    assert len(names) == num_files
    for name in names:
        answer = await client.get(f"/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        for other in re.findall(r'from "\./([^"]+)"', answer.text):
            assert (await client.get(f"/pages/{other}")).status_code == 200
        assert not re.search(r"https?://", answer.text)
    assert not re.search(r"https?://", page.text)


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e%2fapp.py", "__init__.py"])
async def test_no_other_file_is_served(serve: Serve, name: str) -> None:
    assert error_of(await serve().get(f"/pages/{name}"), 404)


async def test_what_the_pages_ask_for_needs_the_key(serve: Serve) -> None:
    client = serve(api_key="secret")
    for path in ("/v1/live", "/v1/requests", "/v1/requests/x", "/v1/live/pages/0"):
        assert error_of(await client.get(path), 401)
    assert error_of(await client.post("/pages/cockpit.js"), 401)
