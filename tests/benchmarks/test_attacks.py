"""The catalogue of attacks builds, and the client that carries them out reads what servers answer."""

import asyncio
import itertools
import random

import pytest

from benchmarks.torture.attack_run import AttackCampaign
from benchmarks.torture.attacks import CATALOGUE, adapters, gateway, lists, pairs
from benchmarks.torture.attacks.base import Answer, Attack, Door, Send, must_be, several
from benchmarks.torture.strike import Battle

_DOOR = Door(1, "key", "other", "admin")
_SILENT = {"connections-1000-silent"}  # its connections send nothing, on purpose


def test_names_are_unique_and_the_catalogue_is_large() -> None:
    names = [attack.name for attack in CATALOGUE]
    assert len(names) == len(set(names)) >= 90
    assert all(" " not in name and name == name.lower() for name in names)


def _themes() -> list[str]:
    return sorted({attack.name.split("-")[0] for attack in CATALOGUE})


@pytest.mark.parametrize("theme", _themes())
def test_every_attack_sends_bytes(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "SHARE", 0.001)
    monkeypatch.setattr(pairs, "SHARE", 0.001)
    monkeypatch.setattr(adapters, "SHARE", 0.001)
    monkeypatch.setattr(gateway, "SHARE", 0.001)
    for attack in (each for each in CATALOGUE if each.name.split("-")[0] == theme):
        rounds = attack.strike(_DOOR, random.Random(0))
        sends = list(next(rounds))
        assert sends and all(0 <= send.pause < 1 and 0 <= send.delay < 1 for send in sends), attack.name
        first = next(itertools.islice(sends[0].pieces, 1), b"")
        assert bool(first) != (attack.name in _SILENT), attack.name
        assert attack.seconds <= 30, attack.name
        rounds.close()


def test_rounds_that_need_earlier_answers_go_on_with_them() -> None:
    attack = next(each for each in CATALOGUE if each.name == "batch-same-ids")
    rounds = attack.strike(_DOOR, random.Random(0))
    next(rounds)
    (started,) = rounds.send([Answer(200, body=b'{"id": "file-1"}')])
    (request,) = started.pieces
    assert request.startswith(b"POST /v1/batches ") and b"file-1" in request


def test_a_configuration_has_its_own_attacks() -> None:
    open_to_all = {attack.name for attack in AttackCampaign(1, False, 0).chosen(CATALOGUE)}
    with_keys = {attack.name for attack in AttackCampaign(1, True, 0).chosen(CATALOGUE)}
    assert "site-cross-origin" in open_to_all - with_keys
    assert "other-key-objects" in with_keys - open_to_all
    assert [attack.name for attack in AttackCampaign(1, True, 0).chosen(CATALOGUE, "head-10000-keys,image-of")] == [
        "head-10000-keys",
        "image-of-a-file",
    ]


async def _against(response: bytes, attack: Attack) -> Battle:
    """Fight a server that reads a request's head and answers with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        battle = Battle(attack, Door(server.sockets[0].getsockname()[1]), random.Random(0))
        await battle.fight()
    return battle


def _attack(**options: object) -> Attack:
    return several("x", lambda door: [Send([door.request("GET", "/")])], **options)


async def test_a_4xx_is_a_right_answer() -> None:
    battle = await _against(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}", _attack())
    assert (battle.answers[0].status, battle.answers[0].body, battle.problem) == (400, b"{}", "")


async def test_a_5xx_is_a_problem_but_a_full_queue_of_a_flood_is_not() -> None:
    full = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    assert "503" in (await _against(full, _attack())).problem
    assert (await _against(full, _attack(is_flood=True))).problem == ""
    assert "503" in (await _against(full.replace(b"Retry-After: 1\r\n", b""), _attack(is_flood=True))).problem


async def test_a_connection_closed_without_an_answer_is_a_problem() -> None:
    assert "without an answer" in (await _against(b"", _attack())).problem


async def test_the_answers_of_the_last_round_are_checked() -> None:
    ok = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert (await _against(ok, _attack(check=must_be(200)))).problem == ""
    assert (await _against(ok, _attack(check=must_be(403)))).problem == "200 instead of 403"
