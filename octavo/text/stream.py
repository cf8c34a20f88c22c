"""TextStream: turns the tokens of one choice into text, cut at stop strings. The caller aborts the request when `stopped`
becomes True."""

from collections.abc import Collection, Sequence

import msgspec

from octavo.messages import Finish, FinishReason, SamplingParams
from octavo.text.stops import Released, StopStrings
from octavo.text.tokenize.detokenizer import Detokenizer

LOOP = "repetition_detected"
"""The stop reason of an output that was ended because it repeats itself; the word is vLLM's."""


BUDGET = "budget"
"""The stop reason of an output that was ended because its key has used up its tokens of the day."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    finish_reason: FinishReason | None  # set once, on the last delta of the choice
    stop_reason: str | int | None  # the stop string or the id in stop_token_ids that ended it, LOOP, or BUDGET
    num_tokens: int  # tokens of this choice so far, including the one that ended it


class TextStream:
    """The text of one choice. push() takes every delta, in order.

    A stop string counts if its last character came with a token after the first `min_tokens`; the end-of-sequence and
    stop ids are masked by the sampler until then. The text of the stop string or stop token is emitted only if
    `include_stop_str_in_output` is set.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, eos_ids: Collection[int]) -> None:
        # A stop string was found: the caller must abort the engine's request, and later deltas are ignored.
        self.stopped = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop) if params.stop else None
        self._params = params
        self._eos_ids: Collection[int] = () if params.ignore_eos else eos_ids
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finish: Finish | None = None) -> TextDelta:
        if self.stopped:
            return TextDelta("", None, None, self._num_tokens)
        if finish is None and self._stops is None:  # fast path for nearly every token
            self._num_tokens += len(token_ids)
            return TextDelta("".join(map(self._detokenizer.push, token_ids)), None, None, self._num_tokens)
        ended_by = finish.stop_token if finish is not None and finish.reason == "stop" else None
        last = len(token_ids) - 1
        texts = []
        for at, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if at == last and token_id == ended_by and not self._params.include_stop_str_in_output:
                break  # the stop token's own text is not part of the output
            released = self._feed(self._detokenizer.push(token_id))
            texts.append(released.text)
            if released.stop is not None:
                return self._stop("".join(texts), released.stop)
        if finish is None:
            return TextDelta("".join(texts), None, None, self._num_tokens)
        released = self._feed(self._detokenizer.flush())
        texts.append(released.text)
        if released.stop is not None:
            return self._stop("".join(texts), released.stop)
        if self._stops is not None:
            texts.append(self._stops.flush())
        stop_reason: str | int | None = LOOP if finish.reason == "repetition" else self._stop_reason(ended_by)
        if finish.is_budget:
            stop_reason = BUDGET
        return TextDelta("".join(texts), finish.reason, stop_reason, self._num_tokens)

    def _feed(self, text: str) -> Released:
        if self._stops is None:
            return Released(text)
        return self._stops.feed(text, counts=self._num_tokens > self._params.min_tokens)

    def _stop(self, text: str, stop: str) -> TextDelta:
        self.stopped = True
        if self._params.include_stop_str_in_output:
            text += stop
        return TextDelta(text, "stop", stop, self._num_tokens)

    def _stop_reason(self, ended_by: int | None) -> int | None:
        """The stop token id to report. As in vLLM, an end-of-sequence id is not reported, even if stop_token_ids has it."""
        if ended_by is None or ended_by in self._eos_ids or ended_by not in self._params.stop_token_ids:
            return None
        return ended_by
