"""A device made of dictionaries. Its KV cells remember their position and what their layer was given there, so a wrong
page table, a stale prefix hit, a lost copy, a reused row or a page freed too early changes what it samples, and the run no
longer matches the reference. It has one layer for each group of page tables, each seeing as far back as its window."""

import random
from collections.abc import Iterable

import msgspec

from octavo.messages import (
    FROM_GRAMMAR,
    FROM_MODEL,
    NO_INPUT,
    Candidates,
    Draft,
    DraftWork,
    SamplingParams,
    StepPlan,
    StepResult,
)
from octavo.schedule.beams.search import BeamSearch

VOCABULARY = 7
BEAM_VOCABULARY = 24


def attended(given: int, seen: Iterable[int]) -> int:
    """What a layer makes of a position: of what it was given there, and of what it sees."""
    return hash((given, *seen))


def chosen(state: int, seed: int) -> int:
    return hash((seed, state)) % VOCABULARY


def continuations(state: int, count: int) -> Candidates:
    """The likeliest, by dice of their own; so that searches end, too, those that may be stop ids are often among them."""
    logprobs = {
        token: -(hash((state, token)) % 997 + 1) / (400 if token in (5, 6) else 100) for token in range(BEAM_VOCABULARY)
    }
    best = sorted(logprobs, key=lambda token: -logprobs[token])[:count]
    return Candidates(best, [logprobs[token] for token in best])


def vector_of(start: int, state: int) -> bytes:
    """Of a prompt whose last step began at `start`."""
    return start.to_bytes(8) + state.to_bytes(8, signed=True)


