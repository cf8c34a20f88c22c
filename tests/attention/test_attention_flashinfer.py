"""The flashinfer backend on a machine without the package: what it plans, refuses and writes.
torch stands in for the package's kernels and sees only what they are planned with; tests/gpu has the real ones."""

import importlib.util
import random
import sys
import types
from typing import Any, ClassVar

import pytest
import torch

from octavo.attention import flashinfer
from octavo.attention.base import AttentionBackend, LayerHeads
from octavo.attention.choose import choose
from octavo.attention.flashinfer import FlashInferAttention, PageLists
from octavo.attention.qk_norm_rope import HeadNorms
from octavo.attention.reference import ReferenceAttention, _attend
from octavo.errors import ConfigError
from octavo.spec import ModelSpec
from tests.attention.test_attention_contract import MIXES
from tests.models.batches import Row, make_batch, placed

CUDA = torch.device("cuda")


def spec_of(heads: tuple[int, int, int], num_layers: int = 1) -> ModelSpec:
    num_heads, num_kv_heads, size = heads
    return ModelSpec("test", num_layers, num_heads * size, num_heads, num_kv_heads, size, 8, 8, 4096)


def layers_of(heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str = "cpu") -> list[LayerHeads]:
    """Two layers that agree, and one with every option a layer may have, with bounds that a short row reaches."""
    plain = [LayerHeads(index, *heads, heads[2] ** -0.5) for index in (0, 2)]
    generator = torch.Generator().manual_seed(7)
    q_norm, k_norm = (torch.rand(2, heads[2], generator=generator) + 0.5).to(device, dtype)
    own = LayerHeads(1, *heads, 0.15, window=20, softcap=5.0, norms=HeadNorms(q_norm, k_norm, 1e-6))
    return [plain[0], own, plain[1]]


