"""Faults planted in the scheduler, the cache and the pool, one at a time: the random workloads must catch every one.
`python -m tests.schedule.test_planted_faults` prints how fast."""

import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import octavo.cache.eviction
import octavo.cache.kv_cache
import octavo.cache.pool
import octavo.cache.span
import octavo.schedule.beams.group
import octavo.schedule.drafts.lengths
import octavo.schedule.drafts.outputs
import octavo.schedule.drafts.recent
import octavo.schedule.drafts.suffix
import octavo.schedule.policy
import octavo.schedule.request
import octavo.schedule.rows
import octavo.schedule.scheduler
import octavo.schedule.stall_limit
from tests.schedule.workload import Workload

SCHEDULER, CACHE, POOL = octavo.schedule.scheduler, octavo.cache.kv_cache, octavo.cache.pool
EVICTION = octavo.cache.eviction
SPAN, REQUEST, ROWS = octavo.cache.span, octavo.schedule.request, octavo.schedule.rows
BEAMS, POLICY, STALLS = octavo.schedule.beams.group, octavo.schedule.policy, octavo.schedule.stall_limit
SUFFIX, OUTPUTS = octavo.schedule.drafts.suffix, octavo.schedule.drafts.outputs
RECENT, LENGTHS = octavo.schedule.drafts.recent, octavo.schedule.drafts.lengths
# A module comes after those it imports.
MODULES = (
    EVICTION, POOL, SPAN, CACHE, REQUEST, BEAMS, POLICY, ROWS, STALLS, SUFFIX, OUTPUTS, RECENT, LENGTHS, SCHEDULER,
)  # fmt: skip

