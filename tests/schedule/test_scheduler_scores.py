"""Logprobs of prompts: a step computes few of them, and they are sent as they come."""

import pytest

from octavo.cache import KVCache
from octavo.client.streams import joined
from octavo.messages import GenerateRequest, Logprobs, SamplingParams, StepPlan, StepResult, TokenDelta
from octavo.schedule import Scheduler
from octavo.schedule.request import SCORED_COST


def request(name: str, prompt_len: int, scored: bool = True, n: int = 1, **more: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=3, seed=0, n=n, prompt_logprobs=2 if scored else None, **more)  # type: ignore[arg-type]
    return GenerateRequest(name, list(range(prompt_len)), params, [])


class Run:
    """A scheduler and a worker that scores the position of every prompt token by its number."""

    def __init__(self, max_step_tokens: int, num_pages: int = 200) -> None:
        self.scheduler = Scheduler(KVCache(num_pages, 4), max_rows=4, max_step_tokens=max_step_tokens)
        self.plans: list[StepPlan] = []
        self.deltas: list[TokenDelta] = []

    def add(self, source: GenerateRequest) -> None:
        self.scheduler.add(source)

    def step(self) -> None:
        planned = self.scheduler.plan()
        plan = planned.plan
        scores = []
        for one, start, count in zip(planned.requests, plan.starts, plan.counts, strict=True):
            last = one.prompt_len - 1
            if one.params.prompt_logprobs is not None and start < last:
                scores.append([Logprobs(at + 1, [at], [-1.0]) for at in range(start, min(start + count, last))])
        self.plans.append(plan)
        result = StepResult(plan.step, [7] * sum(plan.samples), prompt_logprobs=scores)
        self.deltas += self.scheduler.commit(plan, result).deltas

    def to_the_end(self) -> None:
        while not self.scheduler.is_idle:
            self.step()

    def scores(self, name: str) -> list[Logprobs]:
        known: list[Logprobs] = []
        for delta in self.deltas:
            if delta.request_id == name:
                delta.add_scores_to(known)
        return known


@pytest.mark.parametrize("budget", [1, 4, 16, 64, 1000])
def test_a_scored_token_takes_more_of_a_step(budget: int) -> None:
    run = Run(budget)
    run.add(request("a", 100))
    run.to_the_end()
    most = max(1, budget // SCORED_COST)
    assert max(count for plan in run.plans for count in plan.counts) <= most
    assert [entry.rank for entry in run.scores("a")] == list(range(1, 100))
    sizes = [len(delta.prompt_logprobs) for delta in run.deltas if delta.prompt_logprobs]
    assert max(sizes) <= most and len(sizes) >= 99 // most, "sent step by step, not all with the first token"


def test_other_requests_are_planned_beside_it() -> None:
    budget = 20 * SCORED_COST
    run = Run(budget)
    run.add(request("a", 100))
    run.add(request("b", 30, scored=False))
    run.step()
    assert run.plans[0].counts == [20]  # as much as the whole step allows
    run.to_the_end()
    assert run.scores("b") == [] and len(run.scores("a")) == 99
    plain = Run(budget)
    plain.add(request("b", 100, scored=False))
    plain.step()
    assert plain.plans[0].counts == [budget]


@pytest.mark.parametrize("n", [1, 3])
def test_each_position_is_sent_once_whatever_happens(n: int) -> None:
    """With too few pages for all of them, the youngest is preempted and computed again."""
    run = Run(64, num_pages=40)
    names = "abcd"[: 4 if n == 1 else 1]
    for name in names:
        run.add(request(name, 37, n=n))
    run.to_the_end()
    for name in names:
        assert [entry.rank for entry in run.scores(name)] == list(range(1, 37))
        sent = [delta for delta in run.deltas if delta.request_id == name and delta.prompt_logprobs]
        starts = [delta.num_scored for delta in sent]
        assert starts == [sum(len(delta.prompt_logprobs) for delta in sent[:at]) for at in range(len(sent))]


def delta(start: int, *ranks: int, tokens: tuple[int, ...] = ()) -> TokenDelta:
    scores = tuple(Logprobs(rank, [rank], [-1.0]) for rank in ranks)
    return TokenDelta("a", 0, [*tokens], prompt_logprobs=scores, num_scored=start)


@pytest.mark.parametrize(
    ("deltas", "ranks"),
    [
        ([delta(0, 1, 2), delta(2, 3), delta(3, 4, tokens=(9,))], [1, 2, 3, 4]),
        ([delta(0, 1, 2), delta(2, 3), delta(0, 1), delta(1, 2, 3, 4, tokens=(9,))], [1, 2, 3, 4]),  # another engine
        ([delta(0, 1, 2), TokenDelta("a", 0, [9])], [1, 2]),
    ],
)
def test_joined_deltas_say_the_same(deltas: list[TokenDelta], ranks: list[int]) -> None:
    for cut in range(len(deltas) + 1):
        known: list[Logprobs] = []
        for one in [*joined(deltas[:cut]), *joined(deltas[cut:])]:
            one.add_scores_to(known)
        assert [entry.rank for entry in known] == ranks
