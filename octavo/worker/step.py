"""Step: a step on its way, whose tokens and vectors will be home some time later.
Knows nothing of how it is computed."""

from collections.abc import Sequence

import torch

from octavo.device import Event
from octavo.messages import StepResult


class Step:
    """A step on its way. On a CPU it is done; on a GPU its tokens are copied to the host behind it."""

    def __init__(
        self, number: int, tokens: torch.Tensor | None, done: Event | None, vectors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._number, self._tokens, self._done, self._vectors = number, tokens, done, vectors

    def is_done(self) -> bool:
        return self._done is None or self._done.is_done()

    def result(self) -> StepResult:
        """Waits until the step is done."""
        if self._done is not None:
            self._done.wait()
        tokens = [] if self._tokens is None else self._tokens.tolist()
        return StepResult(self._number, tokens, [_bytes(vector) for vector in self._vectors])


def _bytes(vector: torch.Tensor) -> bytes:
    """[D] float32, on any device → little endian."""
    return vector.cpu().numpy().astype("<f4").tobytes()
