"""SamplingState: the sampling parameters of all rows as columns, so that a step reads each with one gather."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.triton.sampling import records as columns
from octavo.messages import SamplingParams
from octavo.sampling.grammar.masks import Grammars
from octavo.sampling.grammar.row_processes import no_vocabulary
from octavo.sampling.logit_bias import Edits

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# A lower temperature counts as 0: dividing float32 logits by it would overflow, or divide by zero.
_LEAST_TEMPERATURE = 1e-5


class SamplingState:
    """Columns indexed by row. A row holds the values of its latest occupant."""

    def __init__(self, max_rows: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars or Grammars(vocab_size, no_vocabulary, 1)
        self.greedy = np.ones(max_rows, dtype=np.bool_)
        self.temperature = np.zeros(max_rows, dtype=np.float64)
        self.top_k = np.zeros(max_rows, dtype=np.int64)  # vocab_size: no limit
        self.top_p = np.ones(max_rows, dtype=np.float64)
        self.min_p = np.zeros(max_rows, dtype=np.float64)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.presence = np.zeros(max_rows, dtype=np.float64)
        self.frequency = np.zeros(max_rows, dtype=np.float64)
        self.repetition = np.ones(max_rows, dtype=np.float64)
        self.penalised = np.zeros(max_rows, dtype=np.bool_)
        self.prompt_len = np.zeros(max_rows, dtype=np.int64)
        self.min_len = np.zeros(max_rows, dtype=np.int64)  # prompt + min_tokens: shorter rows may not stop
        self.stop_ids: list[Ints] = [np.zeros(0, dtype=np.int64)] * max_rows
        self._not_greedy: dict[int, None] = {}  # rows that draw a token, or have a penalty
        self._min_lens: dict[int, int] = {}  # min_len of rows with min_tokens
        # These hold only rows that use the feature: if they are empty, a step pays nothing for it.
        self.edits: dict[int, Edits] = {}
        self._latest_edits: tuple[SamplingParams, Edits] | None = None
        self.num_logprobs: dict[int, int] = {}
        self.logprob_token_ids: dict[int, Sequence[int]] = {}  # of rows that want the logprobs of these tokens
        self.num_prompt_logprobs: dict[int, int] = {}
        self.num_candidates: dict[int, int] = {}  # rows that are beams
        # The same parameters in the format of the Triton kernels; a step adds the place of the row's logits and its uniform.
        self.records = np.zeros((max_rows, columns.WIDTH), dtype=np.float64)

    def enter(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        stop_ids: list[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Set the parameters of the row's new occupant. `output_ids`: the tokens it has already generated."""
        limited = 0 < params.top_k < self.vocab_size
        # top_k = 1 leaves only the likeliest token: greedy gives the same token for one argmax.
        self.greedy[row] = params.temperature < _LEAST_TEMPERATURE or params.top_k == 1
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k if limited else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.penalised[row] = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (
            0,
            0,
            1,
        )
        self.prompt_len[row] = prompt_len
        # With a grammar, its mask decides when the row may end, min_tokens included.
        self.min_len[row] = 0 if params.grammar else prompt_len + params.min_tokens
        # Stop ids outside the vocabulary cannot be sampled.
        self.stop_ids[row] = np.array([t for t in stop_ids if 0 <= t < self.vocab_size], dtype=np.int64)
        self.records[row] = self._record(row)
        self.leave(row)
        if self.penalised[row] or not self.greedy[row]:
            self._not_greedy[row] = None
        if params.min_tokens and not params.grammar:
            self._min_lens[row] = prompt_len + params.min_tokens
        if (edits := self._edits_of(params)) is not None:
            self.edits[row] = edits
        if params.use_beam_search:  # logprobs come with the candidates
            self.num_candidates[row] = params.num_candidates(len(stop_ids))
        elif params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
            if params.logprob_token_ids:
                self.logprob_token_ids[row] = params.logprob_token_ids
        if params.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        if params.grammar:
            self.grammars.enter(row, params, prompt_len, output_ids, stop_ids)

    def _edits_of(self, params: SamplingParams) -> Edits | None:
        """The sequences of one request enter together and share their edits: a list of the whole vocabulary takes milliseconds."""
        if not (params.logit_bias or params.allowed_token_ids is not None or params.bad_word_ids):
            return None
        latest = self._latest_edits
        if latest is not None and (latest[0] is params or latest[0] == params):
            return latest[1]
        edits = Edits.of(params, self.vocab_size)
        self._latest_edits = None if edits is None else (params, edits)
        return edits

    def leave(self, row: int) -> None:
        """Drop the row's entries that a step would still read."""
        self._not_greedy.pop(row, None)
        self._min_lens.pop(row, None)
        self.edits.pop(row, None)
        self.num_logprobs.pop(row, None)
        self.logprob_token_ids.pop(row, None)
        self.num_candidates.pop(row, None)
        self.num_prompt_logprobs.pop(row, None)
        self.grammars.leave(row)

    def is_only_greedy(self, rows: Sequence[int], lens: Sequence[int]) -> bool:
        """Whether every row takes the argmax of unmodified logits (no penalties, no bans) and needs no logits or logprobs. `lens`: tokens
        of each row before its sample."""
        for some in (self._not_greedy, self.edits, self.num_logprobs, self.num_candidates, self.grammars.rows):
            if some and not some.keys().isdisjoint(rows):
                return False
        if not self._min_lens:
            return True
        return all(length >= self._min_lens.get(row, 0) for row, length in zip(rows, lens, strict=True))

    def _record(self, row: int) -> Floats:
        record = np.zeros(columns.WIDTH)
        if not self.greedy[row]:
            min_p = self.min_p[row]
            record[columns.SCALE] = scale = math.log2(math.e) / self.temperature[row]
            record[columns.REACH] = min(columns.UNIT_BITS, -math.log2(min_p) if min_p else math.inf) / scale
            record[columns.TOP_K] = self.top_k[row]
            record[columns.TOP_P] = self.top_p[row]
            record[columns.FILTERED] = min_p > 0 or self.top_k[row] < self.vocab_size
        return record
