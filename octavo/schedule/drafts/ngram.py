"""NGramDrafter: what stood behind the last few tokens the last time they came up, in the prediction, the prompt or the output."""

from collections.abc import Sequence
from itertools import count

from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.luck import Luck

MAX_TEXT = 16384  # tokens that are looked through, at least; twice as many at most, which take about 12 MB
END_OF_PREDICTION = -1  # between the prediction and the prompt; no token
_MAX_MATCH = 32  # longer matches count as this long


class NGramDrafter:
    """Follows the place it has found for as long as tokens come as they stood there, and looks for another when they do not. So a
    token costs a dictionary entry for each length that is looked for, and a lookup."""

    def __init__(self, prompt_len: int, prediction: Sequence[int] = (), least: int = 2, most: int = 4) -> None:
        """Looks for the last `most` tokens, then for the last `least`. `prediction`: what the output is expected to be."""
        assert 1 <= least <= most
        self._sizes = (most, least) if most > least else (least,)
        self._prompt_len = prompt_len
        self._prediction = prediction
        self._text: list[int] = []  # empty until it is asked: a request that waits holds nothing
        self._next = 0 if prediction else -1  # where the next token is expected to stand; −1: nowhere
        self._match = 0  # tokens before that place that are the same as the last ones
        self._indices: list[dict[tuple[int, ...], int]] = [
            {} for _ in self._sizes
        ]  # n-gram → place behind its last one
        self._num_learned = 0
        self._luck = Luck()

    def learn(self, tokens: Sequence[int]) -> None:
        if not self._num_learned:
            if self._prediction:
                self._text = [*self._prediction[:MAX_TEXT], END_OF_PREDICTION]
            self._text += tokens[max(0, self._prompt_len - MAX_TEXT) : self._prompt_len]
            self._num_learned = self._prompt_len
            self._index()
            if self._next < 0:
                self._look()
            self._note_end()
        for token in tokens[self._num_learned :]:
            self._add(token)
        self._num_learned = len(tokens)

    def drafts(self, most: int) -> Offer:
        tokens: list[int] = []
        chances: list[float] = []
        text, luck = self._text, self._luck
        if self._next >= 0:
            place, end = self._next, len(text)
            while len(tokens) < most:
                # Behind the end stands what is drafted here: a text that repeats itself goes on doing so.
                token = text[place] if place < end else tokens[place - end]
                if token == END_OF_PREDICTION:
                    break
                chances.append(luck.chance(self._match + len(tokens)))
                tokens.append(token)
                place += 1
        return Offer(tokens, chances)

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        """Nothing to note: every token tells what its match was worth, drafted or not."""

    def _add(self, token: int) -> None:
        text = self._text
        if self._next >= 0:
            is_hit = text[self._next] == token
            self._luck.note(self._match, is_hit)
            self._next, self._match = (self._next + 1, self._match + 1) if is_hit else (-1, 0)
        text.append(token)
        if len(text) >= 2 * MAX_TEXT:
            self._forget()
        if self._next < 0:
            self._look()
        self._note_end()

    def _look(self) -> None:
        """Find the last place with the same tokens before it as there are at the end. The end itself is not in the indices yet, or not
        as its own: a place at the end has nothing behind it."""
        text, end = self._text, len(self._text)
        for size, index in zip(self._sizes, self._indices, strict=True):
            place = index.get(tuple(text[-size:]))
            if place is not None and place < end:
                match = size
                while match < min(place, _MAX_MATCH) and text[place - match - 1] == text[end - match - 1]:
                    match += 1
                self._next, self._match = place, match
                return

    def _note_end(self) -> None:
        text, end = self._text, len(self._text)
        for size, index in zip(self._sizes, self._indices, strict=True):
            index[tuple(text[-size:])] = end

    def _index(self) -> None:
        """Note all n-grams but the last: its place would hide the one before it."""
        part = self._text[:-1]
        for size, index in zip(self._sizes, self._indices, strict=True):
            index.update(zip(zip(*(part[i:] for i in range(size)), strict=False), count(size)))

    def _forget(self) -> None:
        """Keep the younger half of the text."""
        del self._text[:-MAX_TEXT]
        self._next, self._match = -1, 0
        for index in self._indices:
            index.clear()
        self._index()
