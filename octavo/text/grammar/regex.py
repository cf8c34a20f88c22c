"""Converts regular expressions to the notation and the meaning that the grammar compiler needs."""

import re

_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\x0b\x0c"}
# What ECMAScript or Python takes for a space, a digit or a character of a word.
_WIDE = {"s": r"\s\p{Z}\x{feff}\x{180e}\x{1c}-\x{1f}\x{85}", "d": r"\p{N}", "w": r"\p{L}\p{N}\p{M}_"}
# Patterns that widely used libraries write with look-ahead, which the compiler does not have, and the same without it: numbers of pydantic's
# Decimal, of which at least one digit is required, and zod's email addresses, which have no dot at the beginning and no two in a row. Of
# decimals with a number of digits those are left whose zeros are not counted twice.
_DECIMAL = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?P<rest>.*)", re.S)
_DIGITS = re.compile(
    r"\(\?:\\d\{0,(?P<whole>[0-9]{1,4})\}\|\(\?=\[\\d\.\]\{1,[0-9]{1,4}\}0\*\$\)\\d\{0,[0-9]{1,4}\}\\\.\\d\{0,(?P<places>[0-9]{1,4})\}0\*\$\)"
)
_KNOWN = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
_SETS = (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")
_PIECE = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+|.", re.S)


def without_look_ahead(pattern: str) -> str:
    """A known pattern without its look-ahead; any other as it is."""
    if pattern in _KNOWN:
        return _KNOWN[pattern]
    decimal = _DECIMAL.fullmatch(pattern)
    digits = None if decimal is None else _DIGITS.fullmatch(decimal["rest"])
    if digits is None or int(digits["whole"]) < 1:
        return pattern
    places = int(digits["places"])
    fraction = f"(\\.[0-9]{{1,{places}}})?" if places else ""
    return f"^[+-]?[0-9]{{1,{digits['whole']}}}{fraction}$"


def ascii_classes(pattern: str) -> str:
    r"""Replace \d, \w and \s by their ASCII sets, which is their meaning in ECMAScript: Python and others match those of all scripts.
    What one of them takes for a digit, a character of a word or a space, \D, \W and \S do not match, and neither does a negated class
    with \d, \w or \s."""
    parts: list[str] = []
    is_inside = is_negated = was_set = False
    for piece in _PIECE.findall(pattern):
        is_set = is_inside and piece in _SETS
        if piece[0] == "[" and not is_inside:
            is_inside, is_negated = True, piece == "[^"
        elif piece == "]":
            is_inside = False
        elif is_inside and piece[0] != "\\":
            if was_set:  # which is no end of a range
                num_hyphens = len(piece) - len(piece.lstrip("-"))
                parts.append("\\-" * num_hyphens)
                piece = piece[num_hyphens:]
            piece = _plain_members(piece, is_first=parts[-1] in ("[", "[^"))
        elif piece in (r"\S", r"\D", r"\W") and not (is_inside and is_negated):
            piece = f"[^{_WIDE[piece[1].lower()]}]"
        elif piece[0] == "\\" and piece[1:] in _ASCII:
            members = (_WIDE if is_inside and is_negated else _ASCII)[piece[1]]
            piece = members if is_inside else f"[{members}]"
        if is_set and parts[-1].endswith("-") and not parts[-1].endswith("\\-"):
            parts[-1] = parts[-1][:-1] + "\\-"
        parts.append(piece)
        was_set = is_set
    return "".join(parts)


def _plain_members(piece: str, is_first: bool) -> str:
    """Members of a class as ECMAScript and Python read them: without classes in classes, and without operations on classes."""
    head = ""
    if is_first and piece.startswith("--"):  # a range from the hyphen on
        head, piece = r"\--", piece[2:]
    return head + re.sub(r"\[|(?<=&)&|(?<=~)~|(?<=-)-", lambda found: "\\" + found[0], piece)


def without_anchors(pattern: str) -> str:
    """Remove anchors at the ends: the whole text must match anyway."""
    pattern = pattern.removeprefix("^")
    is_escaped = (len(pattern) - len(pattern[:-1].rstrip("\\")) - 1) % 2 == 1
    return pattern[:-1] if pattern.endswith("$") and not is_escaped else pattern


def slashed(pattern: str) -> str:
    """Write the pattern between slashes, as in Lark."""
    escapes = {"/": r"\/", "\n": r"\n"}
    return "/" + re.sub(r"(\\.)|/|\n", lambda found: found[1] or escapes[found[0]], pattern, flags=re.S) + "/"
