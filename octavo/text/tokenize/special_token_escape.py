"""SpecialTokenEscape: hides text that only looks like a control token from the chat template, and reveals it for the tokenizer.

A template writes control tokens around the client's text, and both end up in one string. So in the client's text, the first
character of everything that reads like a control token is replaced by a mark; whatever then reads like one was written by the
template. The tokenizer restores the characters after it has found the control tokens.

A mark replaces one character by one printable character, so that a template which measures, cuts, escapes or prints a text does
the same as it would without marks. If the client's text contains a mark itself, that is escaped.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from octavo.errors import ConfigError

_MAX_DEPTH = 50  # nesting of groups in a pattern; deeper words are tried one by one
_MARKS = range(0x2A000, 0x2A6DE)  # rare ideographs: printable, caseless, the same in every Unicode normal form


def reads_like_control(token: str) -> bool:
    """Whether a token looks like a control token. Vocabularies do not mark all of them special; these two shapes have no other
    meaning."""
    return (token.startswith("<|") and token.endswith("|>")) or (token.startswith("<｜") and token.endswith("｜>"))


def is_mark(character: str) -> bool:
    return ord(character) in _MARKS


def any_of(words: Iterable[str]) -> str:
    """Build a pattern that matches the longest of `words` at a position, without trying them one by one."""
    return _branches(sorted({word for word in words if word}))


def _branches(words: list[str], depth: int = 0) -> str:
    """Build the pattern as a trie. `words` are sorted and distinct; only the first may be empty."""
    if depth > _MAX_DEPTH:
        return "(?:" + "|".join([re.escape(word) for word in sorted(words, key=len, reverse=True)]) + ")"
    is_end = words[:1] == [""]
    by_first: dict[str, list[str]] = {}
    for word in words[is_end:]:
        by_first.setdefault(word[0], []).append(word)
    branches = []
    for group in by_first.values():
        shared = _shared_start(group[0], group[-1])
        branches.append(re.escape(shared) + _branches([word[len(shared) :] for word in group], depth + 1))
    if not branches:
        return ""
    return "(?:" + "|".join(branches) + ")" + ("?" if is_end else "")


def _shared_start(first: str, last: str) -> str:
    at = 0
    while at < min(len(first), len(last)) and first[at] == last[at]:
        at += 1
    return first[:at]


def _unused(used: str) -> Iterator[str]:
    return (character for character in map(chr, _MARKS) if character not in used)


class SpecialTokenEscape:
    """Hides and reveals look-alikes. `control_tokens`: their literal texts."""

    def __init__(self, control_tokens: Collection[str]) -> None:
        starts = sorted({token[0] for token in control_tokens if token})
        unused = _unused("".join(control_tokens))
        if 2 * len(starts) + 2 > len(_MARKS):
            raise ConfigError(
                f"the vocabulary's control tokens start with {len(starts)} different characters, which are too many: give "
                "--tokenizer a folder with the model's own tokenizer.json"
            )
        escape = next(unused)
        mark_of = {start: next(unused) for start in starts}
        escaped = {character: escape + next(unused) for character in [escape, *mark_of.values()]}
        self._hidden = {**mark_of, **escaped}
        # Replacements in this order: escaped marks are restored after all marks have been replaced.
        self.reveals: list[tuple[str, str]] = [
            *((mark, start) for start, mark in mark_of.items()),
            *((pair, character) for character, pair in escaped.items() if character != escape),
            (escaped[escape], escape),
        ]
        rests = {start: [token[1:] for token in control_tokens if token[:1] == start] for start in starts}
        found = [re.escape(start) + ("" if "" in rest else f"(?={any_of(rest)})") for start, rest in rests.items()]
        self._marks = re.compile(f"(?<=[{''.join(mark_of.values())}])") if mark_of else None
        self._reading = re.compile("|".join([f"[{''.join(escaped)}]", *found]))

    def hide(self, value: Any) -> Any:
        """Return `value` with look-alikes hidden in every string, including the keys of objects."""
        match value:
            case str():
                return self._reading.sub(self._hide_one, value)
            case Mapping():
                return {self.hide(key): self.hide(item) for key, item in value.items()}
            case list() | tuple():
                return [self.hide(item) for item in value]
            case _:
                return value

    def reveal(self, text: str) -> str:
        for hidden, shown in self.reveals:
            text = text.replace(hidden, shown)
        return text

    def after_marks(self, text: str) -> list[str]:
        """Cut after every hidden character: no piece contains a complete look-alike."""
        return self._marks.split(text) if self._marks else [text]

    def _hide_one(self, found: re.Match[str]) -> str:
        return self._hidden[found[0]]
