"""Layers with their own page tables over shared stores give the same results as layers with their own stores."""

import random

import pytest
import torch

from octavo.attention.base import AttentionBackend, LayerHeads
from octavo.attention.choose import choose
from octavo.attention.groups import GroupedAttention
from octavo.attention.reference import ReferenceAttention
from octavo.batch import Batch
from octavo.spec import ModelSpec
from tests.interpreter import mend
from tests.models.batches import Row, make_batch, placed
from tests.native import native

CPU = torch.device("cpu")
PAGE_SIZE, WINDOW, NUM_PAGES = 4, 7, 120
WINDOWS = (0, WINDOW, WINDOW, WINDOW)  # 1 and 3 layers: four groups, and pages of one layer
MIX = [(30, 1), (3, 1), (19, 1), (0, 13), (16, 6)]  # (computed before, in this step) of each row
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from Triton's interpreter


def spec() -> ModelSpec:
    return ModelSpec("test", 4, 64, 4, 2, 16, 8, 8, 1024, windows=WINDOWS)


def layer_of(index: int, window: int) -> LayerHeads:
    return LayerHeads(index, 4, 2, 16, 0.25, window)


def heads_of(seed: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 8, 16, generator=torch.Generator().manual_seed(seed))


def grouped(batches: list[Batch]) -> Batch:
    return batches[0].in_groups(
        torch.stack([batch.slots for batch in batches]), torch.stack([batch.page_table for batch in batches])
    )


def steps(pages: list[list[list[int]]]) -> list[list[Batch]]:
    """For each step (each row's first tokens alone, then the mix together), the batch of each group."""
    by_group = []
    for tables in pages:
        rows = [Row([0] * 100, table) for table in tables]
        batches = [make_batch([(row, before)], PAGE_SIZE) for row, (before, _) in zip(rows, MIX, strict=True) if before]
        by_group.append([*batches, make_batch([(row, n) for row, (_, n) in zip(rows, MIX, strict=True)], PAGE_SIZE)])
    return [list(parts) for parts in zip(*by_group, strict=True)]


def run(backend: AttentionBackend, batches: list[Batch], layers: list[LayerHeads], place: torch.device) -> torch.Tensor:
    for number, batch in enumerate(batches):
        backend.plan(batch)
        outputs = [
            backend.run(layer, heads_of(10 * number + layer.index, batch.num_tokens).to(place), None, batch)
            for layer in layers
        ]
    return torch.stack(outputs).cpu()


@pytest.mark.parametrize("name", ["reference", "native_cpu", "triton"])
def test_layers_that_share_a_store_do_not_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = spec().page_layout(1024)
    assert (layout.windows, layout.num_places) == (WINDOWS, 1)
    free = random.Random(3).sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    pages = [[[free.pop() for _ in range(-(-sum(part) // PAGE_SIZE))] for part in MIX] for _ in WINDOWS]
    layers = [layer_of(index, window) for index, window in enumerate(WINDOWS)]

    backend: AttentionBackend
    place = CPU
    if name == "triton":
        pytest.importorskip("triton")
        from octavo.attention.triton import TritonAttention

        mend(monkeypatch)
        place = torch.device("cuda") if torch.cuda.is_available() else CPU
        backend = GroupedAttention([TritonAttention() for _ in layout.windows], layout.group_of)
    else:
        kernels = native() if name == "native_cpu" else None
        backend, _ = choose(spec(), CPU, torch.float32, torch.float32, name, kernels, layout)
    shape = backend.kv_shape(spec(), NUM_PAGES, PAGE_SIZE, 1)
    backend.bind([torch.full(shape, 50.0, device=place)] * 4, 8)
    batches = [grouped([placed(batch, place) for batch in parts]) for parts in steps(pages)]
    found = run(backend, batches, layers, place)

    for index, layer in enumerate(layers):
        alone = ReferenceAttention()
        alone.bind([torch.full(alone.kv_shape(spec(), NUM_PAGES, PAGE_SIZE, 1), 50.0)] * 4, 8)
        expected = run(alone, [parts[layout.group_of[index]] for parts in steps(pages)], [layer], CPU)
        torch.testing.assert_close(found[index], expected[0], atol=1e-5, rtol=1e-4)
