"""Adapters on a GPU, in Triton's interpreter: around every way of holding weights, in a whole model, and their places in memory."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.attention.triton import TritonAttention
from octavo.attention.triton_invariant import InvariantTritonAttention
from octavo.device import Device
from octavo.kernels.cpu.adapters import AdapterPart
from octavo.kernels.device_ops import NormWeights
from octavo.kernels.triton.runtime.graph_inputs import NUM_SLOTS, receive_adapters
from octavo.messages import AdapterRef
from octavo.models import load_family
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.methods.base import HeldWeight, WeightRequest
from octavo.weights.methods.triton_adapters import AdapterSites
from octavo.weights.sources.source import local
from octavo.worker.adapters import NoRoom, RankAdapters
from octavo.worker.gpu_adapters import Arena, GpuAdapter, GpuHolder
from octavo.worker.outline import outline_of
from octavo.worker.staging import Staging
from tests.adapters import ALL, merged, weights_of, write_peft
from tests.contexts import context
from tests.interpreter import mend
from tests.models.batches import Store, make_batch
from tests.models.walk import reference_logits
from tests.small_llama import small_llama

# A query that is padding sees nothing, which numpy mentions and a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU, HALF = Device("cpu"), torch.bfloat16
WAYS = {
    "bf16": {"kernels": "triton"},
    "deterministic": {"kernels": "invariant"},
    "fp8": {"kernels": "triton", "quantization": "fp8"},
    "int4": {"kernels": "triton", "quantization": "int4"},
}


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


class Product:
    """One product with and without adapters around it, and two adapters of it."""

    def __init__(self, request: WeightRequest, way: str) -> None:
        torch.manual_seed(5)
        self.request, self.sites = request, AdapterSites(HALF, CPU.torch_device)
        settings: Any = {"dtype": HALF, **WAYS[way]}
        plain, adapted = context(**settings), context(**settings, around=self.sites.around)
        self.plain, self.adapted = (each.methods.linear(request) for each in (plain, adapted))
        for part, size in enumerate(request.part_sizes):
            rows = (torch.randn(size, request.in_features) * request.in_features**-0.5).to(HALF)
            for held in (self.plain, self.adapted):
                held.fill(part, rows.clone())
        self.sites.open([len(request.part_sizes)], 300, 32)
        self.holder = GpuHolder(self.sites, 2**20, CPU)
        self.parts = [self._parts(ranks) for ranks in ((4, 20), (17,))]
        self.adapters = [self.holder.hold({0: parts}) for parts in self.parts]

    def _parts(self, ranks: tuple[int, ...]) -> list[AdapterPart]:
        found, request = [], self.request
        for part, rank in list(enumerate(ranks))[: len(request.part_sizes)]:
            down = torch.randn(rank, request.in_features) * request.in_features**-0.5
            up = torch.randn(request.part_sizes[part], rank) * rank**-0.5
            found.append(AdapterPart(down, up, request.rows(part).start, 1.5))
        return found

    def begin(self, of_rows: list[int], kinds: int = -1) -> None:
        plan = self.holder.plan(self.adapters, np.array(of_rows))
        self.sites.begin(torch.from_numpy(plan.order), torch.from_numpy(plan.blocks), plan.kinds & kinds)

    def added(self, x: torch.Tensor, of_rows: list[int]) -> torch.Tensor:
        total = torch.zeros(len(of_rows), self.request.out_features)
        for row, number in enumerate(of_rows):
            for part in self.parts[number] if number >= 0 else ():
                columns = slice(part.first_column, part.first_column + len(part.up))
                total[row, columns] += part.scale * (x[row].float() @ part.down.T @ part.up.T)
        return total


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = 0.012) -> bool:
    return float((found.float() - expected.float()).norm() / expected.float().norm()) < limit


@pytest.mark.parametrize("way", WAYS)
def test_products_of_every_kind_of_weight(way: str) -> None:
    """Against what the weight itself gives, and the adapters' products in float32. Rows without one keep their bits."""
    of_rows = [0, -1, 1, 0, -1]
    without = [row for row, number in enumerate(of_rows) if number < 0]
    product = Product(WeightRequest((64, 32), 64), way)
    plain, adapted = product.plain, product.adapted
    torch.manual_seed(6)
    x, residual, bias = (torch.randn(*shape).to(HALF) for shape in ((5, 64), (5, 96), (96,)))
    for norm in (
        None,
        NormWeights((torch.rand(64) + 0.5).to(HALF), None, 1e-5),
        NormWeights((torch.rand(64) + 0.5).to(HALF), torch.randn(64).to(HALF), 1e-5),
    ):
        product.begin(of_rows)
        found = adapted.product(x, norm, bias)
        product.sites.end()
        assert torch.equal(adapted.product(x, norm, bias), plain.product(x, norm, bias)), "free when unused"
        normed = x if norm is None else plain._ops.norm(x, norm)
        assert near(found, plain.product(x, norm, bias).float() + product.added(normed, of_rows))
        assert torch.equal(found[without], plain.product(x, norm, bias)[without])
    product.begin(of_rows)
    active = adapted.product(x, None, None, "relu")
    found = adapted.product_add(x, bias, residual.clone())
    product.sites.end()
    assert near(active, F.relu(plain.product(x).float() + product.added(x, of_rows)))
    before = plain.product_add(x, bias, residual.clone())
    assert near(found, before.float() + product.added(x, of_rows)) and torch.equal(found[without], before[without])
    with product.sites.rehearsed():
        assert torch.equal(adapted.product(x), plain.product(x)), "the way of a step with adapters, without one"
    product.begin(of_rows, kinds=0)  # no adapter of the step changes a product of this kind
    assert torch.equal(adapted.product(x), plain.product(x))
    product.sites.end()


