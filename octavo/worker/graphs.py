"""Decode steps as CUDA graphs: one launch instead of hundreds, captured when a batch size is first needed.
Knows nothing of plans; it is given rows and lengths, and gives logits or tokens."""

import gc
import time
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import AttentionBackend
from octavo.batch import Batch
from octavo.device import Device
from octavo.layers.model import DecoderModel
from octavo.sampling.state import Ints, SamplingState
from octavo.worker.rows import Rows
from octavo.worker.staging import Staging


def ladder(max_rows: int) -> list[int]:
    """Batch sizes that are captured: steps of an eighth or so, so that little of a batch is padding."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
    step = 8
    while sizes[-1] < max_rows:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class _Key:
    num_rows: int
    is_greedy: bool
    is_shared: bool
    backend: tuple[int, ...]


class Graphs:
    """Buffers at fixed addresses, which every graph reads and writes, and the graphs themselves."""

    def __init__(
        self,
        device: Device,
        rows: Rows,
        staging: Staging,
        model: DecoderModel,
        attention: AttentionBackend,
        max_rows: int,
    ) -> None:
        from octavo.kernels import step  # these need Triton, which only a GPU machine must have
        from octavo.kernels.sampling import argmax

        self._kernels, self._argmax = step, argmax
        self._rows, self._staging, self._model, self._attention = rows, staging, model, attention
        self._sizes = ladder(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._captured: dict[_Key, torch.cuda.CUDAGraph] = {}
        self.num_captured = 0
        self.seconds_capturing = 0.0

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.torch_device)

        largest = self._sizes[-1]
        # Rows, lengths and the shared prefix arrive in one copy, each part at an aligned place.
        self._inputs = room(2 * _aligned(largest) + 4, dtype=torch.int32)
        self._prefix_len = self._inputs[2 * _aligned(largest) : 2 * _aligned(largest) + 1]
        self._input_ids, self._positions, self._slots = room(largest), room(largest), room(largest)
        self._seq_lens = room(largest, dtype=torch.int32)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device.torch_device)
        self._every = torch.arange(largest, device=device.torch_device)
        self._page_table = room(largest, rows.max_pages, dtype=torch.int32)
        self._logits: torch.Tensor | None = None  # [B, V], made when a step first samples outside its graph
        self.tokens = room(largest)  # [B] int64: what the latest step sampled

    def can_run(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1] and self._attention.graph_key(num_rows, 1, False) is not None

    def run(self, rows: Ints, lens: Ints, shared_len: int, is_greedy: bool) -> torch.Tensor | None:
        """One step of rows [B] that hold `lens` tokens. Greedy: `self.tokens` are sampled and stored; else logits [B, V]."""
        num_rows = len(rows)
        size = next(size for size in self._sizes if size >= num_rows)
        max_seq_len = int(lens.max())
        backend = self._attention.graph_key(size, max_seq_len, shared_len > 0)
        assert backend is not None
        key = _Key(size, is_greedy, shared_len > 0, backend)
        self._send(rows, lens, shared_len)
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._capture(key, max_seq_len)
        graph.replay()
        if is_greedy:
            return None
        assert self._logits is not None
        return self._logits[:num_rows]

    def rehearse(self, num_rows: int) -> None:
        """Make the calls of a step without capturing it."""
        backend = self._attention.graph_key(num_rows, 1, False)
        assert backend is not None
        key = _Key(num_rows, True, False, backend)
        self._step(key, self._batch(key, 1))

    def store(self, num_rows: int, sampled: torch.Tensor) -> None:
        """Put tokens [B] that were sampled outside a graph where the next step finds them."""
        rows, lens = self._rows_and_lens(num_rows)
        self._kernels.scatter_tokens(rows, lens, sampled, self._rows.tokens)

    def _send(self, rows: Ints, lens: Ints, shared_len: int) -> None:
        largest = _aligned(self._sizes[-1])
        columns = np.zeros(2 * largest + 4, dtype=np.int32)
        columns[: len(rows)] = rows
        columns[largest : largest + len(lens)] = lens
        columns[2 * largest] = shared_len
        self._staging.send([columns], into=self._inputs.view(torch.uint8))

    def _rows_and_lens(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        largest = _aligned(self._sizes[-1])
        return self._inputs[:size], self._inputs[largest : largest + size]

    def _capture(self, key: _Key, max_seq_len: int) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        batch = self._batch(key, max_seq_len)
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        # Once outside the graph: kernels are compiled and libraries initialised, which a capture does not allow. What it
        # writes, the replay writes again.
        with torch.cuda.stream(self._stream):
            self._step(key, batch)
        main.wait_stream(self._stream)
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._step(key, batch)
        self.num_captured += 1
        self.seconds_capturing += time.perf_counter() - started
        return graph

    def _batch(self, key: _Key, max_seq_len: int) -> Batch:
        size = key.num_rows
        return Batch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            page_table=self._page_table[:size],
            sample_at=self._every[:size],
            max_query_len=1,
            max_seq_len=max_seq_len,
            num_decodes=size,
            query_lens_host=[],
            seq_lens_host=[],
            prefix_len=self._prefix_len if key.is_shared else None,
        )

    def _step(self, key: _Key, batch: Batch) -> None:
        rows, lens = self._rows_and_lens(key.num_rows)
        self._kernels.gather_inputs(
            rows,
            lens,
            self._rows.tokens,
            self._rows.device_page_table,
            self._rows.page_size,
            input_ids=batch.input_ids,
            positions=batch.positions,
            slots=batch.slots,
            seq_lens=batch.seq_lens,
            page_table=batch.page_table,
        )
        logits = self._model.logits(self._model.forward(batch))
        if not key.is_greedy:
            # One buffer for all graphs: logits that each kept for itself would take gigabytes.
            if self._logits is None:
                self._logits = logits.new_empty((self._sizes[-1], logits.shape[1]))
            self._logits[: key.num_rows].copy_(logits)
            return
        self._argmax(logits, self.tokens[: key.num_rows])
        self._kernels.scatter_tokens(rows, lens, self.tokens[: key.num_rows], self._rows.tokens)


def is_plain_greedy(state: SamplingState, rows: Ints, lens: Ints) -> bool:
    """Whether every row takes the likeliest token as the logits come: no penalties, no bans."""
    return bool(state.greedy[rows].all() and not state.penalised[rows].any() and not (lens < state.min_len[rows]).any())


def _aligned(count: int) -> int:
    """Numbers of 4 bytes that fill 16-byte pieces."""
    return -(-count // 4) * 4
