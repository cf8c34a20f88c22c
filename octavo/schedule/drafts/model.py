"""ModelDrafter: the place of a draft model in the scheduler. The worker's draft model proposes the tokens; what is kept here is how often
they were right, and how far the model has followed the request."""

from collections.abc import Sequence

from octavo.messages import FROM_MODEL
from octavo.schedule.drafts.base import Offer

_PRIOR = 0.7  # chance of a drafted token before anything is known, …
_PRIOR_WEIGHT = 4  # … as if so many tokens had been verified
_MEMORY = 32  # tokens, after which an old one counts for little
_FADE = 128  # tokens without a draft, after which what was known counts for a third: another try then tells

State = tuple[float, int, int, int]


class ModelDrafter:
    """It is on record what counted of a draft, so all of this can be made again."""

    __slots__ = ("_count", "_num_learned", "chance", "num_followed")

    def __init__(self, num_followed: int = 0) -> None:
        self.chance = _PRIOR
        self.num_followed = (
            num_followed  # tokens, from the first on, that the draft model has computed, as far as that is known
        )
        self._count = _PRIOR_WEIGHT
        self._num_learned = 0

    def learn(self, tokens: Sequence[int]) -> None:
        """Tokens that came without a draft say nothing of the next one: the chance goes back to what it was at first."""
        num_new = len(tokens) - self._num_learned
        if num_new > 0 and self._num_learned:
            self.chance = _PRIOR + (self.chance - _PRIOR) * (1 - 1 / _FADE) ** num_new
        self._num_learned = len(tokens)

    def drafts(self, most: int) -> Offer:
        return Offer([FROM_MODEL] * most, [self.chance] * most)

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        self._num_learned = num_tokens
        if not num_drafted:
            return
        self.num_followed = num_tokens - 1
        for place in range(min(num_drafted, num_right + 1)):
            self._count = min(self._count + 1, _MEMORY)
            self.chance += ((place < num_right) - self.chance) / self._count

    @property
    def state(self) -> State:
        return self.chance, self._count, self._num_learned, self.num_followed

    @state.setter
    def state(self, state: State) -> None:
        self.chance, self._count, self._num_learned, self.num_followed = state