FAULTS: dict[str, tuple[types.ModuleType, str, str]] = {
    "a choice skips the prompt's last token": (
        SCHEDULER,
        "follower.computed = follower.capacity = leader.prompt_len - 1",
        "follower.computed = follower.capacity = leader.prompt_len",
    ),
    "a choice starts before its prompt is computed": (
        SCHEDULER,
        "if request.followers and end >= request.prompt_len:",
        "if request.followers:",
    ),
    "no copy on write": (
        CACHE,
        "first < len(own) and self._is_shared(own[first])",
        "False",
    ),
    "no copy on write where there are groups": (
        CACHE,
        "first < table.end and self._is_shared(table.pages[first - table.first])",
        "False",
    ),
    "the whole prompt may be found in the cache": (
        CACHE,
        "(len(tokens) - 1) // self.page_size",
        "len(tokens) // self.page_size",
    ),
    "page keys do not depend on what came before": (CACHE, "page_key(parent, content)", "page_key(b'', content)"),
    "pages have the keys of the prompt before": (
        CACHE,
        "content[: middle * step] == last.content[: middle * step]",
        "True",
    ),
    "matched pages that are idle count as free": (
        CACHE,
        "sum(fresh) + idle - self.pool.num_free",
        "sum(fresh) - self.pool.num_free",
    ),
    "swap brings pages back in the wrong order": (
        CACHE,
        "return Transfer(device_pages, host_pages, [table",
        "return Transfer(device_pages, host_pages[::-1], [table",
    ),
    "host pages are not returned": (CACHE, "self.host_free += host_pages\n", "\n"),
    "an evicted page can still be found": (POOL, "del self.index[key]", "pass"),
    "a page is given back twice as free": (
        POOL,
        "if self.refs[page] == 0:\n                key",
        "if self.refs[page] <= 1:\n                key",
    ),
    "an idle page that has an owner again can be evicted": (
        EVICTION,
        "        self._take_out(page)\n        self.count -= 1",
        "        self.count -= 1",
    ),
    "an idle page is in no list": (EVICTION, "        self._lists[where][page] = None\n", ""),
    "a step of a former life publishes pages": (
        SCHEDULER,
        "if epoch == request.epoch and start + count",
        "if start + count",
    ),
    "a token in flight is fed back too early": (
        SCHEDULER,
        "samples = end == len(request.tokens) + request.pending",
        "samples = end == len(request.tokens)",
    ),
    "rows are not returned": (ROWS, "self.free.append(request.row)", "pass"),
    "the oldest request is thrown out": (
        SCHEDULER,
        "victim = self.rows.running[-1]",
        "victim = self.rows.running[0]",
    ),
    "an aborted request keeps its pages": (
        SCHEDULER,
        "if request.is_swapped or request.sequence in self.cache.tables:",
        "if request.sequence in self.cache.tables:",
    ),
    "somebody enters in the step of a preemption": (
        SCHEDULER,
        "if planned.head is None and planned.returned:",
        "if False:",
    ),
    "a primary waits for those that should give way": (
        SCHEDULER,
        "if not request.is_primary or not running or running[-1].order < request.order:",
        "if True:",
    ),
    "the oldest gives way first": (SCHEDULER, "victim = younger.pop()", "victim = younger.pop(0)"),
    "older ones give way too": (
        SCHEDULER,
        "if request.gives_way and request.order > primary.order]",
        "if request.gives_way]",
    ),
    "a choice takes a row before an older request": (
        SCHEDULER,
        "if not self.rows.free or (head is not None and head.order < follower.order):",
        "if not self.rows.free:",
    ),
    "a new primary goes before those that waited": (
        SCHEDULER,
        "self.rows.promote(sequence, self._next_sequence)",
        "self.rows.promote(sequence, sequence.sequence)",
    ),
    "all sequences of a response are primary": (
        POLICY,
        "request.num_siblings_ahead = len(sequences)",
        "request.num_siblings_ahead = 0",
    ),
    "none is primary after the first": (POLICY, "if request.is_primary else None", "if False else None"),
    "the youngest becomes primary next": (
        POLICY,
        "next(iter(sequences.values()))",
        "next(reversed(sequences.values()))",
    ),
    "a response never ends": (POLICY, "del self._open[request.response_id]", "pass"),
    "what must be computed whole is cut": (SCHEDULER, "request.length if request.needs_one_step else 1", "1"),
    "what must be computed whole begins in the cache": (
        SCHEDULER,
        "                reuse=request.may_reuse,",
        "                reuse=True,",
    ),
    "a window lets go of a page that is still seen": (
        SPAN,
        "max(0, position - window + 1) // page_size if window",
        "max(0, position - window + 1 + page_size) // page_size if window",
    ),
    "a window's pages are let go a step ahead": (
        CACHE,
        "self._behind(group, table, start)",
        "self._behind(group, table, end)",
    ),
    "a prefix is found whatever the windows lack": (CACHE, "and keys[at] + tag not in index for", "and False for"),
    "the last window of a prefix counts as all of it": (
        CACHE,
        "            if not window:\n",
        "            if False:\n",
    ),
    "pages of one group serve another": (CACHE, 'bytes([group]) if group else b""', 'b""'),
    "what a window lets go of is not counted": (
        CACHE,
        "+ sum(self.pool.refs[page] == 1 for pages in behind for page in pages)",
        "+ sum(map(len, behind))",
    ),
    "min_tokens is ignored": (
        REQUEST,
        "if token in self.stop_ids and len(self.tokens) >= self.min_len:",
        "if token in self.stop_ids:",
    ),
    "a beam goes on with the token before": (BEAMS, "request.tokens[-1]))", "request.tokens[-2]))"),
    "a beam without continuations keeps its pages": (BEAMS, "cache.release(request.sequence)", "pass"),
    "a beam shares a token too few": (
        BEAMS,
        "cache.fork(parent.sequence, child.sequence, parent.computed)",
        "cache.fork(parent.sequence, child.sequence, parent.computed - 1)",
    ),
    "a beam's other pages are not sent to its rows": (BEAMS, "if sent[entry] != page:", "if sent[entry] < 0:"),
    "rows get the wrong pages of a prompt": (BEAMS, " if self.is_spread else 0", ""),
    "a search that was thrown out remembers the tables it sent": (
        BEAMS,
        "self._found, self._sent_tables = {}, {}",
        "self._found = {}",
    ),
    "a search goes on while its scores are on their way": (
        SCHEDULER,
        "request.pending = 0  # the search",
        "pass  # the search",
    ),
    "scores of a former life count": (
        SCHEDULER,
        "if candidates is None or not is_current or",
        "if candidates is None or",
    ),
    "beams are in a plan that throws them out": (
        SCHEDULER,
        "if growths is None:\n                return budget",
        "growths = growths or []",
    ),
    "a search that is thrown out keeps its pages": (
        SCHEDULER,
        "self.cache.release(request.sequence)\n            request.computed = request",
        "pass\n            request.computed = request",
    ),
    "a late token counts": (SCHEDULER, "late = {sampling[at].sequence for at in result.late}", "pass"),
    "a late row writes to a page that others read": (
        SCHEDULER,
        "request.computed, request.capacity = last, 0",
        "request.computed = last",
    ),
    "a late row goes on behind a token that does not count": (
        SCHEDULER,
        "request.computed, request.capacity = last, 0",
        "request.capacity = 0",
    ),
    "a late row reads a page that a window has passed": (
        CACHE,
        "return not self._has_windows or all(",
        "return True or all(",
    ),
    "a late row that was swapped out goes on behind its token": (
        SCHEDULER,
        "elif request.is_swapped and request.computed > last:",
        "elif False:",
    ),
    "the oldest prompt may get nothing": (STALLS, "if is_new or not self._has_begun:", "if is_new:"),
    "the time that prompts take is not counted": (
        STALLS,
        "self._seconds -= self._costs.chunk_seconds(request.computed, cost)",
        "pass",
    ),
    "steps without streams have a limit": (SCHEDULER, "            if not num_streams:\n", "            if False:\n"),
    "rows of streams take no time": (
        SCHEDULER,
        "costs.seconds(StepShape(num_rows, 0, context, 0))",
        "costs.seconds(StepShape(0, 0, 0, 0))",
    ),
    "streams that were planned already do not count": (
        SCHEDULER,
        "if is_planned or (length - request.computed == 1 and length < request.max_len):",
        "if not is_planned and length - request.computed == 1 and length < request.max_len:",
    ),
    "what must be computed whole is cut to the limit": (STALLS, "UNBOUNDED if request.needs_one_step else max", "max"),
    "before costs are known there is no limit": (SCHEDULER, "tokens // UNKNOWN_PART", "tokens"),
    "a rejected draft counts as computed": (
        SCHEDULER,
        "request.computed = len(request.tokens) - 1  # the last one was sampled, not computed",
        "pass",
    ),
    "pages of rejected drafts are kept": (
        SCHEDULER,
        "self.cache.shrink(request.sequence, len(request.tokens))\n                request.capacity",
        "request.capacity",
    ),
    "a page with a token that was not computed is published": (
        SCHEDULER,
        "self._publish(request, request.computed)",
        "self._publish(request, len(request.tokens))",
    ),
    "a page with rejected tokens is published": (
        SCHEDULER,
        "            request.drafted = len(tokens)\n",
        "            request.drafted = len(tokens)\n"
        "            self.cache.publish(request.sequence, request.tokens + tokens, start + len(tokens))\n",
    ),
    "a draft in flight is swapped out as computed": (SCHEDULER, "request.computed -= request.drafted", "pass"),
    "a run goes on behind its end": (
        SCHEDULER,
        "            if finish is not None:\n                break\n",
        "",
    ),
    "a row goes on while its draft is in flight": (
        SCHEDULER,
        "length >= request.max_len or count <= 0",
        "length >= request.max_len or count == 0",
    ),
    "a page that counts is given back with a draft": (
        CACHE,
        "at = max(needed - table.first, 0)",
        "at = max(needed - 1 - table.first, 0)",
    ),
    "drafts exceed the step": (
        SCHEDULER,
        "room = min(self.max_step_tokens, most_samples(self.max_rows)) - num_rows",
        "room = most_samples(self.max_rows)",
    ),
    "a draft is planned where there are no pages for it": (
        SCHEDULER,
        "tokens = tokens[: request.capacity - start]",
        "pass",
    ),
    "a page that others read is written by a draft": (
        SCHEDULER,
        "self.cache.extend(request.sequence, start - 1, start + len(tokens))",
        "self.cache.extend(request.sequence, start + self.cache.page_size, start + len(tokens))",
    ),
    "pages of a draft that was not proposed are kept": (
        SCHEDULER,
        "len(run) <= num_planned",
        "len(run) <= num_drafted",
    ),
    "a draft that was not proposed counts as drafted": (
        SCHEDULER,
        "num_drafted = next(arrived.drafted, num_planned)",
        "num_drafted = next(arrived.drafted, num_planned) and num_planned - 1",
    ),
    "a draft model may not catch up": (SCHEDULER, "return max(MIN_PROMPT_TOKENS, total // num_drafts)", "return 0"),
    "recent outputs are shared by all keys": (
        LENGTHS,
        "key = (request.owner, request.params.prefix_space)",
        'key = (b"", request.params.prefix_space)',
    ),
    "recent outputs are shared whatever the salt": (
        LENGTHS,
        "key = (request.owner, request.params.prefix_space)",
        'key = (request.owner, "")',
    ),
    "an output is kept that its request did not want to be used": (
        LENGTHS,
        "and not params.use_beam_search and params.use_speculation:",
        "and not params.use_beam_search:",
    ),
    "outputs are never forgotten": (OUTPUTS, "if is_full and (len(parts) == 2 or self._most == 1):", "if False:"),
    "forgotten outputs still count": (OUTPUTS, "self.num_tokens -= len(parts.pop(0).text)", "parts.pop(0)"),
    "outputs are forgotten too early": (
        OUTPUTS,
        "parts[-1].num_outputs >= max(1, self._most // 2)",
        "parts[-1].num_outputs >= 1",
    ),
    "nothing is between two outputs": (OUTPUTS, "        self.text.append(SEPARATOR)\n", ""),
    "outputs of aborted requests are not kept": (
        LENGTHS,
        "        if recent is not None:\n",
        "        if recent is not None and request.finish_after(request.tokens[-1]):\n",
    ),
    "a match is longer than what stands there": (SUFFIX, "            length = lens[state]\n", ""),
    "a place that was wrong is followed on": (
        RECENT,
        "if expected == token and longest <= self.match + 1:",
        "if longest <= self.match + 1:",
    ),
    "the policy does not say who leaves": (ROWS, 'attrgetter("order")', 'attrgetter("sequence")'),
    "an eviction is not told": (
        POOL,
        "            self.changes.evict(key)\n        return page",
        "            pass\n        return page",
    ),
    "a page is told as stored and evicted at once": (
        POOL,
        "            del self._evicted[key]\n        else:\n            self._stored[key] = None",
        "            pass\n        self._stored[key] = None",
    ),
    "pages that a commit stores are told to none": (
        SCHEDULER,
        "committed.pages = self.cache.take_changes()",
        "self.cache.take_changes()",
    ),
}


