"""GrammarDrafter: drafts of a request whose answer has a grammar. Where its text says nothing of what comes next, the grammar may: of a JSON
schema the names of members, the punctuation and often much more can be written in one way only. The worker asks the grammar; what is
kept here is how often its drafts were right."""

from collections.abc import Sequence

from octavo.messages import FROM_GRAMMAR
from octavo.schedule.drafts.base import Drafter, Offer

_PRIOR = 0.8  # chance of a drafted token before anything is known, …
_PRIOR_WEIGHT = 4  # … as if so many tokens had been verified
_MEMORY = 64  # tokens, after which an old one counts for little
_LIKELY = 0.5  # a token that the text offers with this chance is drafted from the text
_PATIENCE = 16  # times in vain, after which the grammar is asked only after a pause of one token, then two, …
_LONGEST_PAUSE = 8  # tokens

_USUALLY_FORCED = 0.3  # share of the times asked at which the grammar forces something, before anything is known, …
_MEMORY_OF_TIMES = 32  # … and times after which an old one counts for little

State = tuple[float, int, float, int, int]


class GrammarDrafter:
    """It is on record what counted of a draft, so all of this can be made again."""

    __slots__ = ("_asks_at", "_count", "_num_in_vain", "chance", "share", "text")

    def __init__(self, text: Drafter) -> None:
        """`text`: what drafts from the request's text."""
        self.text = text
        self.chance = _PRIOR
        self.share = _USUALLY_FORCED  # of the times asked
        self._count = _PRIOR_WEIGHT
        self._num_in_vain = 0  # times in succession that the grammar left a choice
        self._asks_at = 0  # tokens of the request from which on the grammar is asked again

    def learn(self, tokens: Sequence[int]) -> None:
        self.text.learn(tokens)

    def drafts(self, most: int) -> Offer:
        return self.text.drafts(most)

    def forced(self, most: int, num_tokens: int, offer: Offer) -> Offer:
        """What to draft in place of `offer`, which drafts() gave: tokens that the grammar forces, if it does. Asking costs a moment, and a
        draft that the grammar leaves empty costs nothing else."""
        if most <= 0 or num_tokens < self._asks_at or (offer.chances and offer.chances[0] >= _LIKELY):
            return offer
        return Offer([FROM_GRAMMAR] * most, [self.chance] * most)

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        if source != FROM_GRAMMAR:
            self.text.verified(num_tokens, num_drafted, num_right, source)
            return
        self.share += ((num_drafted > 0) - self.share) / _MEMORY_OF_TIMES
        if not num_drafted:
            self._num_in_vain += 1
            self._asks_at = num_tokens + min(self._num_in_vain // _PATIENCE, _LONGEST_PAUSE)
            return
        self._num_in_vain, self._asks_at = 0, num_tokens
        for place in range(min(num_drafted, num_right + 1)):
            self._count = min(self._count + 1, _MEMORY)
            self.chance += ((place < num_right) - self.chance) / self._count

    @property
    def state(self) -> State:
        return self.chance, self._count, self.share, self._num_in_vain, self._asks_at

    @state.setter
    def state(self, state: State) -> None:
        self.chance, self._count, self.share, self._num_in_vain, self._asks_at = state
