"""What the engine and its ranks say to each other: how a rank starts, what it holds, a step's plan and its result.
Knows nothing of clients or of requests: rows are numbers, and everything is msgspec structs of plain values."""

from typing import Literal

import msgspec

from octavo.config import Config
from octavo.messages.params import PoolingParams, SamplingParams

# ── executor ⇄ ranks, at start-up ───────────────────────────────────────────────────────────────────


class DeviceMemory(msgspec.Struct, frozen=True, gc=False):
    """A GPU's memory in bytes, measured with the weights in and no pages yet. What is in none of these is free for pages."""

    total: int
    other: int  # held by other processes
    own: int  # held by this one: weights, tables, the context, what libraries keep
    working: int  # what the largest step takes beyond that, and gives back
    working_rows: int  # the same for a step of one token for each row
    working_least: int  # the same for a step of one token
    reserve: int  # left free on purpose: CUDA graphs, staging, rounding, what other processes may still take

    @property
    def for_pages(self) -> int:
        """What is free for pages, whatever share of the GPU was meant for them. Negative: not even a step fits."""
        return self.total - self.other - self.own - self.working - self.reserve


class RankStart(msgspec.Struct, frozen=True, gc=False):
    """The first thing a spawned rank is told."""

    config: Config
    model_path: str
    model_name: str
    model_kind: Literal["folder", "gguf"]
    rank: int
    num_ranks: int
    rendezvous: str  # address at which the ranks meet


class LoadReport(msgspec.Struct, frozen=True, gc=False):
    """One rank has its weights and no pages yet. Sizes are this rank's own; memory shared by ranks is divided already."""

    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_model_len_is_auto: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_bytes: int
    page_bytes: int
    available_bytes: int  # for pages, where the device's memory is concerned
    host_available_bytes: int  # for the swap space; on a CPU the same memory as the pages'
    notes: list[str] = []
    memory: DeviceMemory | None = None  # None: there is no GPU
    fp8_weights_bytes: int = 0  # what the weights would take with --quantization fp8; 0: that cannot be chosen
    bfloat16_weights_bytes: int = 0  # with --dtype bfloat16; 0: that would not be less
    bfloat16_page_bytes: int = 0
    fingerprint: dict[str, str] = {}  # what the bits of answers depend on, part by part
    fp8_page_bytes: int = 0  # what a page would take with --kv-cache-dtype fp8; 0: that cannot be chosen
    kv_dtype: str = ""  # what KV pages hold; empty: dtype
    hidden_size: int = 0
    can_generate: bool = True
    windows: tuple[int, ...] = (
        0,
    )  # of each group of layers, which has a page table of its own; 0: it keeps everything


class Allocate(msgspec.Struct, frozen=True, gc=False):
    """What the executor settled on, the same for every rank."""

    num_pages: int
    num_host_pages: int


class PrepareGrammar(msgspec.Struct, frozen=True, gc=False):
    """Goes to every rank beside the plans; each says the number again when the grammar is ready there."""

    number: int
    grammar: str
    forgets: list[str]


class RankFailed(msgspec.Struct, frozen=True, gc=False):
    """A rank's last words. `is_config`: a ConfigError's message, for a person; else a traceback."""

    is_config: bool
    message: str


# ── engine → workers ────────────────────────────────────────────────────────────────────────────────


class Entering(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row's new occupant, with all of its tokens known so far (a preempted request brings its output along)."""

    row: int
    token_ids: list[int]
    prompt_len: int  # the first of token_ids that came from the client
    params: SamplingParams
    seed: int  # already distinct for each of the n choices
    stop_ids: list[int]  # masked until min_tokens are out
    pages: list[list[int]]  # its page table in each group of layers; 0 where a window has passed
    pooling: PoolingParams | None = None  # in place of sampling: its hidden states become a vector


class PageMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one page before the step. Moves are executed in list order; `host` pages live in the swap space."""

    kind: Literal["copy", "out", "in"]  # page → page, page → host page, host page → page
    source: int
    target: int


class ForcedToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row goes on with a token that it did not sample: a beam's next. What its pages hold up to there is told apart; the tokens
    before it in the row's table are no longer those, and nobody reads them."""

    row: int
    position: int
    token: int


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step, decided: the same bytes for every rank. Columns of equal length describe the rows that advance."""

    step: int
    leaves: list[int]  # rows whose occupant is gone
    enters: list[Entering]
    moves: list[PageMove]
    rows: list[int]  # ┐ row `rows[i]` computes positions
    starts: list[int]  # │ starts[i] … starts[i] + counts[i] − 1
    counts: list[int]  # │ and samples a token after the last of them
    samples: list[bool]  # ┘ if samples[i]
    page_rows: list[int]  # ┐ entry page_slots[j] of row page_rows[j]'s page table
    page_slots: list[int]  # │ becomes page_ids[j], before the step
    page_ids: list[int]  # ┘
    page_groups: list[int] = []  # … in the page table of group page_groups[j]; empty: there is one group
    forced: list[ForcedToken] = []

    @property
    def is_empty(self) -> bool:
        """Nothing to carry out. (A plan may move pages and advance nobody.)"""
        return not self.rows and not self.moves


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one position: the token that is there, then the likeliest in falling order, as many as were asked for."""

    rank: int  # of the token that is there: 1 is the likeliest
    token_ids: list[int]
    logprobs: list[float]  # never below -9999, which stands for impossible

    def cut_to(self, count: int) -> "Logprobs":
        """With at most so many of the likeliest."""
        return Logprobs(self.rank, self.token_ids[: 1 + count], self.logprobs[: 1 + count])


class Candidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The likeliest continuations of a beam, in falling order."""

    token_ids: list[int]
    logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What a step gave, in the order of the True ones in the plan's `samples`: a vector for each row that is pooled, a token
    for each of the others, logprobs of those tokens whose row wants them, and candidates of each row that is a beam."""

    step: int
    tokens: list[int]
    vectors: list[bytes] = []
    logprobs: list[Logprobs] = []
    # Of each row that wants them and computed prompt tokens, the last one aside.
    prompt_logprobs: list[list[Logprobs]] = []
    failures: dict[int, str] = {}  # which of `tokens` do not count, and why: their requests cannot go on
    grammar_seconds: float = 0.0  # that grammars took to say what may follow
    # Which of `tokens` end their requests a little before max_tokens: their grammars let them end there.
    last: list[int] = []
    candidates: list[Candidates] = []
