"""Speculation for the oracle: drafts by dice, from what the oracle will say, with mistakes."""

import random
from collections.abc import Sequence

from octavo.messages import FROM_GRAMMAR, FROM_MODEL, Draft
from octavo.schedule.drafts.base import Offer
from octavo.schedule.request import Request
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts, StepShape
from tests.schedule.oracle import VOCABULARY, reference


class Continuation:
    """Knows what follows a request's tokens."""

    def __init__(self, request: Request, windows: tuple[int, ...]) -> None:
        self._request, self._windows = request, windows
        self._all: list[int] = []
        self._num_learned = 0

    def learn(self, tokens: Sequence[int]) -> None:
        self._num_learned = len(tokens)
        if not self._all:
            request = self._request
            prompt = list(tokens[: request.prompt_len])
            # Behind a stop id, too: drafts may go on where the request ends.
            output = reference(prompt, request.seed, request.max_len - request.prompt_len, [], 0, self._windows)
            self._all = prompt + output

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        assert num_tokens == len(self._request.tokens) and 0 <= num_right <= num_drafted, (
            "other tokens than those that came"
        )

    def drafts(self, most: int) -> Offer:
        tokens = self._all[self._num_learned : self._num_learned + most]
        return Offer(tokens, [1.0] * len(tokens))


class DiceSpeculation:
    def __init__(self, dice: random.Random, windows: tuple[int, ...], is_model: bool = False) -> None:
        """`is_model`: the device proposes the tokens of most drafts. Of requests with a grammar it does so in any case."""
        self._dice, self._windows, self._is_model = dice, windows, is_model

    def attach(self, request: Request) -> None:
        if request.pooling is None and not request.params.use_beam_search and self._dice.random() < 0.8:
            request.drafter = Continuation(request, self._windows)

    def finished(self, request: Request) -> None:
        assert request.is_finished

    def forget(self) -> None:
        pass

    def choose(
        self,
        rows: Sequence[tuple[int, Request]],
        shape: StepShape,
        costs: StepCosts | None,
        room: int,
        limit: StallLimit | None = None,
    ) -> list[Draft]:
        found, dice = [], self._dice
        for at, request in rows:
            most = min(room, dice.randrange(6), request.max_len - len(request.tokens) - 1)
            if most <= 0 or request.drafter is None:
                continue
            request.drafter.learn(request.tokens)
            offer = request.drafter.drafts(most)
            tokens = [token if dice.random() < 0.7 else dice.randrange(VOCABULARY) for token in offer.tokens]
            if request.params.grammar and dice.random() < 0.4:
                tokens = [FROM_GRAMMAR] * len(tokens)
            elif self._is_model and dice.random() < 0.8:
                tokens = [FROM_MODEL] * len(tokens)
            if tokens:
                room -= len(tokens)
                found.append(Draft(at, tokens))
        return found

    def wants_drain(
        self, num_steps: int, requests: Sequence[Request], shape: StepShape, costs: StepCosts | None
    ) -> bool:
        return False
