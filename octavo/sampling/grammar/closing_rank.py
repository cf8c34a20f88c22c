"""Rank a token by how near its characters bring a JSON answer to its end: the lower the rank, the nearer."""

import re

SIGNS = b"@:/.-+0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # in the order in which they are tried
_OPENERS = re.compile(
    rb"[{\[,\\]"
)  # a regex because every token of the vocabulary is tested: any() takes five times as long
_SPACES = re.compile(rb"[ \t\r\n]")


def rank_of(piece: bytes) -> int:
    size = min(len(piece), 60)
    if opens(piece):
        return 800 + size
    if _SPACES.search(piece):
        return 900 + size  # behind openers: a comma may be required, and space never brings an end nearer
    if not piece.strip(b'"}]'):
        return -size if piece[:1] in b"}]" else 100 if piece == b'""' else 101 + size
    if not piece.strip(b'"}],:'):
        return 200 - size
    return 300 if piece.isdigit() else 400 - size


def text_rank(piece: bytes, signs: bytes, rank: int) -> int:
    """The rank inside a string. `rank`: that of the same piece outside a string."""
    if piece[:1] == b'"' and not piece.strip(b'"}]'):
        return -len(piece)
    return signs.index(piece) if len(piece) == 1 and piece in signs else max(rank, 400)


def opens(piece: bytes) -> bool:
    return _OPENERS.search(piece) is not None
