"""DecoderModel: what all families have in common, which is how weights get in."""

from collections.abc import Iterator

import torch
from torch import nn

from octavo.batch import Batch
from octavo.layers.norm import Norm
from octavo.layers.sharding import Slots, fill
from octavo.quants import Weight
from octavo.weights.methods.base import Held


class DecoderModel(nn.Module):
    weights_bytes: int = 0
    """What this rank's parameters take, known once they are loaded."""
    vector_size: int = 0
    """Numbers in what final() gives for a token, where that is not the hidden size."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """→ hidden states [T, D]."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, D] → [S, V] in the model's type, the whole vocabulary on every rank."""
        raise NotImplementedError

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] → [N, D], a new tensor: what the head would multiply, which is also what embeddings are made of."""
        norm = self.norm
        assert norm is None or isinstance(norm, Norm)
        return hidden.clone() if norm is None else norm(hidden)  # type: ignore[no-any-return]

    def slots(self) -> Slots:
        """Every tensor the model takes from a checkpoint, by its HF name, with its whole shape."""
        raise NotImplementedError

    def is_ignored(self, name: str) -> bool:
        """Tensors that some checkpoints bring and the model does not need."""
        return False

    def load(self, tensors: Iterator[tuple[str, Weight]]) -> None:
        """Take this rank's shares. Missing, unexpected or mis-shaped tensors are a ConfigError that names them."""
        with torch.no_grad():
            fill(self.slots(), tensors, self.is_ignored)
            self.finish_loading()
        self.weights_bytes = self._count_bytes()

    def finish_loading(self) -> None:
        """What a family does once all its tensors are in."""

    def held(self) -> list[Held]:
        """All weights that methods hold, each once: a tied head has the embedding's."""
        values = (value for module in self.modules() for value in vars(module).values())
        return list({id(value): value for value in values if isinstance(value, Held)}.values())

    def _count_bytes(self) -> int:
        values = (value for module in self.modules() for value in vars(module).values())
        others = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return sum(held.nbytes for held in self.held()) + sum(tensor.nbytes for tensor in others.values())