@pytest.mark.parametrize("way", WAYS)
def test_gates(way: str) -> None:
    """Gate and up with adapters, and the product after them. With --deterministic rows without one keep their bits."""
    of_rows = [1, -1, 0, -1]
    gate_up, down = Product(WeightRequest((64, 64), 64, is_gated=True), way), Product(WeightRequest((64,), 64), way)
    torch.manual_seed(7)
    x, residual = torch.randn(4, 64).to(HALF), torch.randn(4, 64).to(HALF)

    def run(first: HeldWeight, second: HeldWeight) -> torch.Tensor:
        """As GatedMLP does."""
        inner = first.gated(x, None, None, "silu")
        if inner is None:
            return second.product_after_gate(first.product(x), "silu", None, residual.clone())
        return second.product_add(inner, None, residual.clone())

    before = run(gate_up.plain, down.plain)
    assert torch.equal(run(gate_up.adapted, down.adapted), before), "free when unused"
    for product in (gate_up, down):
        product.begin(of_rows)
    found = run(gate_up.adapted, down.adapted)
    gate, up = (gate_up.plain.product(x).float() + gate_up.added(x, of_rows)).chunk(2, dim=1)
    inner = (F.silu(gate) * up).to(HALF)
    expected = down.plain.product_add(inner, None, residual.clone()).float() + down.added(inner, of_rows)
    assert near(found, expected, 0.03 if way == "fp8" else 0.012)
    without = [1, 3]
    if way == "deterministic":
        assert torch.equal(found[without], before[without])
    assert near(found[without], before[without], 0.03 if way == "fp8" else 0.012)


@pytest.mark.parametrize("is_invariant", [False, True], ids=["as usual", "deterministic"])
def test_a_model_with_adapters_equals_the_merged_ones(is_invariant: bool, tmp_path: Path) -> None:
    """In float32: files to tables, a prompt in chunks, and rows of several adapters in one step. With --deterministic a row's bits do not
    depend on the others."""
    torch.manual_seed(3)
    base = small_llama(48, head_dim=16)
    base.save_pretrained(tmp_path / "model")
    weights = weights_of(tmp_path / "model")
    folders = [
        write_peft(tmp_path / "a", weights, rank=20, targets=ALL, seed=1),
        write_peft(tmp_path / "b", weights, rank=8, targets=("q_proj", "v_proj", "o_proj"), seed=2),
    ]
    checkpoint = open_checkpoint(local(tmp_path / "model"))
    family = load_family("llama")
    spec = family.spec(checkpoint.config)
    sites = AdapterSites(torch.float32, CPU.torch_device)
    attention = InvariantTritonAttention() if is_invariant else TritonAttention()
    kernels = "invariant" if is_invariant else "triton"
    surroundings = context(attention=attention, kernels=kernels, around=sites.around, max_len=64)
    model = family.Model(checkpoint.config, spec, surroundings)
    model.load((name, tensor.clone()) for name, tensor in base.state_dict().items())
    holder = GpuHolder(sites, 2**20, CPU)
    outline = outline_of(checkpoint, spec, surroundings)
    adapters = RankAdapters(model, outline, family, checkpoint.config, holder)
    sites.open(adapters.num_parts(len(sites.weights)), 300, 256)
    adapters.warm_up()
    names = [adapters.load(AdapterRef(folder.name, str(folder))).id for folder in folders]
    rng = random.Random(4)
    prompts = [[rng.randrange(48) for _ in range(length)] for length in (5, 3, 4)]

    def run(which: list[int]) -> list[torch.Tensor]:
        """Logits of prompts 0 and 1 with an adapter each, and 2 without."""
        store = Store(spec, attention, num_pages=8, page_size=16)
        rows = {number: store.row(prompts[number]) for number in which}
        found: dict[int, list[torch.Tensor]] = {number: [] for number in which}
        with torch.inference_mode():
            for count in (3, 1, 1):
                steps = [
                    (number, row, min(count, len(row.tokens) - row.computed))
                    for number, row in rows.items()
                    if row.computed < len(row.tokens)
                ]
                if not steps:
                    break
                batch = make_batch([(row, num) for _, row, num in steps], 16)
                of_tokens = [number if number < 2 else -1 for number, _, num in steps for _ in range(num)]
                batch.adapters, batch.adapter_of = tuple(names), torch.tensor(of_tokens, dtype=torch.int32)
                with adapters.of(batch, Staging(CPU)):
                    logits = model.logits(model.forward(batch))
                for (number, _, _), part in zip(steps, logits.split(batch.query_lens_host), strict=True):
                    found[number].append(part)
        return [torch.cat(found[number]) for number in which]

    together = run([0, 1, 2])
    for number, folder in enumerate([*folders, None]):
        state = base.state_dict() if folder is None else merged(weights, folder)
        reference = small_llama(48, head_dim=16)
        reference.load_state_dict(state, strict=False)
        expected = reference_logits(reference, prompts[number])
        torch.testing.assert_close(together[number], expected, atol=2e-4, rtol=2e-4)
    if is_invariant:
        assert torch.equal(run([1])[0], together[1]) and torch.equal(run([2])[0], together[2])
    taken = holder._arena.size - holder._arena.num_free
    assert taken > 0
    adapters.forget(names)
    assert holder._arena.num_free == holder._arena.size