def plant(fault: str | None) -> Callable[[int], Workload]:
    """A workload factory over copies of the modules, one of them with the fault in it. None: without any."""
    faulty, right, wrong = FAULTS[fault] if fault is not None else (None, "", "")
    copies = {}
    try:
        for module in MODULES:
            source = Path(module.__file__).read_text()
            if module is faulty:
                assert source.count(right) == 1, f"the line to spoil is gone or no longer unique: {right!r}"
                source = source.replace(right, wrong)
            copies[module] = sys.modules[module.__name__] = types.ModuleType(module.__name__)
            exec(compile(source, module.__file__, "exec"), copies[module].__dict__)
    finally:
        sys.modules.update({module.__name__: module for module in MODULES})
    # Every second one with windows, every second pair with beam searches, three of five with masks that are late, two of three
    # with responses of many sequences, three of seven with a limit beside streams, six of eleven with drafts.
    # Of these, every second one from recent outputs.
    types_ = (copies[SCHEDULER].Scheduler, copies[CACHE].KVCache, copies[LENGTHS].CostSpeculation)
    return lambda seed: Workload(
        seed,
        *types_,
        has_windows=seed % 2 == 1,
        has_beams=seed % 4 > 1,
        has_grammars=seed % 5 > 1,
        has_late=seed % 5 > 1,
        has_responses=seed % 3 > 0,
        has_limit=seed % 7 > 3,
        has_drafts=seed % 11 > 4,
        has_recent=seed % 11 > 7,
    )


def cases_until_caught(fault: str | None, limit: int) -> int | None:
    workload = plant(fault)
    for seed in range(limit):
        try:
            workload(seed).run()
        except Exception:
            return seed + 1
    return None


def test_nothing_is_caught_without_a_fault():
    assert cases_until_caught(None, 300) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault):
    assert cases_until_caught(fault, 3000) is not None


if __name__ == "__main__":
    for name in FAULTS:
        started = time.perf_counter()
        cases = cases_until_caught(name, 20_000)
        print(f"{name}: case {cases}, {time.perf_counter() - started:.2f} s")
