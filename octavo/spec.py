"""ModelSpec: what the rest of the house must know of a model, as plain integers.
Knows nothing of any family, file format or device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # the file in models/ that runs it
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    context_len: int  # positions the model was trained for
    longest_len: int = 0  # positions it can be stretched to where that is asked for; 0: no more than context_len
    windows: tuple[
        int, ...
    ] = ()  # each layer's: it sees its own position and the window − 1 before it; 0, or empty: all
    has_softcap: bool = False  # some layer bounds its scores
    has_sinks: bool = False  # some layer's heads have a share of the softmax that goes to no token

    @property
    def has_window(self) -> bool:
        """Some layer sees only the latest positions."""
        return any(self.windows)

    def rank_kv_heads(self, tensor_parallel: int) -> int:
        """KV heads that one rank holds. A single one, as of a model whose heads share it, is whole on every rank."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes one token's keys and values take on one rank, over all layers."""
        heads = self.rank_kv_heads(tensor_parallel)
        return 2 * self.num_layers * heads * self.head_size * element_bytes
