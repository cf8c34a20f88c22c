"""Attention on CPUs in few torch operations: decode rows together, longer rows one by one.

A store is [pages, 2, Hkv, page_size, D]: keys (0) and values (1) of one head in one page are contiguous. One gather of such
runs gives the keys and values of all rows in the layout of a batched product."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.attention.base import LayerHeads, storable
from octavo.attention.qk_norm_rope import qk_norm_rope
from octavo.batch import Batch
from octavo.spec import ModelSpec

# Decode rows are padded to the longest of their group. A group is closed when more than this share would be padding …
_MAX_PADDING = 0.25
# … unless it has fewer pages than this: then another round of calls costs more than the padding.
_SMALL_GROUP_PAGES = 64


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows of similar lengths."""

    tokens: torch.Tensor | None  # [B] indices into T; None: all decode rows in their order
    runs: torch.Tensor  # [2 * B * Hkv * M] runs of the store with the rows' keys, then their values
    empty: tuple[torch.Tensor | slice, ...]  # index (rows, heads, positions) of cells that hold no token of the row
    num_rows: int


@dataclass(slots=True)
class _LongRow:
    """A row of several tokens: a prompt or a chunk of one."""

    first: int
    last: int
    length: int
    runs: torch.Tensor | None  # [2 * Hkv * M]; None: this step computes all of its keys and values
    bias: torch.Tensor | None  # [N, L] 0 or -inf; None if runs is None


