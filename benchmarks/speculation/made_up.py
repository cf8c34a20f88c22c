"""Acceptance by a made-up rule, for models with random weights, which copy nothing.

The weights of a model's layers are scaled down so far that its next token is the last one again, whatever kernels compute it: the numbers
are as random as before, so products take as long, but rounding decides nothing. A run without drafts tells what a request will say. Then
each of its tokens is drafted right with a given probability, decided once for each position, and otherwise wrong."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from octavo.messages import Draft, DraftWork, StepPlan
from octavo.messages.speculation import SpeculationSettings
from octavo.quants import Weight
from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.lengths import CostSpeculation
from octavo.schedule.drafts.luck import Luck
from octavo.schedule.drafts.ngram import NGramDrafter
from octavo.schedule.request import Request
from octavo.worker import weights
from octavo.worker.draft_model import DraftModel

QUIET = 2.0**-12  # factor of what the layers add to the embedding
_QUIET_NAMES = ("o_proj.weight", "down_proj.weight")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LEAST_VOCABULARY = 128  # tokens that wrong drafts are taken from: fewer than any model has
_LONG_MATCH = 16  # tokens: the class of lengths whose luck is noted


@contextmanager
def repeating() -> Iterator[None]:
    """Random weights of models that are loaded inside make them repeat the last token."""
    made = weights.dummy_tensors

    def quiet(shapes: Mapping[str, tuple[int, ...]], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Weight]]:
        for name, tensor in made(shapes, *args, **kwargs):
            assert isinstance(tensor, torch.Tensor), "packed weights are not scaled"
            if name == _HEAD:
                [(_, tensor)] = made({_EMBEDDING: shapes[_EMBEDDING]}, *args, **kwargs)
            elif name.endswith(_QUIET_NAMES):
                tensor *= QUIET
            elif name.endswith("norm.weight"):
                tensor += 1
            yield name, tensor

    weights.dummy_tensors = quiet  # type: ignore[assignment]
    try:
        yield
    finally:
        weights.dummy_tensors = made


class Rule:
    """Which positions of a request are drafted right."""

    def __init__(self, chance: float, seed: int, max_len: int) -> None:
        self._is_right = (np.random.default_rng(seed).random(max_len + 1) < chance).tolist()

    def is_right(self, position: int) -> bool:
        return bool(self._is_right[position])

    def drafted(self, token: int, position: int) -> int:
        """`token`: the one that comes at this position."""
        return token if self._is_right[position] else (token + 1) % _LEAST_VOCABULARY


@functools.cache
def rule(chance: float, seed: int, max_len: int) -> Rule:
    """Kept: making one for each of 256 requests takes a hundredth of the time in which their answers are made."""
    return Rule(chance, seed, max_len)


class ToldDrafter:
    """Does an n-gram drafter's work, and drafts by the rule. It learns what its drafts are worth as an n-gram drafter does: from every token,
    drafted or not."""

    def __init__(self, inner: NGramDrafter, known: Sequence[int] | None, rule: Rule) -> None:
        """`known`: the request's tokens, prompt and answer; None: it never has a draft, because the text that it is shown never repeats
        itself."""
        self._inner, self._known, self._rule = inner, known, rule
        self._luck = Luck()
        self._num_learned = 0
        self._shown: list[int] = []

    def learn(self, tokens: Sequence[int]) -> None:
        known = self._known
        if known is None:
            self._shown += range(len(self._shown), len(tokens))
            self._inner.learn(self._shown)
            return
        self._inner.learn(tokens)
        for position in range(self._num_learned, len(tokens)):
            self._luck.note(_LONG_MATCH, self._rule.is_right(position))
        self._num_learned = len(tokens)

    def drafts(self, most: int) -> Offer:
        offer, known, at = self._inner.drafts(most), self._known, self._num_learned
        if known is None:
            return offer
        tokens = [self._rule.drafted(token, at + i) for i, token in enumerate(known[at : at + most])]
        return Offer(tokens, [self._luck.chance(_LONG_MATCH)] * len(tokens))

    def verified(self, num_tokens: int, num_drafted: int, num_right: int) -> None:
        self._inner.verified(num_tokens, num_drafted, num_right)


class ToldSpeculation(CostSpeculation):
    """CostSpeculation whose requests draft by the rule."""

    def __init__(
        self, settings: SpeculationSettings, known: Callable[[Sequence[int]], Sequence[int] | None], chance: float
    ) -> None:
        """`known`: prompt → tokens of prompt and answer; None: such a request has nothing to draft."""
        super().__init__(settings)
        self._known, self._chance, self._num_attached = known, chance, 0

    def attach(self, request: Request) -> None:
        super().attach(request)
        if isinstance(request.drafter, NGramDrafter):
            self._num_attached += 1
            of_request = rule(self._chance, self._num_attached, request.max_len)
            request.drafter = ToldDrafter(request.drafter, self._known(request.tokens), of_request)


def often_wrong(draft: DraftModel, chance: float, max_len: int) -> Callable[[], None]:
    """Have a draft model's tokens be right with this chance only. It computes what it always does. → ends that."""
    propose, of_model = draft.propose, rule(chance, 0, max_len)

    def proposing(plan: StepPlan) -> tuple[StepPlan, DraftWork | None]:
        plan, work = propose(plan)
        drafts = [
            Draft(
                each.at,
                [of_model.drafted(token, plan.starts[each.at] + 1 + i) for i, token in enumerate(each.tokens)],
            )
            for each in plan.drafts
        ]
        return msgspec.structs.replace(plan, drafts=drafts), work

    draft.propose = proposing  # type: ignore[method-assign]

    def end() -> None:
        draft.propose = propose  # type: ignore[method-assign]

    return end
