"""Adapters in the memory of a CPU with native kernels."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.batch import Batch
from octavo.kernels.cpu.adapters import AdapterPart, AdapterRows, NativeAdapter
from octavo.kernels.cpu.library import Threads, whole_pages
from octavo.kernels.cpu.native import Native
from octavo.layers.experts import Experts
from octavo.layers.linear import Linear
from octavo.weights.methods.cpu_native import NativeWeight
from octavo.weights.methods.cpu_native_experts import NativeExperts
from octavo.worker.host_copies import HostRoom
from octavo.worker.priority import give_way
from octavo.worker.staging import Staging


class NativeHolder:
    """An AdapterHolder of NativeAdapters."""

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        """`dtype`: in which adapters are held, float32 or bfloat16."""
        self._native, self._dtype = native, dtype
        self._threads = Threads(1)  # to pack with: a step has the others

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    def taken_bytes(self, num_bytes: int) -> int:
        return whole_pages(num_bytes)

    def site_of(self, linear: Linear) -> int | None:
        weight = linear.weight
        return weight.site if isinstance(weight, NativeWeight) and weight.site >= 0 else None

    def sites_of(self, experts: Experts) -> tuple[int, int] | None:
        weights = experts.weights
        return weights.sites if isinstance(weights, NativeExperts) and weights.sites[0] >= 0 else None

    def room(self, num_bytes: int) -> HostRoom | None:
        """Packing reads the file's own memory."""
        return None

    def free(self, room: HostRoom) -> None:
        """There is none."""

    def again(self, name: str) -> NativeAdapter | None:
        """Adapters are packed from their files, which are in the system's page cache if they were read lately."""
        return None

    def learn(self, layout: str, sites: Mapping[int, Sequence[AdapterPart]], num_numbers: int) -> None:
        """Matrices are packed one by one, so that steps can go first."""

    def knows(self, layout: str) -> bool:
        return False

    def place(
        self, layout: str, read: torch.Tensor, dtype: torch.dtype, scales: NDArray[np.float32], name: str
    ) -> NativeAdapter | None:
        return None

    def hold(self, sites: Mapping[int, Sequence[AdapterPart]], name: str = "") -> NativeAdapter:
        return NativeAdapter(self._threads, sites, self._native.num_sites, self._dtype, give_way)

    def release(self, adapter: NativeAdapter) -> None:
        """Its memory is free when nothing refers to it."""

    def begin(self, adapters: Sequence[NativeAdapter], batch: Batch, staging: Staging) -> None:
        assert batch.adapter_of is not None
        self._native.set_adapters(AdapterRows(adapters, batch.adapter_of))

    def end(self) -> None:
        self._native.set_adapters(None)

    def warm_up(self) -> None:
        """Nothing is compiled."""
