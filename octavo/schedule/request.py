"""Request: one sequence on its way through the scheduler. A client's request for n choices of p prompts is p × n of these."""

from typing import TYPE_CHECKING

from octavo.cache.kv_cache import MissReason
from octavo.messages import Finish, FinishReason, GenerateRequest, Logprobs, PoolingParams, SamplingParams
from octavo.messages.params import choice_seed
from octavo.schedule.drafts.base import Drafter
from octavo.schedule.repetition import Loops, loops_of

if TYPE_CHECKING:
    from octavo.schedule.beams.group import BeamGroup
    from octavo.schedule.fairness import Tenant

SCORED_COST = 3
"""What a prompt token takes of a step's budget if its logprobs are wanted: logits over the whole vocabulary, and their order. It takes
1.7 times as long as another on the CPU for SmolLM2 (2,048 tokens: 3.1 s against 1.9); a larger vocabulary over a smaller model takes more."""


class Request:
    """`length` tokens exist, `computed` of them have (or will have, by a plan already issued) keys and values."""

    __slots__ = (
        "capacity",
        "computed",
        "draft_source",
        "drafted",
        "drafter",
        "epoch",
        "followers",
        "gives_way",
        "id",
        "index",
        "is_finished",
        "is_swapped",
        "late_at",
        "late_steps",
        "max_len",
        "min_len",
        "miss",
        "needs_one_step",
        "num_accepted",
        "num_cached",
        "num_charged",
        "num_drafted",
        "num_preemptions",
        "num_published",
        "num_scored",
        "num_siblings_ahead",
        "owner",
        "params",
        "pending",
        "place",
        "pooling",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "response_id",
        "row",
        "seed",
        "sequence",
        "sits_out",
        "special",
        "stop_ids",
        "tenant",
        "tokens",
    )

    def __init__(self, sequence: int, source: GenerateRequest, index: int) -> None:
        params = source.params
        assert params.max_tokens is not None and params.seed is not None, "resolved at admission"
        self.sequence = sequence  # arrival order over all requests; also its key in the cache
        self.id, self.index = source.id, index
        self.response_id = source.response_id or source.id
        self.params: SamplingParams = params
        self.owner = source.owner  # whose recent outputs it may draft from
        self.seed = choice_seed(params.seed, index)
        self.stop_ids = source.stop_ids
        self.pooling, self.needs_one_step = source.pooling, source.needs_one_step
        begun = source.begun[index] if source.begun else None
        self.tokens = [*source.prompt_ids, *(begun or ())]  # prompt and output, as far as known here
        self.prompt_len = len(source.prompt_ids)
        self.max_len = self.prompt_len + params.max_tokens
        # A grammar decides itself when an answer may end: its masks allow a stop token only there.
        self.min_len = 0 if params.grammar else self.prompt_len + params.min_tokens
        self.computed = 0
        self.pending = 0  # tokens sampled by a plan in flight: they exist on the device, not here
        self.drafted = 0  # of `computed`: the last so many are a draft in flight, of which some may count
        self.draft_source = 0  # of that draft: FROM_MODEL, FROM_GRAMMAR; 0: its tokens came with the plan
        self.drafter: Drafter | None = None  # None: it does not speculate
        self.num_drafted = self.num_accepted = 0  # tokens so far; no plan depends on them
        self.epoch = 0  # times it left its row; results of an older epoch own no pages
        self.row = -1  # −1: waiting
        self.capacity = 0  # positions below this can be written without asking the cache
        self.num_published = 0  # positions below this were offered to the prefix cache
        self.num_cached = -1  # prompt tokens found in the prefix cache when it was admitted first; −1: it was not
        self.miss: MissReason = ""  # why no more of its prompt was found then; no plan depends on it
        self.num_preemptions = 0
        # Logprobs of prompt tokens, from the second on: how many are known, and those that were not sent yet. If a choice has output,
        # an earlier engine has sent them.
        self.num_scored = self.prompt_len - 1 if any(source.begun) else 0
        self.prompt_logprobs: list[Logprobs] = []
        # Its grammar's mask was late: in how many steps in a row, after which position, and how many plans it sits out before the
        # next try. Meanwhile its capacity is 0.
        self.late_steps, self.late_at, self.sits_out = 0, -1, 0
        self.is_swapped = False
        self.is_finished = False
        self.rank = 0  # by the policy
        self.tenant: Tenant | None = None  # None: tenants are not told apart
        self.num_charged = (
            0  # tokens, from the first on, that its tenant's counter has: at least (Fairness.charged_until)
        )
        # Open sequences of its response when it came. 0: it was the first, or became primary since (policy.Siblings).
        self.num_siblings_ahead = 0
        self.place = sequence  # among primaries: in the order in which they became primary
        # Not the first sequence of its response: it may be preempted to admit an older primary.
        self.gives_way = False
        # None for a plain prompt with sampled tokens. Steps of others are committed apart, so that plain ones pay nothing.
        self.special: PoolingParams | Loops | BeamGroup | None = self.pooling
        if self.pooling is None and params.repetition_detection is not None:
            self.special = loops_of(params.repetition_detection, begun or ())
        self.followers: list[Request] = []  # choices that will fork from this one when its prompt is computed

    @property
    def is_primary(self) -> bool:
        """Whether it is the one sequence of its response that has a place in the queue (policy.Siblings)."""
        return self.num_siblings_ahead == 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The lowest is the oldest, and goes first. Beams of one search differ in the last number only."""
        rank = self.rank if self.tenant is None else self.tenant.rank
        return (rank, self.num_siblings_ahead, self.place, self.sequence)

    @property
    def has_output(self) -> bool:
        return len(self.tokens) > self.prompt_len

    @property
    def is_untouched(self) -> bool:
        """Whether it has never been in a plan, of this engine or an earlier one."""
        return self.row < 0 and not self.epoch and not self.has_output

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def lacks_scores(self) -> bool:
        """Whether prompt tokens must be computed for their logprobs: the prefix cache does not keep these."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.prompt_len - 1

    def share(self, count: int, budget: int) -> tuple[int, int]:
        """(how many of the next `count` tokens a step with this budget may compute, what they take of it)."""
        cost = SCORED_COST if count > 1 and self.lacks_scores else 1
        count = min(count, max(1, budget // cost))
        return count, min(count * cost, budget)

    @property
    def may_reuse(self) -> bool:
        """Whether prompt tokens that the prefix cache has need not be computed."""
        return not (self.needs_one_step or self.lacks_scores)

    def finish_after(self, token: int, is_loop: bool = False) -> Finish | None:
        """Why `token`, the last of its tokens, ends it, if it does. `is_loop`: it completes a repetition."""
        reason: FinishReason
        stop_token = None
        if token in self.stop_ids and len(self.tokens) >= self.min_len:
            reason, stop_token = "stop", token
        elif len(self.tokens) >= self.max_len:
            reason = "length"
        elif is_loop and len(self.tokens) >= self.min_len:
            reason = "repetition"
        else:
            return None
        return Finish(
            reason,
            stop_token,
            self.num_cached,
            self.num_preemptions,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
        )

    def take_scores(self, start: int, scores: list[Logprobs]) -> None:
        """Logprobs of prompt tokens from a step that began at position `start`. After a preemption some are known already."""
        assert start <= self.num_scored
        new = scores[self.num_scored - start :]
        self.num_scored += len(new)
        self.prompt_logprobs += new

    def send_scores(self) -> tuple[int, tuple[Logprobs, ...]]:
        """(how many were sent before, those that were not)."""
        unsent, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return self.num_scored - len(unsent), unsent
