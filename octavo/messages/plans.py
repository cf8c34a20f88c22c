"""Messages between the engine and its ranks: start-up and load reports, a step's plan and its result. Ranks see rows, not
requests."""

from typing import Literal

import msgspec

from octavo.config import Config
from octavo.messages.params import PoolingParams, SamplingParams

# ── executor ⇄ ranks, at start-up ───────────────────────────────────────────────────────────────────


class DeviceMemory(msgspec.Struct, frozen=True, gc=False):
    """A GPU's memory in bytes, measured with the weights loaded and no pages yet. The rest of `total` is free for pages."""

    total: int
    other: int  # held by other processes
    own: int  # held by this process: weights, tables, the CUDA context, what libraries keep
    working: int  # temporary memory of the largest step
    working_rows: int  # temporary memory of a step with one token in each row
    working_least: int  # temporary memory of a step with one token
    reserve: int  # left free on purpose: CUDA graphs, staging, rounding, what other processes may still take

    @property
    def for_pages(self) -> int:
        """Bytes free for pages, regardless of --gpu-memory-utilization. Negative: not even a step fits."""
        return self.total - self.other - self.own - self.working - self.reserve


class RankStart(msgspec.Struct, frozen=True, gc=False):
    """The first message to a spawned rank."""

    config: Config
    model_path: str
    model_name: str
    model_kind: Literal["folder", "gguf"]
    rank: int  # number r % tensor_parallel_size of stage r // tensor_parallel_size
    num_ranks: int
    rendezvous: str  # address at which the ranks meet
    local_rank: int = 0  # its number among the ranks on its machine
    num_local_ranks: int = 1


class RankHello(msgspec.Struct, frozen=True, gc=False):
    """What a rank that was launched elsewhere says of itself when it connects."""

    rank: int
    channel: Literal["steps", "side", "lifeline"]
    version: str = ""  # of octavo
    torch: str = ""
    address: str = ""  # of its host, as the executor's network has it
    rendezvous_port: int = 0  # rank 0: the port on which the ranks can meet


class RunRank(msgspec.Struct, frozen=True, tag=True, gc=False):
    """From an engine to the agent that runs one of its ranks, on a cluster."""

    rank: int
    arguments: list[str]  # of python
    environment: dict[str, str] = {}  # added on the way: the GPUs of its node


