"""Decode steps as CUDA graphs: one launch instead of hundreds, captured when a batch size is first needed.
Rows and lengths go in; tokens come out, or logits where sampling happens outside the graph."""

import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.batch import Batch
from octavo.device import Device
from octavo.kernels.triton.runtime.batch_sizes import ladder
from octavo.layers.model import DecoderModel
from octavo.messages import NO_INPUT
from octavo.messages.speculation import MAX_DRAFT
from octavo.models.draft_heads.base import DraftHead
from octavo.worker.rows import PageChanges, RowState

if TYPE_CHECKING:
    from octavo.weights.methods.triton_adapters import AdapterSites
    from octavo.worker.gpu_adapters import HostBlocks


class _Key(NamedTuple):
    num_rows: int
    is_greedy: bool
    is_shared: bool
    adapted: int = (
        0  # kinds of products that adapters of the step may change (weights/methods/triton_adapters.py); 0: none
    )


class Graphs:
    """The captured graphs, and the buffers at fixed addresses that all of them read and write."""

    def __init__(
        self,
        device: Device,
        rows: RowState,
        model: DecoderModel,
        max_rows: int,
        sites: "AdapterSites | None" = None,
        vocab_size: int | None = None,
        features: torch.Tensor | None = None,
    ) -> None:
        """`sites`: products that adapters may change; None: without --enable-lora. `vocab_size`: no later token is sampled, for a draft
        model; None: the model's. `features`: [slots, D] for a draft head, which reads those of the position before and writes its own."""
        # Imported here: Triton is only required on GPU machines.
        from octavo.kernels.triton.gemm.adapters import BLOCK_FIELDS
        from octavo.kernels.triton.runtime import features as feature_kernels
        from octavo.kernels.triton.runtime import graph_inputs
        from octavo.kernels.triton.sampling.greedy import argmax

        self._kernels, self._argmax, self._feature_kernels = graph_inputs, argmax, feature_kernels
        self._rows, self._model = rows, model
        self._sizes, self._vocab_size = ladder(max_rows), vocab_size
        self._pool = torch.cuda.graph_pool_handle()
        # What captured steps put beside it (adapters) has the usual priority: it takes the processors that products leave free.
        self._stream = torch.cuda.Stream(device.torch_device, priority=-1)  # type: ignore[no-untyped-call]
        self._captured: dict[_Key, torch.cuda.CUDAGraph] = {}
        self.num_captured = 0
        self.seconds_capturing = 0.0

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.torch_device)

        # In a step each row may get a page in each group, and one more where it copies a shared page.
        self._slot_layout = graph_inputs.InputSlot(max_rows, 2 * max_rows * rows.num_groups)
        self._input_slots = device.pinned((graph_inputs.NUM_SLOTS, self._slot_layout.size), torch.int32)
        self._slots_on_host = [memoryview(slot) for slot in self._input_slots.numpy()]
        self._host_tokens = device.pinned((graph_inputs.NUM_SLOTS, max_rows), torch.int32)
        self._num_sent = 0
        self._slot = room(1, dtype=torch.int32)  # index of the input slot that the next replay reads
        self._batch_rows, self._lens = room(max_rows, dtype=torch.int32), room(max_rows, dtype=torch.int32)
        self._given, self._prefix_len = room(max_rows, dtype=torch.int32), room(1, dtype=torch.int32)
        self._input_ids, self._positions = room(max_rows), room(max_rows)
        self._slots = room(rows.num_groups * max_rows)  # a step of B rows uses the first G · B
        self._seq_lens = room(max_rows, dtype=torch.int32)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device.torch_device)
        self._every = torch.arange(max_rows, device=device.torch_device)
        self._page_tables = room(rows.num_groups, max_rows, rows.max_pages, dtype=torch.int32)
        self._logits: torch.Tensor | None = None  # [B, V], allocated when a step first samples outside its graph
        stage, width = model.stage, model.hidden_size
        assert max(stage.count + 2, MAX_DRAFT + 1) <= graph_inputs.NUM_SLOTS, (
            "a slot would be written before its step is done"
        )
        # Hidden states from the stage before, and for the next one.
        self._hidden_in = None if stage.is_first else room(max_rows, width, dtype=model.dtype)
        self._hidden_out = None if stage.is_last else room(max_rows, width, dtype=model.dtype)
        self._tokens = room(max_rows)
        self._features = features  # of the model: None until there is a head
        self._before = None if features is None else room(max_rows, features.shape[1], dtype=features.dtype)
        self._sites = sites
        if sites is not None:
            # As many blocks as rows: each may have an adapter of its own.
            self._order, self._blocks = room(max_rows, dtype=torch.int32), room(max_rows, BLOCK_FIELDS)
            self._order_slots = device.pinned((graph_inputs.NUM_SLOTS, *self._order.shape), torch.int32)
            self._block_slots = device.pinned((graph_inputs.NUM_SLOTS, *self._blocks.shape), torch.int64)

    @property
    def max_rows(self) -> int:
        return self._slot_layout.max_rows

    def keep_features(self, store: torch.Tensor) -> None:
        """From now on, write what the model's tap makes of hidden states to `store` [slots, D], by the slots of their tokens."""
        assert not self._captured, "captured steps do not write features"
        self._features = store

    def forget(self) -> None:
        """Drop all graphs: what they read will have other addresses. Each is captured again when it is first needed."""
        self._captured.clear()
        # Their memory ends with the last of them, and a pool that has ended takes no further graph.
        self._pool = torch.cuda.graph_pool_handle()

    def can_run(self, num_rows: int, num_changes: int = 0) -> bool:
        """`num_changes`: of page tables."""
        return num_rows <= self.max_rows and num_changes <= self._slot_layout.max_changes

    def run(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        changes: PageChanges,
        shared_len: int,
        is_greedy: bool,
        adapters: "HostBlocks | None" = None,
        drafted: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Run one step of rows [B] that hold `lens` tokens, after applying the page changes. Greedy: tokens are sampled and
        stored, → None. Otherwise → logits [B, V], and the caller must sample and call store(). A row may be there several times, with
        different lengths; one that is given as −1 − row keeps no token. `adapters`: of these rows. `drafted`: [B] for each row the token that it
        computes, if that is a draft, which is written to the token table first; else NO_INPUT."""
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        key = _Key(size, is_greedy, shared_len > 0, 0 if adapters is None else adapters.kinds)
        if adapters is not None:
            self._send_adapters(size, adapters)
        self._send(size, rows, lens, changes, shared_len, drafted)
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._capture(key)
        graph.replay()
        if is_greedy:
            return None
        assert self._logits is not None
        return self._logits[: len(rows)]

    def input(self, num_rows: int) -> torch.Tensor:
        """[B, D]: to be filled with the hidden states of the stage before, unless this is the first."""
        assert self._hidden_in is not None
        return self._hidden_in[:num_rows]

    def output(self, num_rows: int) -> torch.Tensor:
        """[B, D]: the last step's hidden states for the next stage, until the next run."""
        assert self._hidden_out is not None
        return self._hidden_out[:num_rows]

    def store(self, sampled: torch.Tensor) -> None:
        """Write tokens [B] that were sampled outside a graph to the token table, and copy them to the host."""
        self._scatter(len(sampled), sampled)

    def host_tokens(self, num_rows: int) -> torch.Tensor:
        """Host memory that will hold the tokens [B] of the step just started, once it is done. It is reused after NUM_SLOTS
        further steps."""
        return self._host_tokens[(self._num_sent - 1) % len(self._host_tokens), :num_rows]

    def warm_up(self, num_rows: int, is_shared: bool) -> None:
        """Run a step's calls without capturing them, to compile their kernels."""
        key = _Key(num_rows, True, is_shared)
        self._step(key, self._batch(key))

    def warm_up_adapters(self) -> None:
        """The same for the kernel that receives the rows' adapters."""
        if self._sites is not None:
            self._kernels.receive_adapters(
                self._order_slots, self._block_slots, self._slot, self._order[:1], self._blocks[:1]
            )

    def _send(
        self,
        size: int,
        rows: Sequence[int],
        lens: Sequence[int],
        changes: PageChanges,
        shared_len: int,
        drafted: Sequence[int] | None,
    ) -> None:
        # The slot is free: at most one step more than there are stages is uncollected, or all passes of a draft, and there are more slots.
        layout, slot = self._slot_layout, self._slots_on_host[self._num_sent % len(self._slots_on_host)]
        self._num_sent += 1

        def write(at: int, values: Sequence[int]) -> None:
            slot[at : at + len(values)] = array("i", values)

        padding = [0] * (size - len(rows))
        write(0, rows)
        write(layout.lens, [*lens, *padding] if padding else lens)
        write(layout.given, [NO_INPUT] * len(rows) if drafted is None else drafted)
        slot[layout.prefix_len], slot[layout.num_changes] = shared_len, len(changes.cells)
        if changes.cells:
            write(layout.cells, changes.cells)
            write(layout.pages, changes.pages)

    def _send_adapters(self, size: int, adapters: "HostBlocks") -> None:
        """Into the slot that _send() fills next."""
        at, count = self._num_sent % len(self._input_slots), len(adapters.blocks)
        self._order_slots[at, : len(adapters.order)] = torch.from_numpy(adapters.order)
        self._block_slots[at, :count] = torch.from_numpy(adapters.blocks)
        self._block_slots[at, count:size] = 0

    def _capture(self, key: _Key) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        batch = self._batch(key)
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        # Run once outside the graph to compile kernels and initialise libraries, which a capture does not allow. The
        # replay repeats its writes, from the same input slot.
        with torch.cuda.stream(self._stream):
            self._step(key, batch)
            self._slot.fill_((self._num_sent - 1) % len(self._input_slots))
            graph = torch.cuda.CUDAGraph()
            # Not with torch's context manager: it empties the allocator's cache each time, which takes longer than the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(key, batch)
            finally:
                graph.capture_end()
        main.wait_stream(self._stream)
        self.num_captured += 1
        self.seconds_capturing += time.perf_counter() - started
        return graph

    def _batch(self, key: _Key) -> Batch:
        size = key.num_rows
        slots = self._slots[: self._rows.num_groups * size].view(-1, size)
        batch = Batch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slots=slots[0],
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            page_table=self._page_tables[0, :size],
            sample_at=self._every[:size],
            max_query_len=1,
            max_seq_len=self._rows.width - 1,  # an upper bound for every later replay
            num_decodes=size,
            query_lens_host=[],
            seq_lens_host=[],
            prefix_len=self._prefix_len if key.is_shared else None,
        )
        return batch if self._rows.num_groups == 1 else batch.in_groups(slots, self._page_tables[:, :size])

    def _step(self, key: _Key, batch: Batch) -> None:
        size, tables = key.num_rows, self._rows
        rows, lens = self._batch_rows[:size], self._lens[:size]
        all_pages = tables.device_page_tables
        given = self._given[:size]
        self._kernels.receive(
            self._input_slots, self._slot, rows, lens, given, self._prefix_len, all_pages, self._slot_layout
        )
        for pages, part in zip(all_pages, batch.groups or (batch,), strict=True):
            self._kernels.gather_inputs(
                rows,
                lens,
                given,
                tables.tokens,
                pages,
                tables.page_size,
                input_ids=part.input_ids,
                positions=part.positions,
                slots=part.slots,
                seq_lens=part.seq_lens,
                page_table=part.page_table,
            )
        if key.adapted:
            order, blocks = self._order[:size], self._blocks[:size]
            self._kernels.receive_adapters(self._order_slots, self._block_slots, self._slot, order, blocks)
        with self._adapted(key):
            hidden = self._model.forward(batch, self._inputs(size))
        self._write_features(size, batch, hidden)
        if self._hidden_out is not None:
            self._hidden_out[:size].copy_(hidden)
            return
        logits = self._logits_of(hidden)
        if key.is_greedy:
            self._scatter(size, self._argmax(logits, self._tokens[:size]))
            return
        # One buffer for all graphs: a copy of the logits for each graph would take gigabytes.
        if self._logits is None:
            self._logits = logits.new_empty((self._slot_layout.max_rows, logits.shape[1]))
        self._logits[:size].copy_(logits)

    def _inputs(self, size: int) -> torch.Tensor | None:
        """[B, D] what the model's layers begin with besides tokens, and may change; None: nothing."""
        if self._before is not None:
            assert self._features is not None
            tables, before = self._rows, self._before[:size]
            self._feature_kernels.features_before(
                self._batch_rows[:size],
                self._lens[:size],
                tables.device_page_table,
                tables.page_size,
                self._features,
                before,
            )
            return before
        # A copy: a capture runs the step twice.
        return None if self._hidden_in is None else self._hidden_in[:size].clone()

    def _write_features(self, size: int, batch: Batch, hidden: torch.Tensor) -> None:
        """Of all tokens, by the model; by a head, in the model's place, of those after which it samples."""
        if self._features is None:
            return
        if isinstance(self._model, DraftHead):
            chained = self._model.chained(hidden)
            self._feature_kernels.keep_features(chained, batch.slots, self._features, self._batch_rows[:size])
            return
        assert self._model.tap is not None and self._model.tap.features is not None
        self._feature_kernels.keep_features(self._model.tap.features, batch.slots, self._features)

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] → [B, V]."""
        logits = self._model.logits(hidden)
        if isinstance(self._model, DraftHead):
            assert self._vocab_size is not None
            return self._model.spread(logits, self._vocab_size)
        return logits[:, : self._vocab_size]

    @contextmanager
    def _adapted(self, key: _Key) -> Iterator[None]:
        """The products inside are changed by the adapters in the step's buffers."""
        if not key.adapted:
            yield
            return
        assert self._sites is not None
        self._sites.begin(self._order[: key.num_rows], self._blocks[: key.num_rows], key.adapted)
        try:
            yield
        finally:
            self._sites.end()

    def _scatter(self, size: int, sampled: torch.Tensor) -> None:
        rows, lens = self._batch_rows[:size], self._lens[:size]
        self._kernels.scatter_tokens(rows, lens, sampled, self._rows.tokens, self._host_tokens, self._slot)
