"""Native: a rank's operations on a CPU in float32, each run at once, or recorded on a tape to be run as whole steps.

A layer's code is the same both ways: while a tape is recorded, operations return the tape's buffers in place of results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu import ops
from octavo.kernels.cpu.adapters import NO_SITE, AdapterRows
from octavo.kernels.cpu.attention import AttentionCall, QkNormRopeCall
from octavo.kernels.cpu.experts import ExpertWeights, room_bytes
from octavo.kernels.cpu.library import Kind, PackedWeight, Product, Threads, aligned, check, zeros
from octavo.kernels.cpu.ops import Code, Count, Finish, Op, Step, prepared_bytes
from octavo.kernels.cpu.tape import Field, NotRecordable, Tape
from octavo.kernels.device_ops import NormWeights


class Heads(NamedTuple):
    """How one layer attends, and where its pages are."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int
    softcap: float
    norms: tuple[Tensor, Tensor, float] | None  # of q and of k, [D], and their epsilon
    store: Tensor
    page_size: int
    page_stride: int  # bytes
    sinks: Tensor | None = None  # [H]


class Native:
    def __init__(self, num_threads: int, first_cpu: int = -1) -> None:
        self.threads = Threads(num_threads, first_cpu)
        self._tape: Tape | None = None
        self._inputs: Mapping[
            str, Tensor
        ] = {}  # of the step that is recorded: what stands for the inputs of those to come
        self._num_groups = 1
        self._scratches: dict[str, Tensor] = {}
        self.num_sites = 0
        self._adapters: AdapterRows | None = None

    @contextmanager
    def recording(self, tape: Tape, inputs: Mapping[str, Tensor], num_groups: int = 1) -> Iterator[None]:
        """Operations inside are recorded on the tape. `inputs` stand for those of the steps to come, by Step's names.
        `num_groups`: how many KV groups there are; their slots and page tables lie one after another, those of `inputs` first."""
        self._tape, self._inputs, self._num_groups = tape, inputs, num_groups
        try:
            yield
        finally:
            self._tape, self._inputs = None, {}

    # ── operations ──────────────────────────────────────────────────────────────────────────────────

    def embed(self, ids: Tensor, table: PackedWeight, factor: float = 1.0) -> Tensor:
        """ids [T] → [T, depth]: columns of the table, times factor."""
        y = self._room(Count.PER_TOKEN, len(ids), table.depth)
        op = Op(Code.EMBED, Count.PER_TOKEN)
        op.embed = ops.Embed(_address(table.memory), table.num_columns, table.depth, _address(y), factor, table.kind, 0)
        self._do(op, [], [(op.embed, "y")], self._step(ids, "input_ids"), table)
        return y

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """x [T, depth], changed: rows of the table [*, depth] float32 are added."""
        is_float = table.is_contiguous() and table.dtype == torch.float32
        check(is_float and x.shape[1:] == table.shape[1:] and x.stride(1) == 1, "positions: x and table must match")
        check(x.stride(0) == table.shape[1], "positions: x must be contiguous")
        op = Op(Code.EMBED, Count.PER_TOKEN)
        op.embed = ops.Embed(_address(table), len(table), table.shape[1], _address(x), 1.0, Kind.FLOAT32, 1)
        self._do(op, [(op.embed, "y")], [(op.embed, "y")], self._step(positions, "positions"), table)
        return x

    def rotation(self, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
        """positions [T], frequencies [F] → [T, 2 F]: cosine and sine of each product, next to each other, times amplitude
        but for frequencies of 0."""
        y = self._room(Count.PER_TOKEN, len(positions), 2 * len(frequencies))
        op = Op(Code.ROTATE, Count.PER_TOKEN)
        op.rotate = ops.Rotate(_address(frequencies), _address(y), len(frequencies), amplitude)
        self._do(op, [], [(op.rotate, "y")], self._step(positions, "positions"), frequencies)
        return y

    def linear(
        self,
        x: Tensor,  # [rows, depth]
        weights: Sequence[PackedWeight],  # their outputs lie side by side
        *,
        norm: NormWeights | None = None,
        bias: Tensor | None = None,  # [columns]
        residual: Tensor | None = None,  # [rows, columns]: changed, and returned
        finish: Finish = Finish.PLAIN,
        site: int = NO_SITE,  # number of this product for adapters
    ) -> Tensor:
        """norm(x) · Wᵀ, finished: [rows, columns]; gated ones: half as many."""
        columns = sum(weight.num_columns for weight in weights)
        width = columns // 2 if finish.is_gated else columns
        check(not finish.is_gated or len(weights) == 1, "a gated product has one weight")
        check(bias is None or (bias.shape == (columns,) and bias.is_contiguous()), f"a bias must be [{columns}]")
        count = self._count(x)
        y = residual if residual is not None else self._room(count, len(x), width)
        check(y.shape == (len(x), width) and x.stride(1) == 1 and y.stride(1) == 1, f"y must be [{len(x)}, {width}]")
        groups, first = _by_form(weights), 0
        is_one = len(weights) == 1 or finish == Finish.PLAIN
        check(site < 0 or is_one, "a product that adapters change is one product, or has nothing to finish")
        for group in groups:
            # Adapters change all columns at once, when the last of them are there.
            at = site if group is groups[-1] else NO_SITE
            self._products(x, group, norm, bias, y, residual is not None, finish, first, at)
            first += sum(weight.num_columns for weight in group)
        return y

    def set_adapters(self, adapters: "AdapterRows | None") -> None:
        """Adapters of the tokens of steps and operations from now on, until they are set to None again."""
        self._adapters = adapters

    def set_on(self, step: Step) -> None:
        """Have a tape's step use the adapters that are set."""
        if self._adapters is not None:
            self._adapters.set_on(step)

    def new_site(self) -> int:
        """Number another product that adapters may change."""
        self.num_sites += 1
        return self.num_sites - 1

    def gate(self, x: Tensor) -> Tensor:
        """x [rows, 2 size] → silu of the first half · the second, [rows, size]."""
        size = x.shape[1] // 2
        y = self._room(self._count(x), len(x), size)
        op = Op(Code.GATE, self._count(x))
        op.gate = ops.Gate(_address(x), _address(y), x.stride(0), y.stride(0), size)
        self._do(op, [(op.gate, "x")], [(op.gate, "y")], _rows(len(x)))
        return y

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        y = self._room(self._count(x), *x.shape)
        self._move(Code.NORM, self._count(x), x, y, norm, _rows(len(x)))
        return y

    def norm_in_place(self, x: Tensor, norm: NormWeights) -> None:
        """x [rows, D], which may be columns of a wider tensor, is changed."""
        self._move(Code.NORM, self._count(x), x, x, norm, _rows(len(x)))

    def add_norm(self, x: Tensor, norm: NormWeights, residual: Tensor) -> Tensor:
        """residual + norm(x): the residual is changed, and returned."""
        self._move(Code.NORM, self._count(x), x, residual, norm, _rows(len(x)), adds=True)
        return residual

    def cap(self, x: Tensor, limit: float) -> Tensor:
        """x [rows, size], changed, and returned: limit · tanh(x / limit)."""
        op = Op(Code.CAP, self._count(x))
        op.cap = ops.Cap(_address(x), x.stride(0), x.shape[1], limit)
        self._do(op, [(op.cap, "x")], [(op.cap, "x")], _rows(len(x)))
        return x

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ExpertWeights,
        residual: Tensor | None,
        sites: tuple[int, int] = (NO_SITE, NO_SITE),  # numbers of gate_up and of down for adapters
    ) -> Tensor:
        """x [rows, depth], logits [rows, experts] → (residual +) the weighted sum over the chosen experts, [rows, depth]; the
        residual is changed, and is the result."""
        is_right = logits.shape == (len(x), weights.num_experts) and logits.stride(1) == 1
        check(is_right and x.stride(1) == 1, f"experts: logits must be [{len(x)}, {weights.num_experts}]")
        count = self._count(x)
        y = residual if residual is not None else self._room(count, *x.shape)
        check(y.shape == x.shape and y.stride(1) == 1, "experts: the residual must have x's shape")
        op = Op(Code.EXPERTS, count)
        call = op.experts
        weights.describe(call)
        call.gate_up_site, call.down_site = sites
        call.x, call.logits, call.y, call.adds = _address(x), _address(logits), _address(y), residual is not None
        call.x_stride, call.logits_stride, call.y_stride = x.stride(0), logits.stride(0), y.stride(0)
        call.room = self._scratch("experts", room_bytes(call, len(x)))
        reads: list[Field] = [(call, "x"), (call, "logits")] + ([(call, "y")] if residual is not None else [])
        self._do(op, reads, [(call, "y"), (call, "room")], _rows(len(x)), weights)
        return y

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """For what many steps read: pages."""
        return zeros(shape, dtype)

    def gather(self, x: Tensor, sample_at: Tensor) -> Tensor:
        """x [T, D] → [S, D]: the rows that are sampled."""
        y = self._room(Count.PER_SAMPLE, len(sample_at), x.shape[1])
        step = self._step(sample_at, "sample_at")
        step.num_tokens, step.num_samples = len(x), len(sample_at)
        self._move(Code.GATHER, Count.PER_SAMPLE, x, y, None, step)
        return y

    def attend(self, layer: Heads, heads: Tensor, rotation: Tensor | None, step: Step) -> Tensor:
        """heads [T, H + 2 Hkv, D], q changed: norm and rotate, store keys and values, attend → [T, H * D]."""
        group = self._group_of(step)
        store = self._qk_norm_rope_store(layer, heads, rotation)
        store.group, call = group, store.qk_norm_rope
        reads: list[Field] = [(call, "heads")] + ([(call, "rotation")] if rotation is not None else [])
        self._do(store, reads, [(call, "heads")], step, layer)
        y = self._room(Count.PER_TOKEN, len(heads), layer.num_heads * layer.head_size)
        op = Op(Code.ATTEND, Count.PER_TOKEN, group)
        call = op.attention
        call.queries, call.query_stride = _address(heads), heads.stride(0)
        call.output, call.output_stride = _address(y), y.stride(0)
        self._about_pages(call, layer)
        call.window, call.scale, call.softcap = layer.window, layer.scale, layer.softcap
        call.sinks = _address(layer.sinks)
        self._do(op, [(call, "queries")], [(call, "output")], step, layer)
        return y

    def _group_of(self, step: Step) -> int:
        """The group whose slots and page tables the step to be recorded has, known by their address."""
        if self._tape is None:
            return 0
        slots = self._inputs["slots"]
        group: int
        group, rest = divmod(step.slots - slots.data_ptr(), slots.nbytes)
        if rest or not 0 <= group < self._num_groups:
            raise NotRecordable("a layer attends over another batch than the step's")
        return group

    # ── how they are made ───────────────────────────────────────────────────────────────────────────

    def _products(
        self,
        x: Tensor,
        weights: Sequence[PackedWeight],
        norm: NormWeights | None,
        bias: Tensor | None,
        y: Tensor,
        adds: bool,
        finish: Finish,
        first: int,
        site: int,
    ) -> None:
        kind, depth = weights[0].kind, x.shape[1]
        products = (Product * len(weights))()
        for product, weight in zip(products, weights, strict=True):
            check(weight.depth == depth, f"a weight of depth {weight.depth} cannot be multiplied by {depth} columns")
            product.weights, product.kind, product.finish = _address(weight.memory), weight.kind, finish
            product.y = y.data_ptr() + 4 * first
            product.residual = product.y if adds else None
            product.bias = None if bias is None else bias.data_ptr() + 4 * first
            product.y_stride, product.num_columns, product.depth = y.stride(0), weight.num_columns, depth
            first += weight.num_columns
        op = Op(Code.LINEAR, self._count(x))
        call = op.linear
        call.x, call.x_stride, call.depth = _address(x), x.stride(0), depth
        call.products, call.num_products = products, len(weights)
        writes: list[Field] = [(product, "y") for product in products]
        reads: list[Field] = [(call, "x")] + ([(product, "residual") for product in products] if adds else [])
        call.prepared = self._scratch("prepared", prepared_bytes(kind, len(x), depth))
        writes.append((call, "prepared"))
        call.site, call.first_column = site, first - sum(weight.num_columns for weight in weights)
        if site >= 0 and finish != Finish.PLAIN:
            call.unfinished = self._scratch("unfinished", 4 * len(x) * weights[0].num_columns)
            writes.append((call, "unfinished"))
        if norm is not None:
            _set_norm(call.norm, norm)
            if not kind.is_quantised or norm.bias is not None:
                call.normed = self._scratch("normed", 4 * len(x) * depth)
                writes.append((call, "normed"))
        self._do(op, reads, writes, _rows(len(x)), (products, weights, norm, bias))

    def _qk_norm_rope_store(self, layer: Heads, heads: Tensor, rotation: Tensor | None) -> Op:
        check(heads.stride()[1:] == (layer.head_size, 1), f"heads must be [T, H, {layer.head_size}]")
        op = Op(Code.QK_NORM_ROPE_STORE, Count.PER_TOKEN)
        call = op.qk_norm_rope
        call.heads, call.token_stride, call.rotation = _address(heads), heads.stride(0), _address(rotation)
        if layer.norms is not None:
            q_norm, k_norm, call.epsilon = layer.norms
            call.q_norm, call.k_norm = _address(q_norm), _address(k_norm)
        self._about_pages(call, layer)
        return op

    def _about_pages(self, call: AttentionCall | QkNormRopeCall, layer: Heads) -> None:
        call.pages, call.page_stride = _address(layer.store), layer.page_stride
        call.is_int8, call.is_float16 = layer.store.dtype == torch.int8, layer.store.dtype == torch.float16
        call.num_heads, call.num_kv_heads = layer.num_heads, layer.num_kv_heads
        call.head_size, call.page_size = layer.head_size, layer.page_size

    def _move(
        self, code: Code, count: Count, x: Tensor, y: Tensor, norm: NormWeights | None, step: Step, adds: bool = False
    ) -> None:
        op = Op(code, count)
        op.move = ops.Move(_address(x), _address(y), x.stride(0), y.stride(0), x.shape[1])
        op.move.adds = adds
        if norm is not None:
            _set_norm(op.move.norm, norm)
        reads: list[Field] = [(op.move, "x")] + ([(op.move, "y")] if adds else [])
        self._do(op, reads, [(op.move, "y")], step, norm)

    # ── at once, or later ───────────────────────────────────────────────────────────────────────────

    def _do(self, op: Op, reads: list[Field], writes: list[Field], step: Step, keep: object = None) -> None:
        if self._tape is not None:
            self._tape.add(op, reads, writes, keep)
        else:
            if self._adapters is not None and _is_changed(op):
                self._adapters.set_on(step)
            ops.run(self.threads, ops.array([op]), step)

    def _count(self, x: Tensor) -> Count:
        return Count.PER_TOKEN if self._tape is None else self._tape.count_of(x)

    def _room(self, count: Count, num_rows: int, width: int) -> Tensor:
        return torch.empty(num_rows, width) if self._tape is None else self._tape.buffer(count, width)

    def _scratch(self, name: str, num_bytes: int) -> int:
        if self._tape is not None:
            return self._tape.scratch(num_bytes)
        kept = self._scratches.get(name)
        if kept is None or kept.nbytes < num_bytes:
            kept = self._scratches[name] = aligned(num_bytes)
        return kept.data_ptr()

    def _step(self, column: Tensor, name: str) -> Step:
        """A step of which only one column of the batch is needed."""
        check(column.dtype == torch.int64 and column.is_contiguous(), f"{name} must be int64")
        if self._tape is not None and column is not self._inputs[name]:
            raise NotRecordable(f"what stands where the step's {name} are expected was made in between")
        step = _rows(len(column))
        setattr(step, name, _address(column))
        return step


def _is_changed(op: Op) -> bool:
    """Whether adapters may change its products."""
    if op.code == Code.EXPERTS:
        return bool(op.experts.gate_up_site >= 0)
    return bool(op.code == Code.LINEAR and op.linear.site >= 0)


def _rows(count: int) -> Step:
    return Step(num_tokens=count)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _set_norm(target: ops.Norm, norm: NormWeights) -> None:
    target.weight, target.bias, target.epsilon = _address(norm.weight), _address(norm.bias), norm.epsilon


def _by_form(weights: Sequence[PackedWeight]) -> list[list[PackedWeight]]:
    """Neighbours that take their activations in the same form, together."""
    groups: list[list[PackedWeight]] = []
    for weight in weights:
        if groups and groups[-1][0].kind.is_quantised == weight.kind.is_quantised:
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return groups