def test_places_in_memory() -> None:
    """No two overlap, and what is given back is joined."""
    rng = random.Random(8)
    arena, taken = Arena(2**16), {}
    for _ in range(3000):
        if taken and rng.random() < 0.48:
            start = rng.choice([*taken])
            arena.give_back(start)
            del taken[start]
            continue
        size = rng.choice([1, 200, 256, 300, 4000, 9000])
        start = arena.take(size)
        held = sorted((at, at + num) for at, num in taken.items())
        if start is None:
            ends = [0, *(end for _, end in held)]
            gaps = [at - end for end, at in zip(ends, [*(at for at, _ in held), arena.size], strict=True)]
            assert max(gaps) < size, "there was room"
            continue
        assert start % 256 == 0 and start >= 0 and start + size <= arena.size
        assert all(start + size <= at or end <= start for at, end in held)
        taken[start] = -(-size // 256) * 256
    for start in taken:
        arena.give_back(start)
    assert arena.num_free == arena.size and arena.take(arena.size) == 0


def test_an_adapter_without_room_leaves_nothing_behind() -> None:
    product = Product(WeightRequest((64,), 64), "bf16")
    free = product.holder._arena.num_free
    parts = [AdapterPart(torch.zeros(32, 64), torch.zeros(60_000, 32), 0, 1.0)]
    with pytest.raises(NoRoom):
        product.holder.hold({0: parts})
    assert product.holder._arena.num_free == free


def test_long_matrices_take_several_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """And padding of ranks is zeros, whatever was there before."""
    monkeypatch.setattr("octavo.worker.gpu_adapters._CHUNK_BYTES", 4096)
    product = Product(WeightRequest((64,), 64), "bf16")
    holder = product.holder
    holder._memory.fill_(77)
    torch.manual_seed(1)
    part = AdapterPart(torch.randn(9, 64), torch.randn(500, 9), 0, 1.0)
    held: GpuAdapter = holder.hold({0: [part]})
    (start,) = held.places
    down, up = (holder._memory[at:].view(HALF) for at in (start, start + 16 * 64 * 2))
    assert torch.equal(down[: 9 * 64].view(9, 64), part.down.to(HALF)) and not down[9 * 64 : 16 * 64].any()
    stored = up[: 500 * 16].view(500, 16)
    assert torch.equal(stored[:, :9], part.up.to(HALF)) and not stored[:, 9:].any()


def test_a_captured_step_receives_its_rows_adapters() -> None:
    orders = torch.arange(NUM_SLOTS * 6, dtype=torch.int32).view(NUM_SLOTS, 6)
    slots = torch.arange(NUM_SLOTS * 18).view(NUM_SLOTS, 6, 3) + 2**40
    for step in (1, 5, NUM_SLOTS):  # receive() has moved the slot on, around the ring too
        order, blocks = torch.zeros(4, dtype=torch.int32), torch.zeros((4, 3), dtype=torch.int64)
        receive_adapters(orders, slots, torch.tensor([step % NUM_SLOTS], dtype=torch.int32), order, blocks)
        assert torch.equal(order, orders[step - 1, :4]) and torch.equal(blocks, slots[step - 1, :4])
