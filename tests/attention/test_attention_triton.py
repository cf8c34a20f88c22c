"""The Triton backend against reference.py: in Triton's interpreter where there is no GPU, compiled where there is one."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.attention.base import AttentionBackend, LayerHeads
from octavo.attention.qk_norm_rope import HeadNorms
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton import TritonAttention
from octavo.attention.triton_invariant import InvariantTritonAttention
from octavo.batch import Batch
from octavo.spec import ModelSpec
from tests.interpreter import cases, mend
from tests.models.batches import Row, make_batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (tokens before this step, tokens in it)
MIXES = {
    "decodes": cases([(0, 1), (16, 1), (63, 1)], (0, 1), (16, 1), (23, 1)),
    "prompts": cases([(0, 8), (0, 33)], (0, 8), (0, 17)),
    "everything": cases([(5, 1), (40, 1), (0, 16), (20, 3)], (5, 1), (18, 1), (0, 9), (16, 3)),
}
HEADS = cases([(4, 2, 16), (3, 1, 80), (2, 2, 64), (32, 8, 128), (16, 1, 256)], (4, 2, 16), (3, 1, 80))
# A padding query sees no cell: numpy warns about that, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


@dataclasses.dataclass
class Case:
    heads: tuple[int, int, int]
    mix: list[tuple[int, int]]
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    has_norms: bool = False
    shared_pages: int = 0  # leading pages that all rows share
    has_sinks: bool = False
    first: int = 0  # the first position that the mixed step sees

    @property
    def spec(self) -> ModelSpec:
        num_heads, num_kv_heads, size = self.heads
        return ModelSpec("test", 1, num_heads * size, num_heads, num_kv_heads, size, 8, 8, 1024)

    def layer(self) -> LayerHeads:
        num_heads, num_kv_heads, size = self.heads
        norms = None
        if self.has_norms:
            weights = torch.linspace(0.5, 1.5, 2 * size).to(DEVICE, self.dtype)
            norms = HeadNorms(weights[:size], weights[size:], 1e-6)
        sinks = torch.linspace(-9.0, 9.0, num_heads, device=DEVICE) if self.has_sinks else None
        return LayerHeads(0, num_heads, num_kv_heads, size, size**-0.5, self.window, self.softcap, norms, sinks)


def to_device(batch: Batch) -> Batch:
    moved = {
        field.name: value.to(DEVICE)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)


def attend(backend: AttentionBackend, case: Case, seed: int = 3) -> torch.Tensor:
    """Return the outputs of the mixed step, over a store full of stale values."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_pages = 2 + sum(-(-(before + count) // case.page_size) for before, count in case.mix)
    free = rng.sample(range(1, num_pages), num_pages - 1)
    common = [free.pop() for _ in range(case.shared_pages)]
    rows = []
    for before, count in case.mix:
        num_own = -(-(before + count) // case.page_size) - case.shared_pages
        rows.append(Row([0] * 6000, common + [free.pop() for _ in range(num_own)]))
    kv_dtype = case.kv_dtype or case.dtype
    shape = backend.kv_shape(case.spec, num_pages, case.page_size, 1)
    backend.bind([torch.full(shape, 50.0).to(DEVICE, kv_dtype)], len(case.mix))
    layer = case.layer()

    def step(batch: Batch) -> torch.Tensor:
        num_heads, num_kv_heads, size = case.heads
        heads = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, size, generator=generator)
        angles = torch.outer(batch.positions.float(), torch.linspace(1.0, 0.01, size // 2))
        rotation = torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(DEVICE)
        batch = to_device(batch)
        backend.plan(batch)
        return backend.run(layer, heads.to(DEVICE, case.dtype), rotation, batch)

    for row, (before, _) in zip(rows, case.mix, strict=True):
        if before:
            step(make_batch([(row, before)], case.page_size))
    batch = make_batch([(row, count) for row, (_, count) in zip(rows, case.mix, strict=True)], case.page_size)
    if case.shared_pages:
        batch.prefix_len = torch.tensor([case.shared_pages * case.page_size], dtype=torch.int32)
    layer = dataclasses.replace(layer, first=case.first)
    return step(batch).float()


def agree(case: Case, tolerance: float = 1e-4, backend: type[TritonAttention] = TritonAttention) -> None:
    found, expected = attend(backend(), case), attend(ReferenceAttention(), case)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "page_size"), cases(itertools.product(HEADS, (4, 16)), (HEADS[0], 16), (HEADS[1], 4))
)
def test_equals_the_reference(heads: tuple[int, int, int], page_size: int, mix: str) -> None:
    agree(Case(heads, MIXES[mix], page_size))