class RankEnded(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The way back."""

    rank: int
    code: int  # negative: a signal's number


class LoadReport(msgspec.Struct, frozen=True, gc=False):
    """A rank's report after loading its weights, before pages are allocated. Sizes are this rank's own; memory that ranks share
    is already divided among them."""

    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_model_len_is_auto: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_bytes: int
    page_bytes: int
    available_bytes: int  # device memory for pages
    host_available_bytes: int  # host memory for the swap space; on a CPU the same memory as for pages
    notes: list[str] = []
    memory: DeviceMemory | None = None  # None: there is no GPU
    fp8_weights_bytes: int = 0  # size of the weights with --quantization fp8; 0: not available
    bfloat16_weights_bytes: int = 0  # size of the weights with --dtype bfloat16; 0: it would not be smaller
    bfloat16_page_bytes: int = 0
    fingerprint: dict[str, str] = {}  # everything that the bits of an output depend on, part by part
    fp8_page_bytes: int = 0  # size of a page with --kv-cache-dtype fp8; 0: not available
    kv_dtype: str = ""  # element type of KV pages; empty: dtype
    hidden_size: int = 0
    can_generate: bool = True
    num_labels: int = 0
    windows: tuple[int, ...] = (
        0,
    )  # window of each group of layers with its own page table; 0: the group keeps all pages
    stage: int = 0  # of the pipeline
    adapter_bytes: int = 0  # memory for adapters, beside the pages
    adapter_itemsize: int = 0  # bytes of a number of an adapter
    draft_len: int = 0  # tokens of a request up to which the draft model can follow it; 0: there is none
    draft_method: str = ""  # how it drafts; empty: as --speculative-config says


class Allocate(msgspec.Struct, frozen=True, gc=False):
    """The numbers of pages that the executor chose, the same for every rank."""

    num_pages: int
    num_host_pages: int


class TrialSeconds(msgspec.Struct, frozen=True, gc=False):
    """What steps took before the first request: a rank's reply to Allocate. 0: not measured."""

    one_row: float = 0.0  # a step of one row and one token
    verified: float = 0.0  # … that verifies VERIFY_TOKENS − 1 drafted tokens (schedule/step_costs.py)
    draft: float = 0.0  # a pass of the draft model with one token of one row


class RankFailed(msgspec.Struct, frozen=True, gc=False):
    """A rank's last message. `is_config`: the message is a ConfigError's; else it is a traceback."""

    is_config: bool
    message: str


# ── engine → workers ────────────────────────────────────────────────────────────────────────────────


class Entering(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that enters a row, with all its tokens so far (those of a preempted request include its output)."""

    row: int
    token_ids: list[int]
    prompt_len: int  # how many of token_ids, from the first on, came from the client
    params: SamplingParams
    seed: int  # already distinct for each of the n choices
    stop_ids: list[int]  # masked until min_tokens have been generated
    pages: list[list[int]]  # its page table in each group of layers; 0 for entries that are out of the window
    pooling: PoolingParams | None = None  # pool the hidden states into a vector instead of sampling


class PageMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one page before the step. Moves are executed in list order; host pages are in the swap space."""

    kind: Literal["copy", "out", "in"]  # page → page, page → host page, host page → page
    source: int
    target: int


class ForcedToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row continues with a token that it did not sample: the next token of a beam. Changes to its pages are sent separately.
    The row's earlier token ids may be outdated; they are not read."""

    row: int
    position: int
    token: int


class Draft(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that a row may continue with, to be verified (decision 048). They are the last positions that the row computes in this
    step, and it samples after each of them, too."""

    at: int  # index of the row in the plan's columns
    tokens: list[int]  # at least one; all FROM_MODEL or all FROM_GRAMMAR: the worker proposes as many, fewer or none
    catch_up: int = 0  # tokens of the row, before its last, that the draft model may compute first where it lacks them


FROM_MODEL = -1
"""In place of a drafted token that the worker's draft model proposes."""
FROM_GRAMMAR = -2
"""In place of a drafted token that the row's grammar leaves as the only way to go on, if there is one."""
MIN_SAMPLES = 16


def most_samples(max_rows: int) -> int:
    """The most tokens that a step samples: one for each row, and one for each drafted token."""
    return max(max_rows, MIN_SAMPLES)


NO_INPUT = -1


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """The plan of one step, the same bytes for every rank. Columns of equal length describe the rows that advance."""

    step: int
    leaves: list[int]  # rows that became free
    enters: list[Entering]
    moves: list[PageMove]
    rows: list[int]  # ┐ row `rows[i]` computes positions
    starts: list[int]  # │ starts[i] … starts[i] + counts[i] − 1
    counts: list[int]  # │ and samples a token after the last of them
    samples: list[bool]  # ┘ if samples[i]
    page_rows: list[int]  # ┐ entry page_entries[j] of the page table of row page_rows[j]
    page_entries: list[int]  # │ becomes page_ids[j], before the step
    page_ids: list[int]  # ┘
    page_groups: list[int] = []  # group whose page table entry j changes; empty: there is one group
    forced: list[ForcedToken] = []
    # With several stages: the token at starts[i], which an earlier stage cannot know because the last one sampled it; NO_INPUT: it came
    # when the row was entered, or is forced. Empty: there is one stage.
    inputs: list[int] = []
    drafts: list[Draft] = []  # ascending by row; empty with several stages

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to execute. (A plan may move pages without advancing any row.)"""
        return not self.rows and not self.moves


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs at one position: the chosen token first, then as many of the most likely as requested, in descending order."""

    rank: int  # rank of the chosen token; 1: the most likely
    token_ids: list[int]
    logprobs: list[float]  # never below -9999, which stands for impossible

    def cut_to(self, count: int) -> "Logprobs":
        """Keep at most `count` of the most likely tokens."""
        return Logprobs(self.rank, self.token_ids[: 1 + count], self.logprobs[: 1 + count])


class Candidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The most likely next tokens of a beam, in descending order."""

    token_ids: list[int]
    logprobs: list[float]


class DraftWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the draft model computed in a step."""

    passes: int
    tokens: int  # over all passes
    context: int  # positions before these tokens, summed up
    caught_up: int  # of the tokens: those that the draft model lacked
    seconds: float


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """The results of a step, in the order of the True entries of the plan's `samples`: a vector for each pooled row, a token for
    each other row (several for a row with a draft), logprobs of the tokens whose row asks for them, and candidates for each row that
    is a beam."""

    step: int
    tokens: list[int]
    vectors: list[bytes] = []
    logprobs: list[Logprobs] = []
    # For each row that asks for them and computed prompt tokens: all of those except the prompt's last.
    prompt_logprobs: list[list[Logprobs]] = []
    failures: dict[int, str] = {}  # index in `tokens` → why that token is invalid; its request fails
    grammar_seconds: float = 0.0  # time spent on computing grammar masks
    # Indices of `tokens` that end their requests shortly before max_tokens, at a point where the grammar may end.
    last: list[int] = []
    candidates: list[Candidates] = []
    # Indices of `tokens` that do not count: the mask of their row was not there in time. The row samples the same position again in
    # a later step. A step that was planned before this was known is late for that row, too.
    late: list[int] = []
    # For each of the plan's drafts: how many tokens the row got, 1 to 1 + drafted. All but the last of them equal the draft. An index
    # of `failures`, `last` or `late` is never that of a run of several.
    runs: list[int] = []
    # For each of the plan's drafts: how many tokens there were; 0: the draft model has not caught up with the row yet, or the grammar
    # leaves a choice. Empty: the plan had all of them.
    drafted: list[int] = []
    draft_work: DraftWork | None = None  # None: no draft model was asked
