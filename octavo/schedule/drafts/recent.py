"""RecentDrafter: as SuffixDrafter, and from recent outputs of the same API key."""

from collections.abc import Sequence

import msgspec

from octavo.schedule.drafts.base import Drafter, Offer
from octavo.schedule.drafts.grammar import GrammarDrafter
from octavo.schedule.drafts.luck import Luck, LuckState
from octavo.schedule.drafts.outputs import CONTEXT, SEPARATOR, Key, Part, RecentOutputs
from octavo.schedule.drafts.suffix import SuffixDrafter

_NONE = -1


class FollowerState(msgspec.Struct, array_like=True, gc=False):
    num_learned: int
    ends: list[tuple[int, int, int]]  # (number of the part, state of its automaton, length)
    part: int  # number; −1: no place is followed
    place: int
    match: int
    luck: LuckState


class _End:
    """How much of the end of a request's text stands in a part, and the automaton's state of that."""

    __slots__ = ("length", "part", "state")

    def __init__(self, part: Part, state: int = 0, length: int = 0) -> None:
        self.part, self.state, self.length = part, state, length

    def follow(self, token: int) -> None:
        self.state, self.length = self.part.automaton.follow(self.state, self.length, token)


class Follower:
    """Follows a request's text through the recent outputs of its key."""

    def __init__(self, outputs: RecentOutputs, key: Key, prompt_len: int) -> None:
        self.key = key
        self.match = 0  # tokens before the place that are the same as the request's last ones
        self._outputs = outputs
        self._num_learned, self._luck = prompt_len, Luck()
        self._ends: list[_End] = []  # one for each part of the key
        self._part: Part | None = None  # None: no place is followed
        self._place = _NONE  # where the next token is expected to stand

    def learn(self, tokens: Sequence[int]) -> None:
        parts = self._outputs.parts(self.key)
        if [end.part for end in self._ends] != [*parts]:
            self._settle(parts, tokens)
        if self._ends:
            for token in tokens[self._num_learned :]:
                self._add(token)
        self._num_learned = len(tokens)

    def drafts(self, most: int) -> Offer:
        if self._part is None:
            return Offer([], [])
        tokens = self._part.text[self._place : self._place + most].tolist()
        if SEPARATOR in tokens:
            del tokens[tokens.index(SEPARATOR) :]
        return Offer(tokens, [self._luck.chance(self.match + at) for at in range(len(tokens))])

    def keep(self, tokens: Sequence[int], prompt_len: int) -> None:
        """The request has ended with these tokens, prompt and output."""
        self._outputs.add(self.key, tokens, prompt_len)

    def _settle(self, parts: Sequence[Part], tokens: Sequence[int]) -> None:
        """Parts were forgotten, or have begun. What the request said last is looked for in new ones."""
        known = {end.part.number: end for end in self._ends}
        if self._part is not None and all(part is not self._part for part in parts):
            self._part, self._place, self.match = None, _NONE, 0
        self._ends = [known.get(part.number) or _End(part) for part in parts]
        for end in self._ends:
            if end.part.number not in known:
                for token in tokens[max(0, self._num_learned - CONTEXT) : self._num_learned]:
                    end.follow(token)
        if self._part is None:
            self._find()

    def _add(self, token: int) -> None:
        expected = SEPARATOR if self._part is None else self._part.text[self._place]
        if expected != SEPARATOR:
            self._luck.note(self.match, expected == token)
        longest = 0
        for end in self._ends:
            end.follow(token)
            longest = max(longest, end.length)
        if expected == token and longest <= self.match + 1:
            self._place, self.match = self._place + 1, self.match + 1  # another place is no better
        else:
            self._find()

    def _find(self) -> None:
        """The place with the longest match; of several, in the younger part."""
        self._part, self._place, self.match = None, _NONE, 0
        for end in self._ends:
            if end.length and end.length >= self.match:
                self._part, self._place, self.match = end.part, end.part.automaton.places[end.state], end.length

    def state(self) -> FollowerState:
        return FollowerState(
            self._num_learned,
            [(end.part.number, end.state, end.length) for end in self._ends],
            _NONE if self._part is None else self._part.number,
            self._place,
            self.match,
            self._luck.state,
        )

    def restore(self, state: FollowerState) -> None:
        """Parts that were forgotten since it last looked are not looked for again."""
        by_number = {part.number: part for part in self._outputs.parts(self.key)}
        self._num_learned, self._luck.state = state.num_learned, state.luck
        self._ends = [_End(by_number[number], at, length) for number, at, length in state.ends if number in by_number]
        self._part = by_number.get(state.part)
        if self._part is not None:
            self._place, self.match = state.place, state.match


class RecentDrafter:
    """Proposes what its own text or the recent outputs are more likely to be right with; if both are equally likely, the longer match."""

    def __init__(self, own: SuffixDrafter, follower: Follower) -> None:
        self._own, self.follower = own, follower

    def learn(self, tokens: Sequence[int]) -> None:
        self._own.learn(tokens)
        self.follower.learn(tokens)

    def drafts(self, most: int) -> Offer:
        recent = self.follower.drafts(most)
        own = self._own.drafts(most)
        if not (recent.tokens and own.tokens):
            return own if own.tokens else recent
        of_recent, of_own = (recent.chances[0], self.follower.match), (own.chances[0], self._own.match)
        return recent if of_recent > of_own else own

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        """Nothing to note: every token tells what both matches were worth."""


def recent_of(drafter: Drafter | None) -> RecentDrafter | None:
    """The one that drafts from recent outputs, also behind what a grammar drafts. None: there is none."""
    text = drafter.text if isinstance(drafter, GrammarDrafter) else drafter
    return text if isinstance(text, RecentDrafter) else None
