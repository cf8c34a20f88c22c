"""Regular expressions as people mean them, in the notation that grammars take.
Knows nothing of grammars or schemas."""

import re

_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\x0b\x0c"}
_PIECE = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+|.", re.S)


def plain_classes(pattern: str) -> str:
    r"""\d, \w and \s as ECMAScript has them: ASCII alone. Digits of all scripts, which the compiler would take too, do not match
    there; Python and others have theirs from another year. What a negated class leaves out stays out in every dialect."""
    parts = []
    is_inside = is_negated = False
    for piece in _PIECE.findall(pattern):
        if piece[0] == "[" and not is_inside:
            is_inside, is_negated = True, piece == "[^"
        elif piece == "]":
            is_inside = False
        elif piece[0] == "\\" and piece[1:] in _ASCII and not (is_inside and is_negated):
            piece = _ASCII[piece[1]] if is_inside else f"[{_ASCII[piece[1]]}]"
        parts.append(piece)
    return "".join(parts)


def without_anchors(pattern: str) -> str:
    """For a text that must match from end to end, where anchors at either end say nothing."""
    pattern = pattern.removeprefix("^")
    is_escaped = (len(pattern) - len(pattern[:-1].rstrip("\\")) - 1) % 2 == 1
    return pattern[:-1] if pattern.endswith("$") and not is_escaped else pattern


def slashed(pattern: str) -> str:
    """Between slashes, as Lark has it."""
    escapes = {"/": r"\/", "\n": r"\n"}
    return "/" + re.sub(r"(\\.)|/|\n", lambda found: found[1] or escapes[found[0]], pattern, flags=re.S) + "/"
