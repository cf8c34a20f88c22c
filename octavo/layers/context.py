"""BuildContext: what a layer must know of its surroundings when it is built.
Knows nothing of checkpoints or batches."""

from dataclasses import dataclass
from types import ModuleType

import torch

from octavo.attention.base import AttentionBackend
from octavo.kernels.cpu.native import Native
from octavo.parallel import Group


@dataclass(frozen=True, slots=True)
class BuildContext:
    group: Group
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    page_size: int
    kernels: ModuleType | None = None  # octavo.kernels.triton.kernel_set where it can run; None: layers use torch alone
    quantization: str = ""  # how products hold their weights: "" as they come, "fp8", "int8", "int4"
    native: Native | None = None  # the CPU's own kernels where they can run: then `dtype` is float32 …
    weight_dtype: torch.dtype = torch.float32  # … and weights that are not packed are held in this
    max_len: int = 0  # tokens that a request can have at most; 0: as many as the model was trained for
    keeps_packed: bool = (
        False  # weights that are packed in the checkpoint come so: a layer that cannot hold them decodes
    )
    decodes: bool = False  # … and are multiplied in float32, as if they had been decoded

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for a parameter of this rank."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
