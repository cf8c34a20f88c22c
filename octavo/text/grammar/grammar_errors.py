"""Turns an error of the grammar compiler into a message for the grammar's author: which construct, and what is wrong with it."""

import re

MAX_LEN = 300  # characters
_MAX_SHOWN = 30  # characters of a construct

_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_LISTING = re.compile(r"(?m)^ *\d+ \| .*$(?:\n +\^+$)?")
_ABOUT = re.compile(r'^(?:invalid regex "(?:[^"\\]|\\.)*" \(in regex\)|failed to compile JSON schema): ', re.S)
_MARKED = re.compile(r"regex parse error:\n {4}(.*)\n {4}([ ^]+)\nerror: (.*)", re.S)
_LONG_ROW = re.compile(r"Parser Error: Current row has (\d+) items; max is (\d+)")
_ASSERTION = re.compile(r"lookarounds not supported yet; (\w+) in regex .*", re.S)

_EDGES = {"Start": "^", "StartLF": "^", "StartCRLF": "^", "End": "$", "EndLF": "$", "EndCRLF": "$"}
_WORDS = {
    "look-around, including look-ahead and look-behind, is not supported": "look-ahead and look-behind are not supported",
    "decimal literal invalid": "a number is too large",
    "invalid character class range, the start must be <= the end": "a range must not run backwards",
    "invalid repetition count range, the start must be <= the end": "the first count must not be above the second",
    "repetition operator missing expression": "there is nothing to repeat",
    "repetition quantifier expects a valid decimal": "a count must be a number",
    "unrecognized escape sequence": "unknown escape",
    "unrecognized flag": "unknown flag",
    "lexer error": "a string or an expression is not closed, or a character is not allowed",
}


def in_words(problem: str, num_lines_before: int | None = None) -> str:
    """Return the message as one line. `num_lines_before`: our lines above the author's own text, to correct line numbers; None:
    the text is not the author's, so no line is named."""
    place = _PLACE.match(problem)
    words = _LISTING.sub("", problem[place.end() :] if place else problem).strip()
    words = _ABOUT.sub("", words)
    words = words.replace("Unsatisfiable schema: ", "no output satisfies it: ")
    if found := _MARKED.fullmatch(words):
        pattern, marks, fault = found.groups()
        start = marks.index("^")
        words = f"{_WORDS.get(fault, fault)}: {pattern[start : start + _MAX_SHOWN]!r}"
    elif found := _LONG_ROW.match(words):
        words = f"too many properties or choices are possible at one place ({found[1]} items; at most {found[2]} are allowed)"
    elif found := _ASSERTION.fullmatch(words):
        edge = _EDGES.get(found[1])
        words = (
            f"{edge!r} is supported only at the ends of an expression"
            if edge
            else "word boundaries (\\b, \\B) are not supported"
        )
    words = re.sub(r"\s+", " ", _WORDS.get(words, words)).strip()[:MAX_LEN] or "unknown error"
    if place and num_lines_before is not None and int(place[1]) > num_lines_before:
        words = f"line {int(place[1]) - num_lines_before}: {words}"
    return words
