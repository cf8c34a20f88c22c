"""Step: a step on its way, whose tokens will be home some time later.
Knows nothing of how it is computed."""

import torch

from octavo.device import Event
from octavo.messages import StepResult


class Step:
    """A step on its way. On a CPU it is done; on a GPU its tokens are copied to the host behind it."""

    def __init__(self, number: int, tokens: torch.Tensor | None, done: Event | None) -> None:
        self._number, self._tokens, self._done = number, tokens, done

    def is_done(self) -> bool:
        return self._done is None or self._done.is_done()

    def result(self) -> StepResult:
        """Waits until the step is done."""
        if self._tokens is None:
            return StepResult(self._number, [])
        if self._done is not None:
            self._done.wait()
        return StepResult(self._number, self._tokens.tolist())