def make_rows(mix: list[tuple[int, int]], page_size: int, seed: int) -> tuple[list[Row], int]:
    """Return a row for each (computed before, in this step), over pages in random order, and the number of pages of a store."""
    num_pages = 2 + sum(-(-(before + count) // page_size) for before, count in mix)
    pages = random.Random(seed).sample(range(1, num_pages), num_pages - 1)
    return [Row([0] * 4096, [pages.pop() for _ in range(-(-sum(part) // page_size))]) for part in mix], num_pages


def attend(
    backend: AttentionBackend,
    layers: list[LayerHeads],
    mix: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 3,
) -> torch.Tensor:
    """Return all layers' outputs of the mixed step, over stores full of stale values."""
    generator = torch.Generator().manual_seed(seed)
    heads = (layers[0].num_heads, layers[0].num_kv_heads, layers[0].head_size)
    rows, num_pages = make_rows(mix, page_size, seed)
    shape = backend.kv_shape(spec_of(heads), num_pages, page_size, 1)
    backend.bind([torch.full(shape, 50.0, device=device).to(kv_dtype) for _ in layers], len(mix))

    def step(parts: list[tuple[Row, int]]) -> torch.Tensor:
        batch = placed(make_batch(parts, page_size), device)
        backend.plan(batch)
        angles = torch.outer(batch.positions.cpu().float(), torch.rand(heads[2] // 2, generator=generator))
        rotation = torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(device)
        outputs = []
        for layer in layers:
            numbers = torch.randn(batch.num_tokens, heads[0] + 2 * heads[1], heads[2], generator=generator)
            outputs.append(backend.run(layer, numbers.to(dtype).to(device), rotation, batch))
        return torch.stack(outputs)

    for row, (before, _) in zip(rows, mix, strict=True):
        if before:
            step([(row, before)])
    return step([(row, count) for row, (_, count) in zip(rows, mix, strict=True)])


# ── what is planned ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_row_is_given_its_own_pages(mix: str, page_size: int) -> None:
    rows, _ = make_rows(MIXES[mix], page_size, seed=1)
    for row, (before, _) in zip(rows, MIXES[mix], strict=True):
        row.computed = before
    parts = [(row, count) for row, (_, count) in zip(rows, MIXES[mix], strict=True)]
    lists = PageLists.of(make_batch(parts, page_size), page_size)

    parts.sort(key=lambda part: part[1] > 1)  # the order of a batch
    page_start, pages, last_lens, query_start = [0], [], [], [0]
    for row, count in parts:
        for position in range(row.computed):
            if position % page_size == 0:
                pages.append(row.pages[position // page_size])
        last_lens.append(next(length for length in range(1, page_size + 1) if (row.computed - length) % page_size == 0))
        page_start.append(len(pages))
        query_start.append(query_start[-1] + count)
    num = sum(count == 1 for _, count in parts)
    cut = page_start[num]
    found = [tensor.tolist() for tensor in lists.decodes()]
    assert found == [page_start[: num + 1], pages[:cut], last_lens[:num]]
    found = [tensor.tolist() for tensor in lists.chunks()]
    starts = [start - num for start in query_start[num:]]
    assert found == [starts, [start - cut for start in page_start[num:]], pages[cut:], last_lens[num:]]
    assert {tensor.dtype for tensor in (*lists.decodes(), *lists.chunks())} == {torch.int32}


def test_a_row_of_padding_has_no_pages() -> None:
    batch = make_batch([(Row([0] * 9, [5, 2, 3], computed=8), 1), (Row([0] * 9, [4]), 1)], 4)
    batch.seq_lens_host[1] = 0
    batch.seq_lens[1] = 0
    start, pages, last_lens = PageLists.of(batch, 4).decodes()
    assert (start.tolist(), pages.tolist(), last_lens.tolist()) == ([0, 3, 3], [5, 2, 3], [1, 0])


# ── the whole backend, around a package made of torch ───────────────────────────────────────────────


class TorchWrapper:
    """The common part of the package's two wrappers."""

    made: ClassVar[list["TorchWrapper"]] = []

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8 and not workspace.any()
        self.options, self.num_plans = options, 0
        self.made.append(self)

    def _plan(
        self, starts: list[torch.Tensor], indices: torch.Tensor, last: torch.Tensor, shape: tuple[int, ...],
        window_left: int, logits_soft_cap: float, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        num_heads, num_kv_heads, size, self.page_size = shape
        self.query_start, self.page_start = (start.tolist() for start in starts)
        self.indices, self.last = indices, last.tolist()
        assert self.query_start[0] == self.page_start[0] == 0 and self.page_start[-1] == len(indices)
        assert all(1 <= length <= self.page_size for length in self.last)
        self.layer = LayerHeads(0, num_heads, num_kv_heads, size, sm_scale, window_left + 1, logits_soft_cap)
        self.dtypes = (q_data_type, kv_data_type)
        self.num_plans += 1

    def run(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert (q.dtype, kv.dtype) == self.dtypes and len(q) == self.query_start[-1] and out.is_contiguous()
        for row, last in enumerate(self.last):
            pages = self.indices[self.page_start[row] : self.page_start[row + 1]].long()
            cells = kv[pages].float().permute(1, 0, 3, 2, 4).flatten(1, 2)  # [2, L, Hkv, D]
            keys, values = cells[:, : (len(pages) - 1) * self.page_size + last]
            part = slice(self.query_start[row], self.query_start[row + 1])
            out[part] = _attend(self.layer, q[part].float(), keys, values).to(q.dtype)
        return out


class TorchDecode(TorchWrapper):
    def plan(self, indptr, indices, last_page_len, num_heads, num_kv_heads, size, page_size, **settings):  # type: ignore[no-untyped-def]
        queries = torch.arange(len(last_page_len) + 1)
        self._plan([queries, indptr], indices, last_page_len, (num_heads, num_kv_heads, size, page_size), **settings)


class TorchPrefill(TorchWrapper):
    def plan(  # type: ignore[no-untyped-def]
        self, query_start, indptr, indices, last_page_len, num_heads, num_kv_heads, size, page_size, *, causal, **settings
    ):  # fmt: skip
        assert causal
        shape = (num_heads, num_kv_heads, size, page_size)
        self._plan([query_start, indptr], indices, last_page_len, shape, **settings)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[TorchWrapper]:
    module = types.ModuleType("flashinfer")
    module.__dict__["BatchDecodeWithPagedKVCacheWrapper"] = TorchDecode
    module.__dict__["BatchPrefillWithPagedKVCacheWrapper"] = TorchPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 64)
    monkeypatch.setattr(TorchWrapper, "made", [])
    return TorchWrapper


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.float16), (16, torch.bfloat16)])
def test_backend_equals_the_reference(
    package: type[TorchWrapper], mix: str, page_size: int, dtype: torch.dtype
) -> None:
    found, expected = (
        attend(backend, layers_of((4, 2, 8), dtype), MIXES[mix], page_size, dtype, dtype)
        for backend in (FlashInferAttention(), ReferenceAttention())
    )
    assert torch.equal(found, expected)


def test_8_bit_pages(package: type[TorchWrapper]) -> None:
    arguments = (layers_of((6, 2, 16), torch.bfloat16), MIXES["everything"], 4, torch.bfloat16, torch.float8_e4m3fn)
    assert torch.equal(attend(FlashInferAttention(), *arguments), attend(ReferenceAttention(), *arguments))
    # The newest kernels cannot read pages of another type than the queries'.
    assert {wrapper.options["backend"] for wrapper in package.made} == {"fa2"}


def test_layers_that_agree_share_a_plan(package: type[TorchWrapper]) -> None:
    backend, layers = FlashInferAttention(), layers_of((4, 2, 8), torch.bfloat16)
    mix = [(9, 1), (3, 1), (0, 5)]
    attend(backend, layers, mix, 4, torch.bfloat16, torch.bfloat16)
    decode, prefill, own_decode, own_prefill = package.made
    # Two chunks, then the mixed step: decodes are in the last of them only.
    assert (decode.num_plans, prefill.num_plans) == (own_decode.num_plans, own_prefill.num_plans) == (1, 3)
    attend(backend, layers, mix, 4, torch.bfloat16, torch.bfloat16)  # with its own stores: no wrapper is made again
    assert len(package.made) == 4


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, bfloat16 = FlashInferAttention(), torch.bfloat16

    def refusal(size: int, dtype: torch.dtype = bfloat16, kv_dtype: torch.dtype = bfloat16) -> str | None:
        return backend.supports(spec_of((4, 2, size)), CUDA, dtype, kv_dtype)

    monkeypatch.setattr(flashinfer, "_can_compile", lambda: True)
    assert refusal(80) == "its heads are of 64, 128, 256 numbers, not of 80"
    assert refusal(64, torch.float32, torch.float32) == "it computes in bfloat16 or float16, not in torch.float32"
    wrong = "its pages hold torch.bfloat16 or torch.float8_e4m3fn, not torch.float16"
    assert refusal(128, kv_dtype=torch.float16) == wrong
    for capability, expected in (((9, 0), None), ((8, 0), "8-bit pages need a GPU of NVIDIA's Ada or Hopper")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        found = refusal(128, kv_dtype=torch.float8_e4m3fn)
        assert found is None if expected is None else str(found).startswith(expected)
    assert refusal(64, torch.float16, torch.float16) is refusal(256) is None
    monkeypatch.setattr(flashinfer, "_can_compile", lambda: False)
    assert "compiles its kernels with nvcc, which is not here" in str(refusal(128))


def test_nvcc_is_looked_for_where_the_package_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, empty = tmp_path_factory.mktemp("cuda"), tmp_path_factory.mktemp("empty")
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert flashinfer._can_compile()
    monkeypatch.setenv("CUDA_HOME", str(empty))
    assert not flashinfer._can_compile()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert flashinfer._can_compile()


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="the package is installed")
def test_it_is_passed_over_where_it_is_not_installed() -> None:
    spec, bfloat16 = spec_of((4, 2, 128)), torch.bfloat16
    with pytest.raises(ConfigError, match=r"flashinfer: the package flashinfer is not installed"):
        choose(spec, CUDA, bfloat16, bfloat16, "flashinfer")
    with pytest.raises(ConfigError, match=r"flashinfer: it runs on cuda, not on cpu"):
        choose(spec, torch.device("cpu"), bfloat16, bfloat16, "flashinfer")
    assert choose(spec, torch.device("cpu"), bfloat16, bfloat16)[0].name == "torch_cpu"
