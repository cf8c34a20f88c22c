"""The end that was found last: followed by characters, left and found again behind a value."""

import pytest

from octavo.sampling.grammar.known_end import KnownEnd, KnownEnds
from octavo.sampling.grammar.spelling import Speller

PIECES = [bytes([byte]) for byte in range(256)] + [b'":', b'","', b'"}', b"},", b"]}", b'", "', b"null", b"age"]
ENDS = KnownEnds(Speller(enumerate(PIECES)))


def known(text: bytes) -> KnownEnd:
    return ENDS.of_tokens([*text], text)


def texts(ends: "list[KnownEnd]") -> list[bytes]:
    return [end.text for end in ends]


def spelled(end: KnownEnd) -> bytes:
    return b"".join(PIECES[token] for token in end.tokens())


def test_it_has_the_fewest_tokens_from_each_place_on() -> None:
    end = known(b'","age":null}')
    assert len(end) == len(end.tokens()) == 5 and spelled(end) == end.text
    after = end.after(ord('"'), b'"')
    assert after is not None and len(after) == 6 and spelled(after) == b',"age":null}'
    assert end.first(2) == end.tokens()[:2] == end.first_two


def test_a_token_leads_along_it_however_it_is_divided_into_tokens() -> None:
    end: KnownEnd | None = known(b'","age":null}')
    for piece in (b'"', b',"a', b"ge", b'":n', b"ull", b"}"):
        assert end is not None
        end = end.after(0, piece)
    assert end is not None and not len(end) and not end.tokens()
    assert known(b"}]").after(0, b"]") is None and known(b"}").after(0, b"}]") is None
    assert known(b"}").after(0, b"") is None  # a control token


def test_without_a_text_it_is_followed_token_by_token() -> None:
    end = ENDS.of_tokens([5, 6, 7], b"")
    assert not end.has_text and end.tokens() == [5, 6, 7] and end.first(2) == [5, 6]
    after = end.after(5, b"x")
    assert after is not None and after.tokens() == [6, 7] and end.after(6, b"y") is None
    assert not end.tails() and not list(end.beside(b" "))


@pytest.mark.parametrize(
    ("text", "tails"),
    [
        (b'0,"b":{"c":[1,2]},"d":""}]', [b',"b":{"c":[1,2]},"d":""}]', b',"d":""}]', b"}]", b"]"]),
        (b'x, y","b":0}', [b',"b":0}', b"}"]),  # within a string
        (b'"a,b","b":0}', [b',"b":0}', b"}"]),  # before one
        (b'a\\",b",0]', [b",0]", b"]"]),
        (b'[1,2],"b":0}', [b',"b":0}', b"}"]),
        (b"1,1,1,1,1,1,1,1]", [b",1" * count + b"]" for count in range(7, 1, -1)]),
    ],
)
def test_its_tails_are_what_may_follow_the_value(text: bytes, tails: list[bytes]) -> None:
    assert texts(known(text).tails()) == tails


@pytest.mark.parametrize(
    ("text", "piece", "ends"),
    [
        (b'a@b.cc","b":0}', b"john", [b'a@b.cc","b":0}']),  # a string goes on
        (b',"b":0}', b" ", [b',"b":0}']),
        (b',"b":0}', b', "', [b'b":0}']),
        (b'0,"b":0}', b"13, ", [b'"b":0}']),  # another value, and what follows it
        (b'a@b.cc","b":0}', b'","', [b'a@b.cc","b":0}', b'b":0}']),
        (b'0,"b":0}', b"7", []),
    ],
)
def test_ends_beside_it_are_proposed(text: bytes, piece: bytes, ends: list[bytes]) -> None:
    assert [*dict.fromkeys(texts([*known(text).beside(piece)]))] == ends


def test_a_tail_is_joined_with_what_leads_to_it() -> None:
    (tail, *_) = known(b'0,"b":0}').tails()
    end = ENDS.joined(b'"', tail)
    assert end is not None and end.text == b'","b":0}' and spelled(end) == end.text and end.closes_value
    assert not known(b'":0}').closes_value  # of a name, on which the value depends
