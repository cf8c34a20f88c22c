"""Attacks on scores, reranking, pooling and pinned prefixes: many texts, long ones, large answers, many pins."""

from benchmarks.torture.attacks.base import MB, Attack, Door, Send, dumped, post, several

SHARE = 1.0
"""Of the items of each list: a test that only builds the attacks needs few."""
_RERANK, _SCORE, _POOLING, _CLASSIFY, _PREFIX = "/v1/rerank", "/v1/score", "/pooling", "/classify", "/v1/prefix"
_WORDS = "once upon a time there was a small fish who lived in the river and "


def _listed(name: str, item: bytes, count: int, rest: str) -> bytes:
    items = b",".join([item] * max(1, int(count * SHARE)))
    return b'{"%s": [%s], %s}' % (name.encode(), items, rest.encode())


def _pins(door: Door) -> list[Send]:
    names = range(max(1, int(200 * SHARE)))
    bodies = (
        dumped({"action": "pin", "name": f"pin {at}", "prompt": f"{at} is a number. {_WORDS * 8}"}) for at in names
    )
    return [Send([door.request("POST", _PREFIX, body)]) for body in bodies]


def _unpins(door: Door) -> list[Send]:
    body = dumped({"action": "unpin", "name": "no such pin"})
    return [Send([door.request("POST", _PREFIX, body)]) for _ in range(max(1, int(200 * SHARE)))]


ATTACKS: list[Attack] = [
    post("pairs-2000000-documents", _RERANK, lambda: _listed("documents", b'"a"', 2_000_000, '"query": "a"')),
    post("pairs-2000000-wrong-documents", _RERANK, lambda: _listed("documents", b"[1]", 2_000_000, '"query": "a"')),
    post("pairs-1000-documents", _RERANK, lambda: _listed("documents", b'"a b c"', 1000, '"query": "a"'), is_long=True),
    post("pairs-query-of-digits", _RERANK, lambda: dumped({"query": "1" * (8 * MB), "documents": ["a", "b"]})),
    post("pairs-documents-of-digits", _RERANK, lambda: dumped({"query": "a", "documents": ["1" * MB] * 8})),
    post("pairs-long-documents", _RERANK, lambda: dumped({"query": "a", "documents": [_WORDS * 60] * 12}), is_long=True),
    post("pairs-crossed", _SCORE, lambda: dumped({"text_1": ["a"] * 2000, "text_2": ["b"] * 2001})),
    post("pairs-2000000-texts", _SCORE, lambda: _listed("text_2", b'"a"', 2_000_000, '"text_1": "a"')),
    post("pairs-classes-of-many", _CLASSIFY, lambda: _listed("input", b'"a"', 2_000_000, '"model": null')),
    post("pairs-vectors-of-all-tokens", _POOLING, lambda: dumped({"input": _WORDS * 120, "task": "token_embed"}), is_long=True),
    post("pairs-vectors-of-64-texts", _POOLING, lambda: dumped({"input": [_WORDS * 8] * 64, "task": "token_embed"}), is_long=True),
    post("prefix-of-12mb", _PREFIX, lambda: dumped({"action": "pin", "name": "a", "prompt": "1" * (12 * MB)})),
    post("prefix-with-a-long-name", _PREFIX, lambda: dumped({"action": "pin", "name": "a" * MB, "prompt": "a"})),
    post("prefix-for-ever", _PREFIX, lambda: dumped({"action": "pin", "name": "a", "prompt": "a", "seconds": 1e308})),
    several("prefix-200-pins", _pins, is_flood=True),
    several("prefix-200-unpins", _unpins, is_flood=True),
]  # fmt: skip
