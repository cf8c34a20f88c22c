"""BeamGroup: the requests that hold a beam search's paths, one row each, and how pages change hands when the beams change.

Only the leader computes the prompt. Its continuations share its pages, and so do later continuations of one beam; a beam that
writes to a shared page gets a copy. When beams change, a beam's first continuation stays in its parent's row, the others take the
rows of beams without a continuation: nothing is computed twice. A preempted group is computed again, from the prompt on."""

from collections.abc import Iterator

from octavo.cache import KVCache
from octavo.cache.span import pages_of_beams
from octavo.messages import Candidates, Finish, ForcedToken, GenerateRequest, StepPlan, TokenDelta
from octavo.schedule.beams.search import BeamSearch, Continuation
from octavo.schedule.request import Request


class BeamGroup:
    def __init__(self, source: GenerateRequest, requests: list[Request]) -> None:
        params = source.params
        assert params.max_tokens is not None, "resolved at admission"
        self.search = BeamSearch(params, source.stop_ids, params.max_tokens)
        self.requests = requests[:]  # in the order of their sequences, the leader first
        self.is_spread = False  # whether all hold pages; else the leader alone does, or none
        self._holders = requests[:1]  # the requests of the search's beams, in its order
        self._found: dict[int, Candidates] = {}  # by sequence: beams that were computed since the last choice
        self._has_chosen = False  # beams were chosen since the last plan was sent to the rows
        self._sent_tables: dict[int, list[list[int]]] = {}  # sequence → page tables as the rows know them
        for request in requests:
            request.special = self

    @property
    def leader(self) -> Request:
        return self.requests[0]

    @property
    def others(self) -> list[Request]:
        return self.requests[1:]

    def follow_leader(self) -> None:
        """All beams have the leader's place in the policy's order: they advance and leave together."""
        for request in self.others:
            request.num_siblings_ahead, request.place, request.gives_way = (
                self.leader.num_siblings_ahead,
                self.leader.place,
                self.leader.gives_way,
            )

    def take(self, request: Request, candidates: Candidates) -> bool:
        """Keep a beam's candidates. True: all beams have been computed."""
        self._found[request.sequence] = candidates
        return len(self._found) == len(self._holders)

    def advance(self, cache: KVCache) -> bool:
        """Choose the next beams, and give each its pages. False: the search is over."""
        going_on = self.search.advance([self._found[request.sequence] for request in self._holders])
        self._found = {}
        if going_on:
            self._reseat(going_on, cache)
        return bool(going_on)

    def spread(self, cache: KVCache) -> None:
        """The prompt was computed again: the others share it now, and each goes on from its own tokens."""
        for request in self.others:
            self._fork(self.leader, request, cache)
        self.is_spread = True

    def gather(self) -> None:
        """The group was preempted: the prompt is computed next."""
        self.is_spread = False
        self._has_chosen = False
        self._found, self._sent_tables = {}, {}

    def note_entered(self, request: Request, pages: list[list[int]]) -> None:
        """Its row entered with these pages."""
        self._sent_tables[request.sequence] = [list(table) for table in pages]

    def write_changes(self, cache: KVCache, draft: StepPlan) -> list[tuple[Request, list[list[int]]]]:
        """Write into the plan what the rows do not know yet: tokens that they did not sample, and pages. Returns the requests that
        must enter, with their page tables."""
        entering = []
        has_chosen, self._has_chosen = self._has_chosen, False
        for request in self.requests if self.is_spread else [self.leader]:
            if request.sequence not in self._sent_tables:
                pages = [table.padded() for table in cache.tables[request.sequence]]
                self.note_entered(request, pages)
                entering.append((request, pages))
                continue
            if has_chosen:
                draft.forced.append(ForcedToken(request.row, len(request.tokens) - 1, request.tokens[-1]))
            for kv_group, entry, page in self._changed_pages(request, cache):
                draft.page_rows.append(request.row)
                draft.page_entries.append(entry)
                draft.page_ids.append(page)
                if len(cache.windows) > 1:
                    draft.page_groups.append(kv_group)
        return entering

    def _changed_pages(self, request: Request, cache: KVCache) -> Iterator[tuple[int, int, int]]:
        """(KV group, entry, page) where a row's page tables differ from what was sent to it. They count as sent from now on."""
        # Full pages of the prompt stay what they are once they are shared.
        shared = request.prompt_len // cache.page_size if self.is_spread else 0
        for kv_group, (table, sent) in enumerate(
            zip(cache.tables[request.sequence], self._sent_tables[request.sequence], strict=True)
        ):
            for entry in range(max(table.first, shared), table.end):
                page = table.pages[entry - table.first]
                sent.extend([-1] * (entry + 1 - len(sent)))
                if sent[entry] != page:
                    sent[entry] = page
                    yield kv_group, entry, page

    def most_pages(self, cache: KVCache, max_step_tokens: int) -> int:
        """How many pages all beams may hold at once: they advance together or not at all."""
        leader = self.leader
        shape = (cache.page_size, cache.windows, max_step_tokens)
        return pages_of_beams(leader.prompt_len, leader.max_len, len(self.requests), *shape)

    def deltas(self, num: int) -> list[TokenDelta]:
        """The answers, the best first, all at once."""
        leader, found = self.leader, []
        for index, (_, path, is_stopped) in enumerate(self.search.ended[:num]):
            finish = Finish(
                "stop" if is_stopped else "length",
                path.token if is_stopped else None,
                leader.num_cached,
                leader.num_preemptions,
                cumulative_logprob=path.total,
            )
            of_prompt = tuple(leader.prompt_logprobs) if index == 0 else ()
            found.append(
                TokenDelta(
                    leader.id,
                    index,
                    path.tokens(),
                    finish,
                    logprobs=tuple(path.all_logprobs()),
                    prompt_logprobs=of_prompt,
                )
            )
        return found

    def _reseat(self, going_on: list[Continuation], cache: KVCache) -> None:
        parents = self._holders
        continued = {parents[continuation.parent].sequence for continuation in going_on}
        idle = [request for request in self.requests if request.sequence not in continued]
        staying: set[int] = set()
        holders = []
        for parent_at, _ in going_on:
            parent = parents[parent_at]
            if parent.sequence not in staying:
                staying.add(parent.sequence)
                holders.append(parent)
            else:
                request = idle.pop()
                if request.sequence in cache.tables:
                    cache.release(request.sequence)
                request.tokens = parent.tokens[:]
                self._fork(parent, request, cache)
                holders.append(request)
        for request, (_, path) in zip(
            holders, going_on, strict=True
        ):  # last: children copy their parent's tokens first
            request.tokens.append(path.token)
        self._holders, self.is_spread, self._has_chosen = holders, True, True

    def _fork(self, parent: Request, child: Request, cache: KVCache) -> None:
        cache.fork(parent.sequence, child.sequence, parent.computed)
        child.computed = parent.computed
        child.num_published = (
            child.computed // cache.page_size * cache.page_size
        )  # beams are not published: a later request hardly ever shares one
        child.num_cached = parent.num_cached
