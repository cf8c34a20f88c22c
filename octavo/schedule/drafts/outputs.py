"""RecentOutputs: what the last requests of each API key gave, to draft from for its next ones (decision 048)."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from octavo.schedule.drafts.suffix import Automaton

MAX_TOKENS = 65_536  # of a key
MAX_TOKENS_OF_ALL = 262_144  # which take 45 to 60 MB
MAX_KEYS = 1_024
LEAST_OUTPUT = 8  # tokens; shorter outputs are not kept, because they save no steps
CONTEXT = 16  # last tokens of the prompt that are kept before an output, so that its beginning can be found, too
INDEXED_AT_ONCE = 512  # tokens that are added to automata before a step, which takes two to three milliseconds
SEPARATOR = -3  # behind each output; no token, nor one of the automaton's own numbers

Key = tuple[bytes, str]
"""Whose outputs these are: the owner of the API key, and SamplingParams.prefix_space."""


class PartState(msgspec.Struct, array_like=True, gc=False):
    number: int
    text: list[int]
    num_outputs: int
    num_indexed: int


class RecentState(msgspec.Struct, array_like=True, gc=False):
    next_number: int
    keys: list[tuple[bytes, str, list[PartState]]]  # longest unused first


class Part:
    """Outputs one after the other, which are forgotten together. Their automaton is built when a request asks for it, some tokens at a
    time: where nothing is drafted, keeping an output is copying it."""

    __slots__ = ("automaton", "num_indexed", "num_outputs", "number", "text")

    def __init__(self, number: int) -> None:
        self.number = number  # of all parts of an engine; never used again
        self.text = array("i")
        self.num_outputs = 0
        self.automaton = Automaton()
        self.num_indexed = 0  # tokens of the text, from the first on, that are in the automaton

    def add(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)
        self.text.append(SEPARATOR)
        self.num_outputs += 1

    def index(self, most: int) -> int:
        """Add at most `most` tokens to the automaton. Returns how many."""
        start = self.num_indexed
        end = self.num_indexed = min(len(self.text), start + most)
        automaton = self.automaton
        for token in self.text[start:end]:
            automaton.add(token)
            automaton.longest()  # which notes this place: of several, the last is found
        return end - start


class RecentOutputs:
    """Outputs of requests that have ended, by key. Those of a key are in one part or two: a full part becomes the older one, and the one
    before it is forgotten. So nothing is ever indexed anew, and between a half and all of `most` outputs are there."""

    def __init__(self, most: int) -> None:
        """`most`: outputs of a key, at least 1."""
        self._most = most
        self._parts: OrderedDict[Key, list[Part]] = OrderedDict()  # the older part first; keys longest unused first
        self._next_number = 0
        self.num_tokens = 0  # of all texts

    def parts(self, key: Key) -> Sequence[Part]:
        return self._parts.get(key, ())

    def add(self, key: Key, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep the output of a request that has ended. `tokens`: all of it, prompt and output."""
        if len(tokens) - prompt_len < LEAST_OUTPUT:
            return
        start = max(0, prompt_len - CONTEXT, len(tokens) + 1 - MAX_TOKENS // 2)
        parts = self._parts.setdefault(key, [])
        self._parts.move_to_end(key)
        size = len(tokens) - start + 1
        is_full = parts and (
            parts[-1].num_outputs >= max(1, self._most // 2) or len(parts[-1].text) + size > MAX_TOKENS // 2
        )
        if is_full and (len(parts) == 2 or self._most == 1):
            self.num_tokens -= len(parts.pop(0).text)
        if is_full or not parts:
            parts.append(Part(self._next_number))
            self._next_number += 1
        parts[-1].add(tokens[start:])
        self.num_tokens += size
        while self.num_tokens > MAX_TOKENS_OF_ALL or len(self._parts) > MAX_KEYS:
            _, forgotten = self._parts.popitem(last=False)
            self.num_tokens -= sum(len(part.text) for part in forgotten)

    def index(self, keys: Iterable[Key], most: int = INDEXED_AT_ONCE) -> None:
        """Index what is not indexed yet of these keys' outputs, the younger parts first, as far as `most` tokens."""
        for key in keys:
            for part in reversed(self._parts.get(key, ())):
                if part.num_indexed < len(part.text):
                    most -= part.index(most)
            if not most:
                return

    def forget(self) -> None:
        self._parts.clear()
        self.num_tokens = 0

    def state(self) -> RecentState:
        keys = [
            (
                *key,
                [PartState(part.number, part.text.tolist(), part.num_outputs, part.num_indexed) for part in parts],
            )
            for key, parts in self._parts.items()
        ]
        return RecentState(self._next_number, keys)

    def restore(self, state: RecentState) -> None:
        self._next_number = state.next_number
        for owner, space, parts in state.keys:
            restored = self._parts[owner, space] = []
            for each in parts:
                part = Part(each.number)
                part.text, part.num_outputs = array("i", each.text), each.num_outputs
                part.index(each.num_indexed)
                restored.append(part)
                self.num_tokens += len(part.text)
