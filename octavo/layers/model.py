"""The models that families build on: DecoderModel is what a worker uses, CausalModel adds the output head."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.embedding import Embedding, Head
from octavo.layers.norm import Norm, norm_slots
from octavo.layers.rope import Rope
from octavo.layers.sharding import WeightSlots, fill
from octavo.quants import Weight
from octavo.spec import ModelSpec
from octavo.weights.methods.base import Held


class DecoderLayer(nn.Module):
    """One layer of a family, called as layer(x, batch, rotation): x [T, D], which may be changed, → [T, D]."""

    def weight_slots(self, name: str) -> WeightSlots:
        """The layer's tensors; `name`: the layer's own name in the checkpoint."""
        raise NotImplementedError


class HiddenTap(Protocol):
    """Reads hidden states in a model's pass, and makes something of them for each token."""

    layers: frozenset[int]
    """Layers whose input is read; the model's number of layers stands for the last one's output."""
    features: torch.Tensor | None
    """[T, size] of the last pass."""

    def take(self, layer: int, x: torch.Tensor) -> None:
        """x [T, D] is not changed, and may be afterwards. Layers come in their order."""


class DecoderModel(nn.Module):
    """Embedding and layers, and how weights get in. `layers` may be a generator: it is read after the embedding is made."""

    weights_bytes: int = 0
    """What this rank's parameters take, known once they are loaded."""
    vector_size: int = 0
    """Numbers in what final() gives for a token, where that is not the hidden size."""
    rope: Rope | None = None
    """Set by families with rotary positions."""
    tap: HiddenTap | None = None
    """Set where a draft head reads the hidden states."""
    takes_hidden: bool = False
    """Set where forward() is always given hidden states."""

    def __init__(
        self,
        spec: ModelSpec,
        context: BuildContext,
        layers: Iterable[DecoderLayer],
        *,
        embedding_size: int = 0,  # 0: the hidden size
        embedding_factor: float = 1.0,
        needs_embedding: bool = False,  # even if this is not the first stage
    ) -> None:
        super().__init__()
        self.attention_backend = context.attention
        self.stage, self.num_layers = context.stage, spec.num_layers
        self.hidden_size, self.dtype = spec.hidden_size, context.dtype  # of hidden states
        self.embedding: Embedding | None = None
        if context.stage.is_first or needs_embedding:
            self.embedding = Embedding(spec.vocab_size, embedding_size or spec.hidden_size, context, embedding_factor)
        self.layers = nn.ModuleList(layers)

    @property
    def layer_numbers(self) -> range:
        """Which of the model's layers these are."""
        return self.stage.layers(self.num_layers)

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """→ hidden states [T, D]. `hidden`: those of the stage before, which may be changed; None: this is the first."""
        self.attention_backend.plan(batch)
        rotations = self.rotations(batch.positions)
        x = self.embed(batch) if hidden is None else hidden
        if self.tap is None:
            for layer, rotation in zip(self.layers, rotations, strict=True):
                x = layer(x, batch, rotation)
            return x
        for number, layer, rotation in zip(self.layer_numbers, self.layers, rotations, strict=True):
            if number in self.tap.layers:
                self.tap.take(number, x)
            x = layer(x, batch, rotation)
        if self.num_layers in self.tap.layers:
            self.tap.take(self.num_layers, x)
        return x

    def embed(self, batch: Batch) -> torch.Tensor:
        """→ the first layer's input [T, D]."""
        assert self.embedding is not None, "this is not the first stage"
        embedded: torch.Tensor = self.embedding(batch.input_ids)
        return embedded

    def rotations(self, positions: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The rotation that each layer is called with: by default the same for all, None without rotary positions."""
        rotation = None if self.rope is None else self.rope.rotation(positions)
        return [rotation] * len(self.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, D] → [S, V] in the model's type, the whole vocabulary on every rank."""
        raise NotImplementedError

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] → [N, D], a new tensor: what the head would multiply, which is also what embeddings are made of."""
        raise NotImplementedError

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] of a prompt's first token → [N, num_labels] in float32, before any activation."""
        raise NotImplementedError

    def weight_slots(self) -> WeightSlots:
        """Every tensor that this stage of the model takes from a checkpoint, by its HF name, with its whole shape."""
        raise NotImplementedError

    def layer_slots(self, name: str) -> WeightSlots:
        """Those of this stage's layers; `name`: the list's, which a layer's index follows."""
        slots: WeightSlots = {}
        for index, layer in zip(self.layer_numbers, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.weight_slots(f"{name}.{index}")
        return slots

    def hf_name(self, name: str) -> str:
        """The slot's name of a checkpoint's tensor, for checkpoints that call it otherwise."""
        return name

    def is_ignored(self, name: str) -> bool:
        """Tensors that some checkpoints bring and the model does not need."""
        return False

    def load(self, tensors: Iterator[tuple[str, Weight]]) -> None:
        """Take this rank's shares. Missing, unexpected or mis-shaped tensors are a ConfigError that names them. Where there are several
        stages, `tensors` are without those of the others."""
        with torch.no_grad():
            fill(self.weight_slots(), ((self.hf_name(name), tensor) for name, tensor in tensors), self.is_ignored)
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


class TensorNames(NamedTuple):
    """What a family's checkpoints call the parts of a CausalModel."""

    embedding: str
    layers: str
    norm: str
    head: str


class CausalModel(DecoderModel):
    """A model that generates: embedding, layers, a norm if there is one, and a head that may be tied to the embedding."""

    names: TensorNames

    def __init__(
        self,
        spec: ModelSpec,
        context: BuildContext,
        layers: Iterable[DecoderLayer],
        norm: Norm | None,
        *,
        is_tied: bool,
        embedding_size: int = 0,  # 0: the hidden size
        embedding_factor: float = 1.0,
        logits_softcap: float = 0.0,
    ) -> None:
        is_last = context.stage.is_last
        super().__init__(
            spec,
            context,
            layers,
            embedding_size=embedding_size,
            embedding_factor=embedding_factor,
            needs_embedding=is_tied and is_last,
        )
        self.norm = norm if is_last else None
        self.is_tied = is_tied
        self.head: Head | None = None
        if is_last:
            self.head = Head(embedding_size or spec.hidden_size, spec.vocab_size, context, is_tied, logits_softcap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "this is not the last stage"
        logits: torch.Tensor = self.head(hidden, self.norm)
        return logits

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone() if self.norm is None else self.norm(hidden)

    def weight_slots(self) -> WeightSlots:
        names = self.names
        slots = {} if self.embedding is None else self.embedding.weight_slots(names.embedding)
        if self.head is not None:
            slots |= self.head.weight_slots(names.head)
        return slots | self.layer_slots(names.layers) | norm_slots(self.norm, names.norm)

    def is_ignored(self, name: str) -> bool:
        # Some checkpoints hold a tied head all the same.
        return self.is_tied and name == f"{self.names.head}.weight"

    def finish_loading(self) -> None:
        if self.head is not None and self.embedding is not None:
            self.head.tie(self.embedding)
