"""EngineMetrics: what the engine did, under the metric names vLLM's dashboards read, plus Octavo's own.

Times are CLOCK_MONOTONIC seconds, comparable between processes of one machine."""

from typing import get_args

from octavo.cache.kv_cache import MissReason
from octavo.messages import Abort, EngineReport, FinishReason, GenerateRequest, Responded, TokenDelta
from octavo.observe.live_state import LiveTotals
from octavo.observe.metrics.exposition import Histogram, Scrape
from octavo.observe.metrics.gauges import EngineState, rejections, write_gauges
from octavo.observe.metrics.http_metrics import HttpMetrics
from octavo.observe.step_observer import StepEnd, StepObserver, StepTimes
from octavo.schedule.results import Committed, Planned, Removed
from octavo.schedule.step_costs import COST_PARTS, StepCosts

TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HOST_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.5,
)  # fmt: skip
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100)


class _Choice:
    """The times of one of a request's n choices. 0.0: not yet."""

    __slots__ = ("first", "last", "num_tokens")

    def __init__(self) -> None:
        self.first = 0.0
        self.last = 0.0
        self.num_tokens = 0


class _Open:
    """A request that has not finished."""

    __slots__ = (
        "admitted",
        "arrived",
        "choices",
        "http_id",
        "max_tokens",
        "most_tokens",
        "num_cached",
        "num_left",
        "num_preemptions",
        "owner",
        "prompt_len",
    )

    def __init__(self, request: GenerateRequest, now: float) -> None:
        self.arrived = request.arrived or now
        self.http_id = request.http_id or request.id
        self.owner = request.owner
        self.admitted = 0.0
        self.num_cached = self.num_preemptions = self.most_tokens = 0
        self.prompt_len = len(request.prompt_ids)
        self.max_tokens = request.params.max_tokens or 0
        self.num_left = request.params.n
        self.choices = [_Choice() for _ in range(request.params.n)]
        for index, tokens in enumerate(request.begun):  # by an engine that has ended
            if tokens is None:
                self.choices[index] = _FINISHED
                self.num_left -= 1
            elif tokens:
                # Its first token does not come again. Its tokens so far count in its length, and times begin here.
                self.choices[index].first = self.choices[index].last = now
                self.choices[index].num_tokens = len(tokens)


