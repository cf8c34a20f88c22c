"""API processes that ask one another: who has an answer gives it, who is stuck or gone is passed over."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from octavo.errors import EngineUnavailable, InvalidRequest
from octavo.server.state import peers as module
from octavo.server.state.peers import Peers


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[list[Peers]]:
    made = [Peers() for _ in range(3)]
    for number, peers in enumerate(made):
        await peers.open(tmp_path, number)
    yield made
    for peers in made:
        peers.close()


async def says(*chunks: bytes) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        yield chunk


async def test_the_first_who_knows_answers(three: list[Peers]) -> None:
    long = b"x" * 300_000
    three[1].handle("numbers", lambda body: says(body, long) if body == b"one" else None)
    three[2].handle("numbers", lambda body: says(b"two") if body == b"two" else None)
    assert await three[0].ask_whole("numbers", b"one") == b"one" + long
    assert await three[0].ask_whole("numbers", b"two") == b"two"
    assert await three[0].ask_whole("numbers", b"none") is None
    assert await three[1].ask_whole("others", b"one") is None
    assert await three[1].ask_whole("numbers", b"one") is None, "nobody asks himself"


async def test_a_refusal_is_told(three: list[Peers]) -> None:
    def refuse(body: bytes) -> AsyncGenerator[bytes, None]:
        raise InvalidRequest("not this part", param="from")

    three[2].handle("numbers", refuse)
    with pytest.raises(InvalidRequest, match="not this part") as caught:
        await three[0].ask("numbers", b"a")
    assert caught.value.param == "from"


async def test_an_answer_without_its_end_is_no_answer(three: list[Peers]) -> None:
    async def breaks() -> AsyncGenerator[bytes, None]:
        yield b"half"
        raise ValueError("broken")

    three[1].handle("numbers", lambda body: breaks())
    with pytest.raises(EngineUnavailable):
        await three[0].ask_whole("numbers", b"a")


async def test_one_that_is_stuck_is_passed_over(
    three: list[Peers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    three[2].handle("numbers", lambda body: says(b"yes"))
    hold = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        writer.close()

    stuck = await asyncio.start_unix_server(never, tmp_path / "sibling-3")
    assert await three[0].ask_whole("numbers", b"a") == b"yes"
    three[2].handle("numbers", lambda body: None)
    assert await three[0].ask_whole("numbers", b"a") is None
    hold.set()
    stuck.close()


async def test_alone_there_is_nobody_to_ask() -> None:
    assert await Peers().ask("numbers", b"a") is None


async def test_a_question_too_long_for_a_line_is_not_asked(
    three: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    """The id in a request's path may have any length."""
    three[1].handle("numbers", lambda body: says(b"found"))
    assert await three[0].ask_whole("numbers", b"a" * 60_000) is None
    assert await three[0].ask_whole("numbers", b"a" * 5_000) == b"found"
    assert not caplog.records
