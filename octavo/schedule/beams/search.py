"""Beam search: which continuations of a prompt go on and which have ended, chosen from each beam's likeliest tokens.

The choice is that of transformers: of all beams' continuations the best 2 × width by the sum of their logprobs; those among the
first `width` that end compete for a place among the answers by sum / length ** length_penalty; of the others, `width` go on.
The length is that of the answer with the token that ends it; the prompt does not count."""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Literal, NamedTuple

from octavo.messages import Candidates, Logprobs, SamplingParams


class Path(NamedTuple):
    """An answer so far: its last token, and the path before it. Paths share their beginnings."""

    before: "Path | None"  # None: it begins after the prompt
    token: int
    total: float  # the sum of its logprobs
    length: int
    logprobs: Logprobs | None  # of the token, where asked for

    def tokens(self) -> list[int]:
        return [path.token for path in self._steps()]

    def all_logprobs(self) -> list[Logprobs]:
        return [path.logprobs for path in self._steps() if path.logprobs is not None]

    def _steps(self) -> "list[Path]":
        steps, path = [], self
        while path is not None:
            steps.append(path)
            path = path.before  # type: ignore[assignment]
        return steps[::-1]


class Ended(NamedTuple):
    """A finished answer and its score."""

    score: float
    path: Path
    is_stopped: bool  # by a stop token; False: by max_tokens


class Continuation(NamedTuple):
    parent: int  # which of the beams it continues
    path: Path


class _Step(NamedTuple):
    """One candidate for a beam's next token."""

    total: float
    parent: int
    place: int  # among the beam's candidates


class BeamSearch:
    def __init__(self, params: SamplingParams, stop_ids: Sequence[int], max_tokens: int) -> None:
        self.width = params.num_sequences
        self.beams: list[Path | None] = [None]  # the best first; [None]: the prompt alone
        self.ended: list[Ended] = []  # the best first, at most `width`
        self._params, self._stop_ids, self._max_tokens = params, frozenset(stop_ids), max_tokens
        num_stop_ids = len(self._stop_ids)
        self._num_kept = max(2, 1 + num_stop_ids) * self.width
        self.num_candidates = params.num_candidates(num_stop_ids)

    def advance(self, found: Sequence[Candidates]) -> list[Continuation]:
        """Choose from each beam's candidates. The continuations that go on become the beams; empty: the search is over."""
        assert len(found) == len(self.beams)
        length = self._length() + 1
        steps = self._best_steps(found, length)
        is_full = length >= self._max_tokens
        going_on: list[Continuation] = []
        for rank, step in enumerate(steps):
            path = self._path(step, found, length)
            is_stopped = path.token in self._stop_ids
            if is_stopped or is_full:
                if rank < self.width:
                    self._end(path, is_stopped)
            elif len(going_on) < self.width:
                going_on.append(Continuation(step.parent, path))
        if is_full or self._is_over(going_on, length):
            return []
        self.beams = [continuation.path for continuation in going_on]
        return going_on

    def _length(self) -> int:
        return self.beams[0].length if self.beams[0] is not None else 0

    def _best_steps(self, found: Sequence[Candidates], length: int) -> list[_Step]:
        """The best continuations of all beams, in falling order. Among equals, the better beam's come first."""
        banned = self._stop_ids if length <= self._params.min_tokens else frozenset()
        by_beam = [self._steps_of(parent, candidates, banned) for parent, candidates in enumerate(found)]
        return list(islice(merge(*by_beam, key=lambda step: -step.total), self._num_kept))

    def _steps_of(self, parent: int, candidates: Candidates, banned: frozenset[int]) -> Iterator[_Step]:
        """A generator: most beams' candidates are only read as far as the first few."""
        path = self.beams[parent]
        total = path.total if path is not None else 0.0
        for place, token in enumerate(candidates.token_ids):
            if token not in banned:
                yield _Step(total + candidates.logprobs[place], parent, place)

    def _path(self, step: _Step, found: Sequence[Candidates], length: int) -> Path:
        ids, values = found[step.parent].token_ids, found[step.parent].logprobs
        logprobs, count = None, self._params.logprobs
        if count is not None:
            at = step.place
            logprobs = Logprobs(at + 1, [ids[at], *ids[:count]], [values[at], *values[:count]])
        return Path(self.beams[step.parent], ids[step.place], step.total, length, logprobs)

    def _end(self, path: Path, is_stopped: bool) -> None:
        self.ended.append(Ended(path.total / path.length**self._params.length_penalty, path, is_stopped))
        self.ended.sort(key=lambda ended: -ended.score)  # stable: among equals the earlier stays
        del self.ended[self.width :]

    def _is_over(self, going_on: list[Continuation], length: int) -> bool:
        """Whether as many answers have ended as there are beams, and none that goes on can score better."""
        if len(self.ended) < self.width:
            return False
        early: bool | Literal["never"] = self._params.early_stopping
        if early is True:
            return True
        penalty = self._params.length_penalty
        # The best score that a beam may reach. With "never", no answer is final that a longer one could still beat.
        best_length = self._max_tokens if early == "never" and penalty > 0.0 else length
        return bool(going_on[0].path.total / best_length**penalty <= self.ended[-1].score)