class Sequence:
    """Tokens and what each layer was given for them, all at hand."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self._windows = windows
        self._given: list[list[int]] = [[] for _ in windows]  # by layer and position

    def state_after(self, token: int) -> int:
        state = token
        for given, window in zip(self._given, self._windows, strict=True):
            given.append(state)
            state = attended(state, given[-window:] if window else given)
        return state

    def copy(self) -> "Sequence":
        other = Sequence(self._windows)
        other._given = [given[:] for given in self._given]
        return other


def reference(
    prompt: list[int], seed: int, max_tokens: int, stop_ids: list[int], min_tokens: int, windows: tuple[int, ...] = (0,)
) -> list[int]:
    sequence = Sequence(windows)
    state = [sequence.state_after(token) for token in prompt][-1]
    tokens = [chosen(state, seed)]
    while len(tokens) < max_tokens and not (tokens[-1] in stop_ids and len(tokens) >= min_tokens):
        tokens.append(chosen(sequence.state_after(tokens[-1]), seed))
    return tokens


def beam_reference(
    prompt: list[int], params: SamplingParams, stop_ids: list[int], windows: tuple[int, ...] = (0,)
) -> list[tuple[list[int], bool]]:
    """(answer, whether a stop id ended it), the best first: every beam computed by itself, from a copy of what it continues."""
    search = BeamSearch(params, stop_ids, params.max_tokens)
    sequence = Sequence(windows)
    *_, state = [sequence.state_after(token) for token in prompt]
    known = {(): sequence}  # a beam's tokens → what is at hand behind them
    while True:
        found = []
        for path in search.beams:
            if path:
                *before, token = path.tokens()
                sequence = known[*before, token] = known[tuple(before)].copy()
                state = sequence.state_after(token)
            found.append(continuations(state, search.num_candidates))
        if not search.advance(found):
            return [(ended.path.tokens(), ended.is_stopped) for ended in search.ended[: params.n]]


class OracleDevice:
    def __init__(
        self,
        page_size: int,
        max_rows: int,
        windows: tuple[int, ...] = (0,),
        lateness: random.Random | None = None,
        num_stages: int = 1,
        dice: random.Random | None = None,
    ) -> None:
        """`lateness`: decides which masks are late; None: none is. `num_stages`: with several, what is sampled is not known to the first:
        a plan must bring it. `dice`: decides how good its own drafts are; None: it has no draft model."""
        self._dice = dice
        self._is_pipelined = num_stages > 1
        self.page_size, self.max_rows, self.windows = page_size, max_rows, windows
        self._lateness = lateness
        self.known: dict[int, int] = {}  # row with a grammar → its tokens that count
        self.num_late = self.num_void = 0
        # Page → by offset: (position, what the layer was given).
        self.cells: dict[int, list[tuple[int, int]]] = {}
        self.host: dict[int, list[tuple[int, int]]] = {}
        self.tokens: dict[int, dict[int, int]] = {}  # row → position → token
        self.seeds: dict[int, int] = {}
        self.pooled: set[int] = (
            set()
        )  # rows whose occupant wants a vector: here, its state behind where its last step began
        self.beams: dict[int, int] = {}  # rows of a beam search → continuations that it looks at
        self.tables: dict[int, list[list[int]]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.leaves:
            self.tokens.pop(row, None), self.tables.pop(row, None)
        for move in plan.moves:
            self._move(move.kind, move.source, move.target)
        for forced in plan.forced:
            self.tokens[forced.row] = {forced.position: forced.token}
        for enter in plan.enters:
            assert 0 <= enter.row < self.max_rows and enter.row not in self.tables, "row is occupied"
            assert len(enter.pages) == len(self.windows), "a page table for each group"
            self.tokens[enter.row] = dict(enumerate(enter.token_ids))
            self.tables[enter.row], self.seeds[enter.row] = [list(pages) for pages in enter.pages], enter.seed
            self.beams.pop(enter.row, None)
            self.known.pop(enter.row, None)
            if enter.params.grammar:
                self.known[enter.row] = len(enter.token_ids)
            if enter.params.use_beam_search:
                self.beams[enter.row] = enter.params.num_candidates(len(enter.stop_ids))
            self.pooled = self.pooled - {enter.row} | ({enter.row} if enter.pooling is not None else set())
        groups = plan.page_groups or [0] * len(plan.page_rows)
        for group, row, entry, page in zip(groups, plan.page_rows, plan.page_entries, plan.page_ids, strict=True):
            table = self.tables[row][group]
            assert entry <= len(table), "hole in the page table"
            table[entry : entry + 1] = [page]
        assert len(set(plan.rows)) == len(plan.rows), "row used twice"
        assert len(plan.inputs) == (len(plan.rows) if self._is_pipelined else 0), (
            "inputs for several stages, and only there"
        )
        for row, at, token in zip(plan.rows, plan.starts, plan.inputs, strict=False):
            if token != NO_INPUT:
                self.tokens[row][at] = token
        plan, drafted, work = self._propose(plan)
        spans = [(row, range(at, at + n)) for row, at, n in zip(plan.rows, plan.starts, plan.counts, strict=True)]
        assert all(len(span) for _, span in spans), "empty chunk"
        drafts = {draft.at: draft.tokens for draft in plan.drafts}
        for at, tokens in drafts.items():
            row, end = plan.rows[at], plan.starts[at] + plan.counts[at]
            assert (tokens or drafted) and plan.samples[at] and row not in self.pooled and row not in self.beams, (
                "drafts for nothing"
            )
            self.tokens[row].update(enumerate(tokens, end - len(tokens)))
        states = {(row, position): self.tokens[row][position] for row, span in spans for position in span}
        for layer in range(len(self.windows)):
            self._write(layer, states)
            for row, position in states:
                states[row, position] = self._attend(layer, row, position, states[row, position])
        sampled, vectors, candidates, late, runs = [], [], [], [], []
        for at, ((row, span), samples) in enumerate(zip(spans, plan.samples, strict=True)):
            if samples and row in self.pooled:
                vectors.append(vector_of(span[0], states[row, span[-1]]))
            elif samples and row in self.beams:
                candidates.append(continuations(states[row, span[-1]], self.beams[row]))
                sampled.append(-1)  # nobody reads it
                self.tokens[row][span[-1] + 1] = -1
            elif at in drafts:
                run, is_late = self._verify(row, span, drafts[at], states)
                sampled += run
                late += [len(sampled) - 1] if is_late else []
                runs.append(len(run))
            elif samples:
                sampled.append(chosen(states[row, span[-1]], self.seeds[row]))
                if self._is_late(row, span[-1] + 1):
                    late.append(len(sampled) - 1)
                    sampled[-1] += 1 + plan.step  # a token that the grammar does not allow
                if not self._is_pipelined:
                    self.tokens[row][span[-1] + 1] = sampled[-1]
        return StepResult(
            plan.step, sampled, vectors, candidates=candidates, late=late, runs=runs, drafted=drafted, draft_work=work
        )

    def _propose(self, plan: StepPlan) -> tuple[StepPlan, list[int], DraftWork | None]:
        """The plan with drafts that are right, wrong, right for a while, or not there, where it leaves them to a draft model or a grammar."""
        if all(draft.tokens[0] >= 0 for draft in plan.drafts):
            return plan, [], None
        assert self._dice is not None
        drafts, counts = [], plan.counts[:]
        for draft in plan.drafts:
            if draft.tokens[0] >= 0:
                drafts.append(draft)
                continue
            assert len({*draft.tokens}) == 1, "all from one source"
            if draft.tokens[0] == FROM_GRAMMAR:
                assert plan.rows[draft.at] in self.known and not draft.catch_up, "it has no grammar"
            else:
                assert draft.catch_up > 0, "it could never catch up"
            row, start, tokens = plan.rows[draft.at], plan.starts[draft.at], []
            for position in range(start, start + (len(draft.tokens) if self._dice.random() < 0.8 else 0)):
                states = {(row, position): self.tokens[row][position]}
                for layer in range(len(self.windows)):
                    self._write(layer, states)
                    states[row, position] = self._attend(layer, row, position, states[row, position])
                is_right = self._dice.random() < 0.8
                tokens.append(
                    chosen(states[row, position], self.seeds[row]) if is_right else self._dice.randrange(VOCABULARY)
                )
                self.tokens[row][position + 1] = tokens[-1]
            drafts.append(Draft(draft.at, tokens))
            counts[draft.at] += len(tokens) - len(draft.tokens)
        drafted = [len(draft.tokens) for draft in drafts]
        by_model = [
            len(done.tokens) for done, asked in zip(drafts, plan.drafts, strict=True) if asked.tokens[0] == FROM_MODEL
        ]
        work = DraftWork(max(by_model), sum(by_model), 0, 0, 1e-6 * max(by_model)) if by_model else None
        return msgspec.structs.replace(plan, counts=counts, drafts=drafts), drafted, work

    def _verify(
        self, row: int, span: range, draft: list[int], states: dict[tuple[int, int], int]
    ) -> tuple[list[int], bool]:
        """The run that counts, and whether it is of one token that does not. What lies behind it in the row's tokens is nonsense."""
        run: list[int] = []
        for position, following in zip(span[-1 - len(draft) :], [*draft, -1], strict=True):
            token = chosen(states[row, position], self.seeds[row])
            if self._is_late(row, position + 1):
                self.tokens[row][position + 1] = token + 1
                return (run, False) if run else ([token + 1], True)
            run.append(token)
            self.tokens[row][position + 1] = token
            if token != following:
                break
        for position in range(span[0] + len(run) + 1, span[-1] + 2):
            self.tokens[row][position] = -2
        return run, False

    def _is_late(self, row: int, length: int) -> bool:
        """Whether the row's mask after `length` tokens is late. It always is if the token before was."""
        if self._lateness is None or row not in self.known:
            return False
        assert length >= self.known[row], "samples a position again that it has sampled"
        is_void = length > self.known[row]
        is_late = is_void or self._lateness.random() < 0.3
        self.known[row] += not is_late
        self.num_late += is_late
        self.num_void += is_void
        return is_late

    def _write(self, layer: int, states: dict[tuple[int, int], int]) -> None:
        """All of a step's positions, before any is attended: rows may share what one of them writes."""
        written, page_size = set(), self.page_size
        for (row, position), state in states.items():
            page, offset = self.tables[row][layer][position // page_size], position % page_size
            assert (page, offset) not in written, "two rows write one cell"
            written.add((page, offset))
            if page not in self.cells:
                self.cells[page] = self._unwritten()
            self.cells[page][offset] = (position, state)

    def _attend(self, layer: int, row: int, position: int, state: int) -> int:
        window, page_size = self.windows[layer], self.page_size
        first = max(0, position - window + 1) if window else 0
        first_page, cells = first // page_size, []
        for page in self.tables[row][layer][first_page : position // page_size + 1]:
            cells += self.cells[page]
        start = first_page * page_size
        positions, seen = zip(*cells[first - start : position + 1 - start], strict=True)
        assert positions == tuple(range(first, position + 1)), "read a cell of another position"
        return attended(state, seen)

    def _unwritten(self) -> list[tuple[int, int]]:
        return [(-1, 0)] * self.page_size

    def _move(self, kind: str, source: int, target: int) -> None:
        if kind == "in":
            content = self.host[source]
        else:
            content = self.cells.get(source) or self._unwritten()
        (self.host if kind == "out" else self.cells)[target] = content[:]
