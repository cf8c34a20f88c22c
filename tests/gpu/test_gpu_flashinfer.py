"""The flashinfer backend with the real package on a real GPU, against reference.py.
The package compiles five modules of kernels (heads of 128, bfloat16), which takes minutes without its cache."""

import warnings

import pytest
import torch

from octavo.attention.base import LayerHeads
from octavo.attention.choose import choose
from octavo.attention.flashinfer import FlashInferAttention
from octavo.attention.reference import ReferenceAttention
from tests.attention.test_attention_contract import MIXES
from tests.attention.test_attention_flashinfer import attend, layers_of, placed, spec_of
from tests.models.batches import Row, make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of the package itself
    pytest.importorskip("flashinfer")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
HEADS = (16, 8, 128)
BFLOAT16 = torch.bfloat16
LONG = [(3000, 1), (17, 1), (1500, 1), (2000, 300), (0, 700), (1, 2)]


def test_it_is_chosen_when_asked_for() -> None:
    backend, why = choose(spec_of(HEADS), GPU, BFLOAT16, BFLOAT16, "flashinfer")
    assert (backend.name, why) == ("flashinfer", "attention by flashinfer (as asked)")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mix", [*MIXES, "long"])
def test_backend_equals_the_reference(mix: str, page_size: int) -> None:
    """Layers with and without a window, a soft cap and norms, one after the other."""
    check(HEADS, LONG if mix == "long" else MIXES[mix], page_size, BFLOAT16)


@pytest.mark.parametrize("heads", [(8, 8, 128), (14, 2, 128), (32, 8, 128)])
def test_any_number_of_query_heads_for_a_kv_head(heads: tuple[int, int, int]) -> None:
    check(heads, LONG, 16, BFLOAT16)


@pytest.mark.parametrize("mix", ["everything", "long"])
def test_8_bit_pages(mix: str) -> None:
    plain = LayerHeads(0, *HEADS, HEADS[2] ** -0.5)  # one module fewer to compile
    check(HEADS, LONG if mix == "long" else MIXES[mix], 16, torch.float8_e4m3fn, [plain])


def check(
    heads: tuple[int, int, int],
    mix: list[tuple[int, int]],
    page_size: int,
    kv_dtype: torch.dtype,
    layers: list[LayerHeads] | None = None,
) -> None:
    layers = layers or layers_of(heads, BFLOAT16, GPU)
    found, expected = (
        attend(backend, layers, mix, page_size, BFLOAT16, kv_dtype, GPU).float()
        for backend in (FlashInferAttention(), ReferenceAttention())
    )
    assert found.isfinite().all()
    for layer, one, other in zip(layers, found, expected, strict=True):
        assert (one - other).norm() < 2e-2 * other.norm(), layer  # q and k are rounded once, there twice
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


def test_steps_launched_ahead_of_the_gpu_keep_their_plans() -> None:
    """The host plans the next steps while the GPU has not begun this one: no plan may affect another step."""
    layers, page_size, generator = layers_of(HEADS, BFLOAT16, GPU), 16, torch.Generator().manual_seed(5)
    rows = [Row([0] * 2000, list(range(1 + 100 * row, 101 + 100 * row))) for row in range(8)]
    sizes = [[(row, (7 * step + row) % 8 + 1) for row in range(1 + step % 8)] for step in range(40)]
    batches = [placed(make_batch([(rows[row], size) for row, size in step], page_size), GPU) for step in sizes]
    numbers = [torch.randn(batch.num_tokens, 32, 128, generator=generator).to(GPU, BFLOAT16) for batch in batches]

    def outputs(is_ahead: bool) -> list[torch.Tensor]:
        backend = FlashInferAttention()
        shape = backend.kv_shape(spec_of(HEADS), 801, page_size, 1)
        backend.bind([torch.zeros(shape, dtype=BFLOAT16, device=GPU) for _ in layers], len(rows))
        found = []
        for batch, heads in zip(batches, numbers, strict=True):
            if is_ahead:
                torch.cuda._sleep(10_000_000)  # some milliseconds
            else:
                torch.cuda.synchronize()
            backend.plan(batch)
            found += [backend.run(layer, heads.clone(), None, batch) for layer in layers]
        torch.cuda.synchronize()
        return found

    outputs(False)  # compiles what is missing
    for step, (found, expected) in enumerate(zip(outputs(True), outputs(False), strict=True)):
        assert torch.equal(found, expected), f"output {step}"
