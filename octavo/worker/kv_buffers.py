"""The memory of the KV pages: its dtype, and one store for each place in a page. Layers of different groups share a store.
The attention backend defines the shape of one layer's page."""

import math
from collections.abc import Callable

import torch

from octavo.attention.base import AttentionBackend
from octavo.cache.span import longest
from octavo.config import Config
from octavo.limits import Limits
from octavo.quants.exact import kept_on_cpu
from octavo.spec import ModelSpec, PageLayout
from octavo.weights.formats.checkpoint import TensorSource

_PAGE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "float16": torch.float16, "float32": torch.float32}


def page_dtype(
    config: Config, limits: Limits, weights: TensorSource | None, is_native: bool, dtype: torch.dtype
) -> torch.dtype:
    """The dtype of KV pages. `dtype`: of the arithmetic, and the default. Native kernels with weights of a few bits default
    to float16: float32 pages would add no accuracy."""
    if (named := config.cache.kv_cache_dtype) in _PAGE_DTYPES:
        return _PAGE_DTYPES[named]
    if not is_native:
        return dtype
    is_rounded = config.model.quantization in ("int8", "int4")
    packed = frozenset[str]() if weights is None else kept_on_cpu(weights.packed_types)
    is_packed = limits.keeps_packed and not limits.decodes_packed and bool(packed)
    return torch.float16 if is_rounded or is_packed else dtype


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name as a value of --kv-cache-dtype."""
    return next((name for name, kind in _PAGE_DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))


class KVBuffers:
    def __init__(
        self,
        spec: ModelSpec,
        layout: PageLayout,
        attention: AttentionBackend,
        dtype: torch.dtype,
        page_size: int,
        num_ranks: int,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        self._spec, self._layout, self._attention, self._dtype = spec, layout, attention, dtype
        self._page_size, self._num_ranks, self._zeros = page_size, num_ranks, zeros

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one group on this rank."""
        return math.prod(self._shape(1)) * self._dtype.itemsize * self._layout.num_places

    def allocate(self, num_pages: int, max_rows: int) -> list[torch.Tensor]:
        """Allocate the stores and bind each layer's to the attention backend."""
        # Zero-filled: unwritten slots of a page are read with weight 0, and 0 times a NaN left in memory is NaN.
        if not num_pages:  # an encoder has no pages
            return []
        shape, num_places = self._shape(num_pages), self._layout.num_places
        if self._attention.pages_may_lie_apart:
            # Memory is committed at the first write, in huge pages: a KV page should touch one of them, not one for each layer.
            assert self._attention.page_dim == 0
            together = self._zeros((num_pages, num_places, *shape[1:]), self._dtype)
            stores = list(together.unbind(1))
        else:
            stores = [self._zeros(shape, self._dtype) for _ in range(num_places)]
        self._attention.bind([stores[place] for place in self._layout.place_of], max_rows)
        return stores

    def longest(self, num_pages: int, max_model_len: int, step_tokens: int) -> int:
        """The most tokens that a sequence can have in `num_pages` pages."""
        if not num_pages:  # an encoder has no pages: only the model limits a prompt
            return max_model_len
        return longest(num_pages, max_model_len, self._page_size, self._layout.windows, step_tokens)

    def in_words(self) -> str:
        """How layers are grouped, as a note for the start report; "": none."""
        windows, layout = self._layout.windows, self._layout
        if not any(windows):
            return layout.why
        narrow = ", ".join(str(window) for window in sorted(set(windows)) if window)
        of_layers = [layout.windows[group] for group in layout.group_of]
        num_windowed = sum(1 for window in of_layers if window)
        tables = "1 page table" if len(windows) == 1 else f"{len(windows)} page tables"
        return (
            f"{num_windowed} of {len(of_layers)} layers keep only the KV pages of their window ({narrow} tokens): "
            f"{tables} a request, pages of {layout.num_places} layers"
        )

    def _shape(self, num_pages: int) -> tuple[int, ...]:
        return self._attention.kv_shape(self._spec, num_pages, self._page_size, self._num_ranks)