@pytest.mark.parametrize("mix", cases(MIXES, "prompts", "everything"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(mix: str, dtype: torch.dtype) -> None:
    agree(Case((4, 2, 64), MIXES[mix], dtype=dtype), tolerance=3e-2)


@pytest.mark.parametrize("mix", cases(["decodes", "everything"], "everything"))
@pytest.mark.parametrize("options", [{"window": 5}, {"window": 40}, {"softcap": 2.0}, {"has_norms": True}])
def test_window_cap_and_norms(mix: str, options: dict[str, float]) -> None:
    agree(Case((4, 2, 64), MIXES[mix], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 5])
def test_sinks(window: int) -> None:
    agree(Case((6, 2, 16), MIXES["everything"], window=window, has_sinks=True))
    if not window:
        # In several chunks that are merged, and behind a shared prefix.
        agree(Case((6, 2, 16), [(150, 1), (40, 1)], has_sinks=True))
        agree(Case((6, 2, 16), [(33, 1), (32, 1)], has_sinks=True, shared_pages=2))


@pytest.mark.parametrize("mix", cases(MIXES, "everything"))
def test_8_bit_store(mix: str) -> None:
    agree(Case((4, 2, 64), MIXES[mix], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn), tolerance=3e-2)


def test_whole_prompts_attend_to_what_an_8_bit_store_holds() -> None:
    """Not to what was rounded: the tolerance is far below the rounding of keys and values."""
    whole = Case((4, 2, 64), MIXES["prompts"], kv_dtype=torch.float8_e4m3fn)
    agree(whole)
    exact = attend(ReferenceAttention(), dataclasses.replace(whole, kv_dtype=None))
    assert (attend(TritonAttention(), whole) - exact).abs().max() > 1e-2


@pytest.mark.parametrize("page_size", cases([4, 16], 4))
def test_a_shared_prefix_is_read_once_for_all(page_size: int) -> None:
    mix = [(2 * page_size + 1, 1), (2 * page_size, 1), (3 * page_size - 2, 1)]
    for heads in HEADS:
        agree(Case(heads, mix, page_size, shared_pages=2))
    agree(Case(HEADS[0], [*mix, (2 * page_size, 9)], page_size, shared_pages=1))


BACKENDS = [TritonAttention, InvariantTritonAttention]
BEHIND = {
    "decodes": [(1, 1), (16, 1), (150, 1), (23, 1)],
    "chunks": [(1, 8), (20, 3), (40, 70)],
    "both": [(2, 1), (15, 1), (1, 1), (33, 9), (1, 31)],
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mix", cases(BEHIND, "decodes", "both"))
@pytest.mark.parametrize("first", [1, 3])
def test_first_keys_that_no_token_sees(backend: type[TritonAttention], mix: str, first: int) -> None:
    """As for a draft head, which has nothing at position 0."""
    rows = [(before + first - 1, count) for before, count in BEHIND[mix]]
    for heads, page_size in cases(itertools.product(HEADS, (4, 16)), (HEADS[0], 16)):
        case = Case(heads, rows, page_size, first=first)
        agree(case, tolerance=3e-4, backend=backend)
        seen = attend(backend(), dataclasses.replace(case, first=0))
        assert (attend(backend(), case) - seen).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda kind: kind.__name__)
def test_first_keys_are_not_seen_behind_a_shared_prefix(backend: type[TritonAttention]) -> None:
    agree(Case((4, 2, 16), [(33, 1), (32, 1), (40, 1)], shared_pages=2, first=1), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda kind: kind.__name__)
def test_a_token_that_sees_no_key_gets_zeros(backend: type[TritonAttention]) -> None:
    """As in a trial step of a head, which begins at position 0."""
    found = attend(backend(), Case((4, 2, 16), [(0, 1), (18, 1), (0, 9)], first=1))
    assert found.isfinite().all()
    assert found.any(dim=1).tolist() == [False, True, False, *[True] * 8]


@pytest.mark.gpu
def test_many_long_rows() -> None:
    rng = random.Random(1)
    lens = [rng.choice((1, 15, 16, 17, 300, 1000, 5000)) for _ in range(60)]
    for heads in ((16, 8, 128), (32, 8, 128)):
        agree(Case(heads, [(length, 1) for length in lens], dtype=torch.bfloat16), tolerance=3e-2)
        rows = [(length, rng.choice((1, 7, 130))) for length in lens]
        agree(Case(heads, rows, dtype=torch.bfloat16), tolerance=3e-2)
        agree(Case(heads, rows, dtype=torch.bfloat16, first=1), tolerance=3e-2)


@pytest.mark.parametrize(("capability", "is_taken"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_8_bit_pages_are_refused_where_they_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec, place = Case((4, 2, 64), []).spec, torch.device("cuda", 0)
    refusal = TritonAttention().supports(spec, place, torch.bfloat16, torch.float8_e4m3fn)
    assert (refusal is None) == is_taken
    assert TritonAttention().supports(spec, place, torch.bfloat16, torch.bfloat16) is None


@pytest.mark.parametrize("options", [{"has_norms": True, "window": 9}, {"softcap": 3.0, "has_sinks": True}], ids=str)
def test_the_one_of_deterministic_equals_the_reference(options: dict[str, Any]) -> None:
    agree(Case((4, 2, 16), MIXES["everything"], **options), backend=InvariantTritonAttention)


def test_the_one_of_deterministic_reads_shared_pages_for_each_row() -> None:
    agree(Case((4, 2, 16), [(32, 1)] * 3, shared_pages=2), backend=InvariantTritonAttention)
