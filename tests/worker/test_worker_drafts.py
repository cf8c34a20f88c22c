"""Which samples of a step with drafts count."""

import random

import pytest

from octavo.messages import Draft, Logprobs, StepPlan
from octavo.worker.drafts import Drafted
from octavo.worker.step import Extras, LaunchedStep, StepResult, _verified


def plan(drafts: list[Draft], samples: list[bool]) -> StepPlan:
    counts = [1] * len(samples)
    for draft in drafts:
        counts[draft.at] += len(draft.tokens)
    rows = list(range(len(samples)))
    return StepPlan(0, [], [], [], rows, [9] * len(rows), counts, samples, [], [], [], drafts=drafts)


def test_places_among_the_samples():
    """Rows that do not sample, and those that are pooled, have none."""
    drafts = [Draft(1, [7]), Draft(4, [8, 9])]
    found = Drafted.of(plan(drafts, [True, True, False, True, True, True]), {3})
    assert found == Drafted([1, 3], [[7], [8, 9]])
    assert Drafted.of(plan([], [True]), {}) is None
    assert found.kept([1, 2], 7) == [0, 1, 3, 4, 6]


@pytest.mark.parametrize(
    ("samples", "apart", "run"),
    [
        ([5, 6, 7, 8], set(), 4),
        ([5, 6, 7, 1], set(), 4),
        ([5, 6, 1, 8], set(), 3),
        ([1, 6, 7, 8], set(), 1),
        ([5, 6, 7, 8], {0}, 1),
        ([5, 6, 7, 8], {1}, 1),
        ([5, 6, 7, 8], {3}, 3),
        ([5, 1, 7, 8], {3}, 2),
    ],
)
def test_a_run_ends_behind_the_first_wrong_token_and_before_what_is_apart(samples, apart, run):
    drafted = Drafted([0], [[5, 6, 7]])
    assert drafted.runs(samples, apart) == [run]


def test_a_result_has_what_counts_and_no_more():
    """Against a row-by-row reading, with every kind of index."""
    for seed in range(200):
        r = random.Random(seed)
        drafts, samples = [], [True] * r.randrange(1, 6)
        tokens, rows = [], []  # of every sample: its token, and its row
        for at in range(len(samples)):
            drafted = [r.randrange(2) for _ in range(r.choice([0, 0, 1, 3]))]
            drafts += [Draft(at, drafted)] if drafted else []
            tokens += [r.randrange(2) for _ in range(1 + len(drafted))]
            rows += [at] * (1 + len(drafted))
        late = sorted(r.sample(range(len(tokens)), min(len(tokens), r.choice([0, 0, 1]))))
        scored = [at for at, row in enumerate(rows) if row % 2]
        logprobs = [Logprobs(at, [tokens[at]], [0.0]) for at in scored]
        result = StepResult(0, tokens, logprobs=logprobs, late=late)
        drafted = Drafted.of(plan(drafts, samples), {})
        want, want_late, want_scored, runs = [], [], [], []
        at = 0
        by_row = {draft.at: draft.tokens for draft in drafts}
        for row in range(len(samples)):
            own = by_row.get(row, [])
            run = 0
            for place in range(1 + len(own)):
                if place and (at + place in late or at in late or tokens[at + place - 1] != own[place - 1]):
                    break
                if place and tokens[at : at + place] != own[:place]:
                    break
                want_late += [len(want)] if at + place in late else []
                want.append(tokens[at + place])
                want_scored += [at + place] if row % 2 else []
                run += 1
            runs += [run] if own else []
            at += 1 + len(own)
        if drafted is None:
            continue
        got = _verified(result, drafted, scored)
        assert (got.tokens, got.late, got.runs) == (want, want_late, runs), seed
        assert [entry.rank for entry in got.logprobs] == want_scored


def test_a_step_without_drafts_is_as_it_was():
    step = LaunchedStep(3, None, None, Extras())
    assert step.drafted is None and step.result() == StepResult(3, [])
