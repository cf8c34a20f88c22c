"""A device made of dictionaries. Its KV cells remember their token and position, so a wrong page table, a stale
prefix hit, a lost copy or a reused row changes what it samples, and the run no longer matches the reference."""

from octavo.messages import StepPlan, StepResult

VOCABULARY = 7


def next_token(tokens: list[int], seed: int) -> int:
    return hash((1, seed, *tokens)) % VOCABULARY


def reference(prompt: list[int], seed: int, max_tokens: int, stop_ids: list[int], min_tokens: int) -> list[int]:
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_tokens:
        sequence.append(next_token(sequence, seed))
        if sequence[-1] in stop_ids and len(sequence) - len(prompt) >= min_tokens:
            break
    return sequence[len(prompt) :]


class OracleDevice:
    def __init__(self, page_size: int, max_rows: int) -> None:
        self.page_size, self.max_rows = page_size, max_rows
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) → (position, token)
        self.host: dict[int, dict[int, tuple[int, int]]] = {}
        self.tokens: dict[int, dict[int, int]] = {}  # row → position → token
        self.seeds: dict[int, int] = {}
        self.pooled: set[int] = set()  # rows whose occupant wants a vector: here, the tokens it was computed from
        self.tables: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.leaves:
            self.tokens.pop(row, None), self.tables.pop(row, None)
        for move in plan.moves:
            self._move(move.kind, move.source, move.target)
        for enter in plan.enters:
            assert 0 <= enter.row < self.max_rows and enter.row not in self.tables, "row is occupied"
            self.tokens[enter.row] = dict(enumerate(enter.token_ids))
            self.tables[enter.row], self.seeds[enter.row] = list(enter.pages), enter.seed
            self.pooled = self.pooled - {enter.row} | ({enter.row} if enter.pooling is not None else set())
        for row, slot, page in zip(plan.page_rows, plan.page_slots, plan.page_ids, strict=True):
            table = self.tables[row]
            assert slot <= len(table), "hole in the page table"
            table[slot : slot + 1] = [page]
        assert len(set(plan.rows)) == len(plan.rows), "row used twice"
        written: dict[tuple[int, int], int] = {}
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert count > 0, "empty chunk"
            for position in range(start, start + count):
                cell = self._cell(row, position)
                assert cell not in written, "two rows write one cell"
                written[cell] = row
                self.cells[cell] = (position, self.tokens[row][position])
        sampled, vectors = [], []
        for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            sequence = []
            for position in range(start + count):
                at, token = self.cells[self._cell(row, position)]
                assert at == position, "read a cell of another position"
                sequence.append(token)
            if samples and row in self.pooled:
                vectors.append(bytes([start, *sequence]))
            elif samples:
                sampled.append(next_token(sequence, self.seeds[row]))
                self.tokens[row][start + count] = sampled[-1]
        return StepResult(plan.step, sampled, vectors)

    def _cell(self, row: int, position: int) -> tuple[int, int]:
        return self.tables[row][position // self.page_size], position % self.page_size

    def _move(self, kind: str, source: int, target: int) -> None:
        if kind == "in":
            content = self.host[source]
        else:
            content = {o: self.cells[source, o] for o in range(self.page_size) if (source, o) in self.cells}
        if kind == "out":
            self.host[target] = content
        else:
            for offset in range(self.page_size):
                self.cells.pop((target, offset), None)
            self.cells.update({(target, offset): cell for offset, cell in content.items()})
