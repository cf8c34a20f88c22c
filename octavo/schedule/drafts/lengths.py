"""CostSpeculation: how many drafted tokens a step verifies, by what they cost and how likely they are (decision 048)."""

import heapq
from collections.abc import Sequence

from octavo.messages import Draft
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule.drafts.base import Drafter, Offer
from octavo.schedule.drafts.model import ModelDrafter
from octavo.schedule.drafts.ngram import NGramDrafter
from octavo.schedule.drafts.suffix import SuffixDrafter
from octavo.schedule.request import Request
from octavo.schedule.step_costs import StepCosts, StepShape

MARGIN = 1.1
"""A drafted token must bring so many times the tokens per second that the step has without it: chances and costs are estimates."""
LEAST_COST = 0.02
"""… and costs at least this share of a step's constant part, whatever was measured."""
SHARED_BY = 32
"""Steps that share what it costs a draft model to catch up with a row, if the row has as many left."""
DRAIN_EVERY = 16
"""Where drafts could pay, one step in so many is committed before the next is planned, so that the next may have drafts. If it has, it
is too."""


def speculation(settings: SpeculationSettings | None) -> "CostSpeculation | None":
    return None if settings is None else CostSpeculation(settings)


class CostSpeculation:
    def __init__(self, settings: SpeculationSettings) -> None:
        self.settings = settings

    def attach(self, request: Request) -> None:
        params = request.params
        if request.pooling is None and not params.use_beam_search and params.use_speculation:
            request.drafter = self._drafter(request.prompt_len, params.prediction_ids)

    def _drafter(self, prompt_len: int, prediction: Sequence[int]) -> Drafter:
        settings = self.settings
        if settings.model:
            return ModelDrafter()
        if settings.method == "suffix":
            return SuffixDrafter(prompt_len, prediction)
        return NGramDrafter(prompt_len, prediction, settings.prompt_lookup_min, settings.prompt_lookup_max)

    def choose(
        self, rows: Sequence[tuple[int, Request]], shape: StepShape, costs: StepCosts | None, room: int
    ) -> list[Draft]:
        if self.settings.is_adaptive and (costs is None or not self._could_pay(shape, costs)):
            return []
        offers: list[tuple[int, Request, Offer]] = []
        for at, request in rows:
            assert request.drafter is not None
            request.drafter.learn(request.tokens)
            num_tokens = len(request.tokens)
            most = min(room, self.settings.most, request.max_len - num_tokens - 1)
            if self.settings.max_len:
                most = min(most, max(0, self.settings.max_len - num_tokens))
            offer = request.drafter.drafts(most)
            if offer.tokens:
                offers.append((at, request, offer))
        if not offers:
            return []
        if self.settings.is_adaptive and costs is not None:
            lengths = (_depths if self.settings.model else _lengths)(offers, shape, costs, room)
        else:
            lengths = _as_many_as_can_be(offers, room)
        return [
            Draft(at, offer.tokens[:length]) for (at, _, offer), length in zip(offers, lengths, strict=True) if length
        ]

    def wants_drain(self, num_steps: int, shape: StepShape, costs: StepCosts | None) -> bool:
        if num_steps % DRAIN_EVERY:
            return False
        return not self.settings.is_adaptive or (costs is not None and self._could_pay(shape, costs))

    def _could_pay(self, shape: StepShape, costs: StepCosts) -> bool:
        """Whether a token that is certain to count would pay, at the average length of the rows. With a draft model: one for each row."""
        position = shape.context // max(shape.rows, 1)
        if not self.settings.model:
            return costs.seconds(shape) > MARGIN * shape.rows * _cost(costs, position)
        seconds = costs.seconds(shape)
        return costs.draft > 0 and seconds > MARGIN * (costs.draft * seconds + shape.rows * _cost(costs, position))


def _cost(costs: StepCosts, position: int) -> float:
    """Seconds of a drafted token: those of a row."""
    return max(costs.row + costs.context * position, LEAST_COST * costs.step)


def _lengths(offers: Sequence[tuple[int, Request, Offer]], shape: StepShape, costs: StepCosts, room: int) -> list[int]:
    """How much of each offer pays: tokens are added, the best for its cost first, while each brings more per second than the step has."""
    tokens, seconds = float(shape.rows), costs.seconds(shape)
    lengths = [0] * len(offers)
    # (−expected tokens per second, number of the offer, chance that it and all before it count, its cost)
    heap: list[tuple[float, int, float, float]] = []
    for number, (_, request, offer) in enumerate(offers):
        cost = _cost(costs, request.computed)
        heap.append((-offer.chances[0] / cost, number, offer.chances[0], cost))
    heapq.heapify(heap)
    while heap and room:
        worth, number, chance, cost = heap[0]
        if -worth <= MARGIN * tokens / seconds:
            break
        tokens, seconds, room = tokens + chance, seconds + cost, room - 1
        lengths[number] += 1
        _, request, offer = offers[number]
        at = lengths[number]
        if at == len(offer.tokens):
            heapq.heappop(heap)
            continue
        chance *= offer.chances[at]
        cost = _cost(costs, request.computed + at)
        heapq.heapreplace(heap, (-chance / cost, number, chance, cost))
    return lengths


def _depths(offers: Sequence[tuple[int, Request, Offer]], shape: StepShape, costs: StepCosts, room: int) -> list[int]:
    """How much a draft model should propose. It goes on pass by pass, each of which costs something for itself: a pass is added if all the
    rows that are worth it bring more per second, with its cost, than the step has."""
    tokens, seconds = float(shape.rows), costs.seconds(shape)
    lengths = [0] * len(offers)
    chances = [1.0] * len(offers)  # that all tokens so far count
    depth = 0
    going = list(range(len(offers)))
    while going and room:
        found: list[tuple[float, float, int]] = []  # (chance, cost, number of the offer)
        for number in going:
            _, request, offer = offers[number]
            if depth == len(offer.tokens):
                continue
            chance, position = chances[number] * offer.chances[depth], request.computed + depth
            cost = _cost(costs, position) + costs.draft * (costs.row + costs.context * position)
            if not depth:
                cost += _behind(request, costs)
            if chance > MARGIN * cost * tokens / seconds:
                found.append((chance, cost, number))
        found.sort(key=lambda each: -each[0] / each[1])
        del found[room:]
        gain, cost = sum(each[0] for each in found), costs.draft * costs.step + sum(each[1] for each in found)
        if gain <= MARGIN * cost * tokens / seconds:
            break
        tokens, seconds, room, depth = tokens + gain, seconds + cost, room - len(found), depth + 1
        for chance, _, number in found:
            lengths[number], chances[number] = depth, chance
        going = [number for _, _, number in found]
    return lengths


def _behind(request: Request, costs: StepCosts) -> float:
    """Seconds of what the draft model has not computed of a row, for each of the drafts that will share them. What came from the prefix
    cache the model has most likely computed, too."""
    assert isinstance(request.drafter, ModelDrafter)
    start = max(request.drafter.num_followed, request.num_cached, 0)
    count = request.computed - 1 - start  # before the row's own token, which every draft computes
    if count <= 1:
        return 0.0
    num_steps = max(1, min(SHARED_BY, request.max_len - len(request.tokens)))
    return costs.draft * costs.chunk_seconds(start, count) / num_steps


def _as_many_as_can_be(offers: Sequence[tuple[int, Request, Offer]], room: int) -> list[int]:
    lengths = []
    for _, _, offer in offers:
        lengths.append(min(len(offer.tokens), room))
        room -= lengths[-1]
    return lengths
