"""SuffixDrafter: what stood behind the longest end of the text that had come up before. A suffix automaton of the prediction, the
prompt and the output, built token by token."""

from array import array
from collections.abc import Sequence

from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.luck import Luck

MAX_TEXT = 8192  # tokens that are looked through, at least; twice as many at most
_NONE = -1
_MANY = -2  # in place of the token of a state's only transition: it has several


class Automaton:
    """The suffix automaton of a text: its states are the classes of substrings that end at the same places. The state of the whole text
    has a link to the state of its longest end that stands elsewhere, too; `place` of a state is behind the place where its substrings
    ended last, as far as that was noticed.

    Most states have one transition: it is in two arrays, and only states with several have a dictionary. A text of n tokens has at most
    2 n states."""

    def __init__(self) -> None:
        self._links, self._lens, self.places = array("i", [_NONE]), array("i", [0]), array("i", [0])
        self._tokens, self._targets = array("i", [_NONE]), array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = 0
        self._size = 0

    def add(self, token: int) -> None:
        self._size += 1
        current = self._state(self._lens[self._last] + 1, _NONE, _NONE, self._size)
        before = self._last
        while before != _NONE and (target := self._step(before, token)) == _NONE:
            self._connect(before, token, current)
            before = self._links[before]
        if before == _NONE:
            self._links[current] = 0
        elif self._lens[before] + 1 == self._lens[target]:
            self._links[current] = target
        else:
            self._links[current] = self._split(before, token, target)
        self._last = current

    def longest(self) -> tuple[int, int]:
        """(length of the longest end of the text that stands elsewhere, the place behind it there). Notes that it also ends here."""
        state = self._links[self._last]
        if state <= 0:
            return 0, _NONE
        place, self.places[state] = self.places[state], self._size
        return self._lens[state], place

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Of another text, whose last `length` tokens are in `state`: the same when `token` has come, as long as it stands here. The text
        may have grown since."""
        links, lens = self._links, self._lens
        while state and length <= lens[links[state]]:  # split since
            state = links[state]
        while (target := self._step(state, token)) == _NONE:
            state = links[state]
            if state == _NONE:
                return 0, 0
            length = lens[state]
        return target, length + 1

    def _split(self, before: int, token: int, target: int) -> int:
        """The target holds longer substrings than the one that was met: those no longer than that get a state of their own."""
        clone = self._state(self._lens[before] + 1, self._tokens[target], self._targets[target], self.places[target])
        if target in self._more:
            self._more[clone] = self._more[target].copy()
        self._links[clone] = self._links[target]
        self._links[target] = clone
        while before != _NONE and self._step(before, token) == target:
            self._connect(before, token, clone)
            before = self._links[before]
        return clone

    def _state(self, length: int, token: int, target: int, place: int) -> int:
        self._links.append(_NONE)
        self._lens.append(length)
        self._tokens.append(token)
        self._targets.append(target)
        self.places.append(place)
        return len(self._lens) - 1

    def _step(self, state: int, token: int) -> int:
        only = self._tokens[state]
        if only == token:
            return self._targets[state]
        return self._more[state].get(token, _NONE) if only == _MANY else _NONE

    def _connect(self, state: int, token: int, target: int) -> None:
        only = self._tokens[state]
        if only in (_NONE, token):
            self._tokens[state], self._targets[state] = token, target
            return
        if only != _MANY:
            self._more[state] = {only: self._targets[state]}
            self._tokens[state] = _MANY
        self._more[state][token] = target


class SuffixDrafter:
    """As NGramDrafter, with the longest match in place of one of a few tokens."""

    def __init__(self, prompt_len: int, prediction: Sequence[int] = ()) -> None:
        self._prompt_len = prompt_len
        self._luck = Luck()
        self._text: list[int] = []
        self._automaton = Automaton()
        self._num_learned = 0
        self._prediction = prediction  # read when it is asked: a request that waits holds nothing
        self.match, self._next = 0, 0 if prediction else _NONE

    def learn(self, tokens: Sequence[int]) -> None:
        if not self._num_learned:
            if self._prediction:
                self._read([*self._prediction[:MAX_TEXT], _SEPARATOR])
            self._read(tokens[max(0, self._prompt_len - MAX_TEXT) : self._prompt_len])
            self._num_learned = self._prompt_len
            if self._next < 0:
                self.match, self._next = self._automaton.longest()
        for token in tokens[self._num_learned :]:
            self._add(token)
        self._num_learned = len(tokens)

    def drafts(self, most: int) -> Offer:
        tokens: list[int] = []
        chances: list[float] = []
        if self._next >= 0:
            place, end = self._next, len(self._text)
            while len(tokens) < most:
                token = self._text[place] if place < end else tokens[place - end]
                if token == _SEPARATOR:
                    break
                chances.append(self._luck.chance(self.match + len(tokens)))
                tokens.append(token)
                place += 1
        return Offer(tokens, chances)

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        """Nothing to note: every token tells what its match was worth, drafted or not."""

    def _add(self, token: int) -> None:
        following, is_first = self._next, not self.match
        if following >= 0:
            is_hit = self._text[following] == token
            self._luck.note(self.match, is_hit)
        self._text.append(token)
        self._automaton.add(token)
        if len(self._text) >= 2 * MAX_TEXT:
            self._forget()
        match, place = self._automaton.longest()
        if following >= 0 and is_hit and (is_first or match <= self.match + 1):
            self.match, self._next = self.match + 1, following + 1  # the same place goes on; another is no better
        else:
            self.match, self._next = match, place

    def _read(self, tokens: Sequence[int]) -> None:
        self._text += tokens
        for token in tokens:
            self._automaton.add(token)

    def _forget(self) -> None:
        """Keep the younger half of the text."""
        kept, self._text, self._automaton = self._text[-MAX_TEXT:], [], Automaton()
        self._read(kept)


_SEPARATOR = -3  # between the prediction and the prompt; no token, nor one of the numbers above