class EngineMetrics(StepObserver):
    def __init__(self, model_name: str, report: EngineReport) -> None:
        self._labels = {"model_name": model_name, "engine": str(report.replica)}
        self.report = report
        self._http = HttpMetrics()
        self._open: dict[str, _Open] = {}
        self._num_steps = 0
        self._busy_seconds = 0.0  # of the device
        self._num_capped_steps = 0
        self.limit_seconds = 0.0  # of the last step whose prompts were limited
        self._costs: StepCosts | None = None
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._missed: dict[str, int] = dict.fromkeys((reason or "tail" for reason in get_args(MissReason)), 0)
        self._num_drafts = self.draft_tokens = 0
        self._accepted_by_position: list[int] = []
        self._finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        lengths = _one_two_five(report.max_model_len)
        self._first_token = Histogram(TTFT_BOUNDS)
        self._inter_token = Histogram(TOKEN_BOUNDS)
        self._per_output_token = Histogram(TOKEN_BOUNDS)
        self._end_to_end = Histogram(REQUEST_BOUNDS)
        self._queue = Histogram(REQUEST_BOUNDS)
        self._inference = Histogram(REQUEST_BOUNDS)
        self._prefill = Histogram(REQUEST_BOUNDS)
        self._decode = Histogram(REQUEST_BOUNDS)
        self._prompt_lens = Histogram(lengths)
        self._generation_lens = Histogram(lengths)
        self._iteration = Histogram(ITERATION_BOUNDS)
        self._host = Histogram(HOST_BOUNDS)
        self._params_n = Histogram(CHOICES_BOUNDS)
        self._params_max_tokens = Histogram(lengths)
        self._most_generated = Histogram(lengths)
        self._prompt_computed = Histogram(lengths)
        self._preempted = Histogram(PREEMPTION_BOUNDS)

    # ── events of the loop ──────────────────────────────────────────────────────────────────────────

    def rows_changed(self, planned: Planned, now: float) -> None:
        for leaver in planned.returned:
            self.preempted(leaver.request.id)
        for request in planned.admitted:
            self.admitted(request.id, now, request.num_cached, request.miss)

    def planned(self, planned: Planned, now: float) -> None:
        if planned.capped is not None:
            self._num_capped_steps += 1
            self.limit_seconds = planned.limit_seconds

    def costs_learned(self, costs: StepCosts, now: float) -> None:
        self._costs = costs

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._busy_seconds += times.compute_seconds
        self.step(times.now, committed.num_tokens, committed.deltas)
        if committed.plan.drafts:
            self._count_drafts(committed)

    @property
    def accepted_tokens(self) -> int:
        return sum(self._accepted_by_position)

    def _count_drafts(self, committed: Committed) -> None:
        accepted = self._accepted_by_position
        drafts, result = committed.plan.drafts, committed.result
        counts = result.drafted or [len(draft.tokens) for draft in drafts]
        for num_tokens, run in zip(counts, result.runs, strict=True):
            self._num_drafts += num_tokens > 0
            self.draft_tokens += num_tokens
            accepted += [0] * (num_tokens - len(accepted))
            for position in range(run - 1):
                accepted[position] += 1

    def stepped(self, end: StepEnd) -> None:
        self._host.observe(end.host_seconds)

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self.aborted(abort.request_id, abort.index, abort.reason, now)

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool = False) -> None:
        """A request joined the queue. `now` counts where the request does not say when it arrived."""
        self._open[request.id] = _Open(request, now)

    def admitted(self, request_id: str, now: float, num_cached_tokens: int, miss: MissReason = "") -> None:
        """A request got a row. A later admission, after a preemption, is not a second wait in the queue."""
        request = self._open.get(request_id)
        if request is None or request.admitted:
            return
        request.admitted = now
        request.num_cached = num_cached_tokens
        self._queue.observe(now - request.arrived)
        self._prompt_tokens += request.prompt_len
        self._prefix_queries += request.prompt_len
        self._prefix_hits += num_cached_tokens
        self._missed[miss or "tail"] += request.prompt_len - num_cached_tokens

    def times(self, request_id: str, index: int) -> tuple[float, float]:
        """(arrival, last token) of a choice; 0.0: not known, or not yet."""
        request = self._open.get(request_id)
        return (0.0, 0.0) if request is None else (request.arrived, request.choices[index].last)

    def preempted(self, request_id: str) -> None:
        self._num_preemptions += 1
        if (request := self._open.get(request_id)) is not None:
            request.num_preemptions += 1

    def responded(self, responded: Responded) -> None:
        self._http.responded(responded)

    def step(self, now: float, num_batched_tokens: int, deltas: list[TokenDelta]) -> None:
        """A step is committed; `deltas` is all that it produced, for every API process."""
        self._num_steps += 1
        self._iteration.observe(num_batched_tokens)
        requests = self._open
        # Rows that decode together share the time of their last token: most steps have one distinct gap.
        num_by_last: dict[float, int] = {}
        num_tokens = 0
        for delta in deltas:
            request = requests.get(delta.request_id)
            if request is None:
                continue
            count = len(delta.token_ids)
            if count:
                choice = request.choices[delta.index]
                num_tokens += count
                choice.num_tokens += count
                last = choice.last
                choice.last = now
                if last:
                    num_by_last[last] = num_by_last.get(last, 0) + 1
                else:
                    choice.first = now
                    self._first_token.observe(now - request.arrived)
            if delta.finish is not None:
                self._finish(delta.request_id, delta.index, delta.finish.reason, now)
        self._generation_tokens += num_tokens
        for last, times in num_by_last.items():
            self._inter_token.observe(now - last, times)

    def aborted(self, request_id: str, index: int, reason: FinishReason, now: float) -> None:
        """No more deltas of this choice (−1: of the request) will come: the client left, or a stop string was found."""
        request = self._open.get(request_id)
        if request is None:
            return
        for at in range(len(request.choices)) if index < 0 else (index,):
            if request.choices[at] is not _FINISHED:
                self._finish(request_id, at, reason, now)

    # ── for a look between two steps ───────────────────────────────────────────────────────────────────

    def name_of(self, request_id: str) -> str:
        """The HTTP request's id."""
        request = self._open.get(request_id)
        return request_id if request is None else request.http_id

    def owner_of(self, request_id: str) -> bytes:
        """The owner of the HTTP request. Empty: it has none."""
        request = self._open.get(request_id)
        return b"" if request is None else request.owner

    def arrival_of(self, request_id: str, otherwise: float) -> float:
        request = self._open.get(request_id)
        return otherwise if request is None else request.arrived

    def totals(self) -> LiveTotals:
        return LiveTotals(
            steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._prefix_hits,
            generation_tokens=self._generation_tokens,
            finished=sum(self._finished.values()),
            preemptions=self._num_preemptions,
            busy_seconds=self._busy_seconds,
            first_tokens=self._first_token.count,
            first_token_seconds=self._first_token.total,
            token_gaps=self._inter_token.count,
            token_gap_seconds=self._inter_token.total,
        )

    # ── for a scrape ─────────────────────────────────────────────────────────────────────────

    def text(self, state: EngineState) -> str:
        scrape = Scrape(self._labels)
        write_gauges(scrape, self.report, state)
        self._write_counters(scrape)
        self._write_histograms(scrape)
        return scrape.text() + rejections(self._labels["model_name"], state) + self._http.text()

    # ── private ─────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, request_id: str, index: int, reason: FinishReason, now: float) -> None:
        request = self._open[request_id]
        self._finish_choice(request, request.choices[index], reason, now)
        request.choices[index] = _FINISHED
        request.num_left -= 1
        if request.num_left == 0:
            del self._open[request_id]
            self._finish_request(request)

    def _finish_choice(self, request: _Open, choice: _Choice, reason: FinishReason, now: float) -> None:
        self._finished[reason] += 1
        request.most_tokens = max(request.most_tokens, choice.num_tokens)
        self._end_to_end.observe(now - request.arrived)
        self._generation_lens.observe(choice.num_tokens)
        if not choice.first:
            return  # it has no token: no time of prefill or decode
        # A choice whose admission was not observed has had a row before its first token all the same.
        started = request.admitted or request.arrived
        self._inference.observe(choice.last - started)
        self._prefill.observe(choice.first - started)
        self._decode.observe(choice.last - choice.first)
        if choice.num_tokens > 1:
            self._per_output_token.observe((choice.last - choice.first) / (choice.num_tokens - 1))

    def _finish_request(self, request: _Open) -> None:
        self._prompt_lens.observe(request.prompt_len)
        self._params_n.observe(len(request.choices))
        self._params_max_tokens.observe(request.max_tokens)
        self._most_generated.observe(request.most_tokens)
        self._preempted.observe(request.num_preemptions)
        if request.admitted:
            self._prompt_computed.observe(request.prompt_len - request.num_cached)

    def _write_counters(self, scrape: Scrape) -> None:
        for name, help, value in (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", self._prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self._generation_tokens),
            ("vllm:num_preemptions", "Times a running request was preempted.", self._num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._prefix_hits),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed.", self._prefix_hits),
            ("vllm:spec_decode_num_drafts", "Drafts that were verified.", self._num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", self.draft_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Drafted tokens that were what would have been sampled.",
                self.accepted_tokens,
            ),
            ("octavo:steps", "Steps computed.", self._num_steps),
            (
                "octavo:capped_steps",
                "Steps that computed less of prompts than they have room for, because of --max-inter-token-ms.",
                self._num_capped_steps,
            ),
            ("octavo:device_busy_seconds", "Time in which a step was being computed.", self._busy_seconds),
        ):
            scrape.counter(name, help, [({}, value)])
        scrape.gauge(
            "octavo:step_limit_seconds",
            "Time that the last of these steps was to take at most. 0: there was none.",
            [({}, self.limit_seconds)],
        )
        scrape.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their position in the draft.",
            [({"position": str(at)}, count) for at, count in enumerate(self._accepted_by_position)],
        )
        costs = self._costs
        scrape.gauge(
            "octavo:step_cost_seconds",
            "Measured cost of a step by part: a step, a row, a further token of a row, a position before a row's one token, and one "
            "before each of a row's several tokens.",
            [] if costs is None else [({"part": part}, getattr(costs, part)) for part in COST_PARTS],
        )
        scrape.counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            [
                ({"source": "local_compute"}, self._prompt_tokens - self._prefix_hits),
                ({"source": "local_cache_hit"}, self._prefix_hits),
            ],
        )
        scrape.counter(
            "octavo:prefix_missed_tokens",
            "Prompt tokens that the prefix cache did not have, by reason. new: no earlier prompt had the same tokens up to there; evicted: their "
            "pages were needed for others; tail: behind the last full page; short: the prompt does not fill a page; needed: the prompt must be computed; "
            "window: layers with a window have freed them; off: there is no prefix cache.",
            [({"reason": reason}, count) for reason, count in self._missed.items()],
        )
        scrape.counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens that were not computed, by where their keys and values came from.",
            [({"source": "local_cache_hit"}, self._prefix_hits)],
        )
        scrape.counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            [({"finished_reason": reason}, count) for reason, count in self._finished.items()],
        )
        scrape.counter(
            "octavo:compile_jobs",
            "Checks of grammars and chat templates that requests brought, by outcome; kept: the result was known.",
            [({"outcome": outcome}, count) for outcome, count in self._http.jobs.items()],
        )

    def _write_histograms(self, scrape: Scrape) -> None:
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Time from arrival to a choice's first token.", self._first_token),
            ("inter_token_latency_seconds", "Time between two deliveries of tokens to one choice.", self._inter_token),
            # vLLM's former name, which dashboards still use.
            (
                "time_per_output_token_seconds",
                "Time between two deliveries of tokens to one choice.",
                self._inter_token,
            ),
            (
                "request_time_per_output_token_seconds",
                "A finished choice's mean time per token after its first.",
                self._per_output_token,
            ),
            ("e2e_request_latency_seconds", "Time from arrival to the end of a choice.", self._end_to_end),
            ("request_queue_time_seconds", "Time from arrival to admission to a row.", self._queue),
            ("request_inference_time_seconds", "Time from admission to the last token.", self._inference),
            ("request_prefill_time_seconds", "Time from admission to the first token.", self._prefill),
            ("request_decode_time_seconds", "Time from the first token to the last.", self._decode),
            ("request_prompt_tokens", "Prompt tokens of a finished request.", self._prompt_lens),
            ("request_generation_tokens", "Tokens of a finished choice.", self._generation_lens),
            ("iteration_tokens_total", "Tokens computed in a step.", self._iteration),
            ("request_params_n", "Parameter n of a finished request.", self._params_n),
            ("request_params_max_tokens", "Parameter max_tokens of a finished request.", self._params_max_tokens),
            ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", self._most_generated),
            ("request_num_preemptions", "Times that a finished request was preempted.", self._preempted),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a finished request that were not found in the prefix cache.",
                self._prompt_computed,
            ),
        ):
            scrape.histogram(f"vllm:{name}", help, histogram)
        scrape.histogram("octavo:host_step_seconds", "Host time of a step.", self._host)


_FINISHED = _Choice()
"""In the place of a finished choice, so that an abort of the rest does not count it again."""


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return bounds
            bounds.append(step * scale)
        scale *= 10