class TorchCpuAttention:
    name = "torch_cpu"
    page_dim = 0
    pages_may_lie_apart = False
    can_capture = False

    def __init__(self) -> None:
        self._runs: list[torch.Tensor] = []  # each layer's store as [pages * 2 * Hkv, page_size * D]
        self._cells: list[torch.Tensor] = []  # … and as [pages, 2 * Hkv, page_size, D]
        self._page_size = 0
        self._num_kv_heads = 0
        self._written: tuple[torch.Tensor, ...] = ()  # index of the cells that this step writes
        self._decodes: list[_DecodeGroup] = []
        self._long_rows: list[_LongRow] = []

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        if kv_dtype != dtype:
            return f"its pages hold {dtype}, not {kv_dtype}"
        if spec.has_window or spec.has_softcap:
            return "it does not support sliding windows or soft caps"
        return None

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, 2, spec.rank_kv_heads(tensor_parallel), page_size, spec.head_size)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        _, _, self._num_kv_heads, self._page_size, head_size = kv[0].shape
        self._runs = [store.view(-1, self._page_size * head_size) for store in kv]
        self._cells = [store.flatten(1, 2) for store in kv]
        self._heads = torch.arange(2 * self._num_kv_heads)
        self._dtype = kv[0].dtype

    # ── once per step ───────────────────────────────────────────────────────────────────────────────

    def plan(self, batch: Batch) -> None:
        slots = batch.slots[:, None]
        self._written = (slots // self._page_size, self._heads, slots % self._page_size)
        self._decodes = [self._plan_group(batch, rows) for rows in self._group_rows(batch)]
        starts = batch.query_start.tolist()
        self._long_rows = [
            self._plan_long_row(batch, row, starts[row], starts[row + 1])
            for row in range(batch.num_decodes, batch.num_rows)
        ]

    def _group_rows(self, batch: Batch) -> list[list[int]]:
        """Group decode rows, longest first, so that padding stays small. A single group keeps the batch's order."""
        num_pages = [-(-length // self._page_size) for length in batch.seq_lens_host[: batch.num_decodes]]
        if not num_pages:
            return []
        groups: list[list[int]] = []
        used = padded = longest = 0
        for row in sorted(range(len(num_pages)), key=num_pages.__getitem__, reverse=True):
            wasted = 1 - (used + num_pages[row]) / (padded + longest) if padded else 0.0
            if not groups or (wasted > _MAX_PADDING and padded >= _SMALL_GROUP_PAGES):
                groups.append([])
                used, padded, longest = 0, 0, num_pages[row]
            groups[-1].append(row)
            used += num_pages[row]
            padded += longest
        return [list(range(batch.num_decodes))] if len(groups) == 1 else groups

    def _plan_group(self, batch: Batch, rows: list[int]) -> _DecodeGroup:
        has_all_rows = len(rows) == batch.num_decodes
        index = torch.tensor(rows)
        table = batch.page_table[: len(rows)] if has_all_rows else batch.page_table[index]
        lengths = batch.seq_lens[: len(rows)] if has_all_rows else batch.seq_lens[index]
        num_pages = -(-max(batch.seq_lens_host[row] for row in rows) // self._page_size)
        runs = self._runs_of(table[:, :num_pages])
        empty: tuple[torch.Tensor | slice, ...] = (slice(None), slice(None), slice(batch.seq_lens_host[rows[0]], None))
        if len(rows) > 1:
            is_empty = torch.arange(num_pages * self._page_size) >= lengths[:, None]
            empty_rows, empty_positions = is_empty.nonzero().unbind(1)
            empty = (empty_rows, slice(None), empty_positions)
        return _DecodeGroup(None if has_all_rows else index, runs, empty, len(rows))

    def _plan_long_row(self, batch: Batch, row: int, first: int, last: int) -> _LongRow:
        length = batch.seq_lens_host[row]
        if length == last - first:
            return _LongRow(first, last, length, None, None)
        num_pages = -(-length // self._page_size)
        runs = self._runs_of(batch.page_table[row : row + 1, :num_pages])
        is_later = torch.arange(length) > batch.positions[first:last, None]
        bias = torch.zeros(is_later.shape, dtype=self._dtype).masked_fill_(is_later, float("-inf"))
        return _LongRow(first, last, length, runs, bias)

    def _runs_of(self, pages: torch.Tensor) -> torch.Tensor:
        """[B, M] pages → [2 * B * Hkv * M] runs: keys of row 0 head 0, row 0 head 1, …, then values."""
        heads = self._heads.view(2, 1, self._num_kv_heads, 1)
        return (pages.long()[None, :, None, :] * (2 * self._num_kv_heads) + heads).view(-1)

    # ── once per layer ──────────────────────────────────────────────────────────────────────────────

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        q, k, v = qk_norm_rope(heads, layer.num_heads, layer.num_kv_heads, rotation, layer.norms)
        kv = storable(_joined(k, v), self._dtype)
        self._cells[layer.index].index_put_(self._written, kv)
        if not self._long_rows and len(self._decodes) == 1:
            return self._decode(layer, self._decodes[0], q)
        output = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
        for group in self._decodes:
            if group.tokens is None:
                output[: group.num_rows] = self._decode(layer, group, q[: group.num_rows])
            else:
                output.index_copy_(0, group.tokens, self._decode(layer, group, q.index_select(0, group.tokens)))
        for row in self._long_rows:
            part = slice(row.first, row.last)
            output[part] = self._attend_long(layer, row, q[part], kv[part])
        return output

    def _decode(self, layer: LayerHeads, group: _DecodeGroup, q: torch.Tensor) -> torch.Tensor:
        """q [B, H, D] → [B, H * D]. The query heads of one KV head are the rows of one small product."""
        num_rows, num_heads, head_size = q.shape
        num_groups = num_rows * self._num_kv_heads
        gathered = self._runs[layer.index].index_select(0, group.runs)
        keys, values = gathered.view(2, num_groups, -1, head_size)
        queries = q.reshape(num_groups, -1, head_size)
        scores = torch.bmm(queries * layer.scale, keys.transpose(1, 2))
        # Assigned, not added: these cells may hold other requests' numbers, whose scores may overflow, and inf - inf is NaN.
        # By index because they are few: masked_fill_ touches every cell and takes two to twenty times as long.
        scores.view(num_rows, num_heads, -1)[group.empty] = float("-inf")
        if layer.first:
            scores[:, :, : layer.first] = float("-inf")
        if layer.sinks is not None:
            sinks = (
                layer.sinks.to(scores.dtype).view(self._num_kv_heads, -1, 1).repeat(num_rows, 1, 1)
            )  # [B Hkv, H / Hkv, 1]
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)[:, :, : keys.shape[1]]
        return torch.bmm(weights, values).view(num_rows, num_heads * head_size)

    def _attend_long(self, layer: LayerHeads, row: _LongRow, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [N, H, D] and kv [N, 2 Hkv, D] of this step → [N, H * D]."""
        if row.runs is None:
            keys, values = kv.transpose(0, 1).chunk(2)  # [Hkv, N, D]
        else:
            gathered = self._runs[layer.index].index_select(0, row.runs)
            keys, values = gathered.view(2, self._num_kv_heads, -1, q.shape[-1])[:, :, : row.length]
        bias, is_causal = row.bias, row.runs is None
        if layer.first:
            assert bias is not None, "a row that begins before the first position it sees"
            keys, values, bias = keys[:, layer.first :], values[:, layer.first :], bias[:, layer.first :]
        if layer.sinks is not None:
            keys, values, bias = _with_sinks(layer.sinks, keys, values, bias, len(q))
            is_causal = False
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=bias,
            is_causal=is_causal,
            scale=layer.scale,
            enable_gqa=q.shape[1] != self._num_kv_heads,
        )
        return attended[0].transpose(0, 1).flatten(1)


def _with_sinks(
    sinks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a zero token to keys and values [Hkv, L, D]; its score is the sink, by the bias [H, N, L + 1]."""
    length = keys.shape[1]
    if bias is None:
        bias = torch.full((num_tokens, length), float("-inf"), dtype=keys.dtype).triu_(1)
    sinks = sinks.to(keys.dtype)[:, None, None].expand(-1, num_tokens, 1)
    bias = torch.cat((bias.expand(len(sinks), -1, -1), sinks), dim=-1)
    nothing = keys.new_zeros(keys.shape[0], 1, keys.shape[2])
    return torch.cat((keys, nothing), dim=1), torch.cat((values, nothing), dim=1), bias


def _joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v [T, Hkv, D] as [T, 2 Hkv, D]: a view if they are adjacent in one tensor, as after a fused QKV product."""
    num_tokens, num_heads, head_size = k.shape
    stride = k.stride()
    if (
        stride == v.stride()
        and stride[1:] == (head_size, 1)
        and v.data_ptr() == k.data_ptr() + num_heads * head_size * k.element_size()
        and (num_tokens == 1 or stride[0] >= 2 * num_heads * head_size)
    ):
        return k.as_strided((num_tokens, 2 * num_heads, head_size), stride)
    return torch.cat((k, v), dim=1)
