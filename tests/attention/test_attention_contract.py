"""Every backend against reference.py, over shapes, dtypes, page sizes and mixes of decodes and chunks."""

import dataclasses
import importlib
import itertools
import pkgutil
import random

import pytest
import torch

from octavo import attention
from octavo.attention.base import AttentionBackend, LayerHeads
from octavo.attention.choose import backend_class, choose
from octavo.attention.reference import ReferenceAttention
from octavo.config import ATTENTION_BACKENDS, ModelConfig
from octavo.errors import ConfigError
from octavo.spec import ModelSpec
from tests.models.batches import Row, make_batch
from tests.native import native

CPU = torch.device("cpu")
# Every backend that runs on a CPU, compared with the reference. Those of GPUs have files of their own.
BACKENDS = [name for name in ATTENTION_BACKENDS if name not in ("triton", "flashinfer", "reference")]
HEADS = [(1, 1, 8), (4, 4, 16), (9, 3, 64), (8, 1, 32), (6, 2, 20)]  # query heads, KV heads, head size
# (computed before, in this step) of each row
MIXES = {
    "one decode": [(0, 1)],
    "one long decode": [(90, 1)],
    "even decodes": [(17, 1), (18, 1), (19, 1)],
    "ragged decodes": [(0, 1), (3, 1), (4, 1), (31, 1), (63, 1)],
    "very ragged decodes": [(900, 1), (2, 1), (880, 1), (5, 1), (0, 1), (300, 1), (299, 1)],
    "one prompt": [(0, 23)],
    "one chunk": [(13, 11)],
    "two prompts": [(0, 8), (0, 9)],
    "everything": [(5, 1), (700, 1), (1, 1), (0, 16), (16, 16), (40, 3), (0, 2)],
}


def make_spec(heads: tuple[int, int, int], num_layers: int = 2) -> ModelSpec:
    num_heads, num_kv_heads, size = heads
    return ModelSpec("test", num_layers, num_heads * size, num_heads, num_kv_heads, size, 8, 8, 1024)


def layer_of(spec: ModelSpec, index: int = 0) -> LayerHeads:
    # From far below the keys' scores to far above them.
    sinks = torch.linspace(-9.0, 9.0, spec.num_heads) if spec.has_sinks else None
    return LayerHeads(index, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size**-0.5, sinks=sinks)


def chosen(spec: ModelSpec, dtype: torch.dtype, name: str) -> AttentionBackend:
    return choose(spec, CPU, dtype, dtype, name, native() if name == "native_cpu" else None)[0]


def side_by_side(stores: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same stores, with the layers' parts of a page side by side: between the pages of one store lie the other stores' pages."""
    return list(torch.stack(stores, 1).unbind(1))


def attend(
    backend: AttentionBackend,
    spec: ModelSpec,
    mix: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype,
    seed: int,
    broken_share: float = 0.0,
    first: int = 0,
) -> torch.Tensor:
    """Return all layers' outputs of the mixed step, over stores full of stale values. Some keys and values may be broken. `first`: the
    first position that the mixed step sees."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_pages = 2 + sum(-(-(before + count) // page_size) for before, count in mix)
    pages = rng.sample(range(1, num_pages), num_pages - 1)
    rows = [Row([0] * 2000, [pages.pop() for _ in range(-(-(before + count) // page_size))]) for before, count in mix]
    shape = backend.kv_shape(spec, num_pages, page_size, 1)
    assert shape[backend.page_dim] == num_pages
    stores = [torch.full(shape, 50.0, dtype=dtype) for _ in range(spec.num_layers)]
    backend.bind(side_by_side(stores) if backend.pages_may_lie_apart else stores, len(mix))

    def random_heads(num_tokens: int) -> torch.Tensor:
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        heads = torch.randn(num_tokens, num_heads, spec.head_size, generator=generator).to(dtype)
        if broken_share:
            kv = heads[:, spec.num_heads :]
            for value in (torch.nan, torch.inf, -torch.inf):
                kv.masked_fill_(torch.rand(kv.shape, generator=generator) < broken_share, value)
        return heads

    layers = [layer_of(spec, index) for index in range(spec.num_layers)]

    for row, (before, _) in zip(rows, mix, strict=True):
        if before:
            step = make_batch([(row, before)], page_size)
            backend.plan(step)
            for layer in layers:
                backend.run(layer, random_heads(before), None, step)
    batch = make_batch([(row, count) for row, (_, count) in zip(rows, mix, strict=True)], page_size)
    backend.plan(batch)
    layers = [dataclasses.replace(layer, first=first) for layer in layers]
    outputs = [backend.run(layer, random_heads(batch.num_tokens), None, batch) for layer in layers]
    return torch.stack(outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "page_size"), list(itertools.product(HEADS, (1, 16))))
def test_backend_equals_the_reference(backend: str, mix: str, heads: tuple[int, int, int], page_size: int) -> None:
    spec = make_spec(heads)
    tested = chosen(spec, torch.float32, backend)
    found = attend(tested, spec, MIXES[mix], page_size, torch.float32, seed=11)
    expected = attend(ReferenceAttention(), spec, MIXES[mix], page_size, torch.float32, seed=11)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mix", "heads"), [("everything", (6, 2, 20)), ("very ragged decodes", (9, 3, 64))])
def test_sinks(backend: str, mix: str, heads: tuple[int, int, int]) -> None:
    spec = dataclasses.replace(make_spec(heads), has_sinks=True)
    found = attend(chosen(spec, torch.float32, backend), spec, MIXES[mix], 16, torch.float32, seed=11)
    expected = attend(ReferenceAttention(), spec, MIXES[mix], 16, torch.float32, seed=11)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    without = attend(ReferenceAttention(), make_spec(heads), MIXES[mix], 16, torch.float32, seed=11)
    assert (found - without).abs().max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", [[(5, 1), (700, 1), (1, 1), (16, 16), (40, 3), (1, 2)], [(300, 1)] * 9])
def test_first_keys_that_no_token_sees(backend: str, mix: list[tuple[int, int]]) -> None:
    """As for a draft head, which has nothing at position 0."""
    spec = make_spec((6, 2, 20))
    found = attend(chosen(spec, torch.float32, backend), spec, mix, 16, torch.float32, seed=11, first=1)
    expected = attend(ReferenceAttention(), spec, mix, 16, torch.float32, seed=11, first=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    seen = attend(ReferenceAttention(), spec, mix, 16, torch.float32, seed=11)
    assert (found - seen).abs().max() > 1e-3


def test_the_reference_gives_a_sink_its_share_of_the_softmax() -> None:
    spec = dataclasses.replace(make_spec((2, 1, 8), num_layers=1), has_sinks=True)
    backend = ReferenceAttention()
    backend.bind([torch.zeros(backend.kv_shape(spec, 2, 4, 1))], 1)
    heads = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(5))
    q, k, v = heads[2, :2].clone(), heads[:, 2].clone(), heads[:, 3].clone()
    batch = make_batch([(Row([0] * 3, [1]), 3)], 4)
    sinks = torch.tensor([0.5, -2.0])
    found = backend.run(dataclasses.replace(layer_of(spec), sinks=sinks), heads, None, batch)
    powers = (q @ k.T * 8**-0.5).exp()  # [H, L]
    expected = powers @ v / (powers.sum(dim=1) + sinks.exp())[:, None]
    torch.testing.assert_close(found[2].view(2, 8), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch_cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_stores(backend: str, dtype: torch.dtype) -> None:
    spec = make_spec((6, 2, 32))
    tested = chosen(spec, dtype, backend)
    found = attend(tested, spec, MIXES["everything"], 4, dtype, seed=12)
    expected = attend(ReferenceAttention(), spec, MIXES["everything"], 4, dtype, seed=12)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=3e-2, rtol=3e-2)


def test_the_reference_is_plain_causal_attention() -> None:
    spec = make_spec((4, 2, 8), num_layers=1)
    backend = ReferenceAttention()
    backend.bind([torch.full(backend.kv_shape(spec, 9, 4, 1), 50.0)], 1)
    torch.manual_seed(5)
    q, k, v = torch.randn(21, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
    batch = make_batch([(Row([0] * 21, [3, 1, 7, 2, 8, 5]), 21)], 4)
    backend.plan(batch)
    found = backend.run(layer_of(spec), torch.cat((q, k, v), dim=1), None, batch)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-5)


def test_choice_by_name_and_by_device() -> None:
    spec, float32, meta = make_spec((4, 2, 8)), torch.float32, torch.device("meta")

    def choice(device: torch.device, name: str = "auto", kv_dtype: torch.dtype = float32) -> tuple[str, str]:
        backend, why = choose(spec, device, float32, kv_dtype, name)
        return backend.name, why

    assert choice(CPU)[0] == "torch_cpu"
    assert choice(CPU, "reference") == ("reference", "attention by reference (as asked)")
    assert choice(CPU, kv_dtype=torch.float8_e4m3fn)[0] == "reference"
    name, why = choice(meta)
    assert name == "reference" and "torch_cpu: it runs on cpu, not on meta" in why
    with pytest.raises(
        ConfigError, match=r"no attention backend 'flash'; use auto or one of triton, flashinfer, native_cpu, torch"
    ):
        choice(CPU, "flash")
    with pytest.raises(ConfigError, match=r"torch_cpu: it runs on cpu, not on meta"):
        choice(meta, "torch_cpu")


def run_step(
    backend: AttentionBackend, spec: ModelSpec, steps: list[tuple[Row, int]], heads: torch.Tensor, page_size: int
) -> torch.Tensor:
    batch = make_batch(steps, page_size)
    backend.plan(batch)
    return backend.run(layer_of(spec), heads.clone(), None, batch)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_broken_numbers_stay_its_own(backend: str, value: float, dtype: torch.dtype) -> None:
    """Row `broken` shares steps with others that are padded with its page (0), then its pages get a new owner."""
    if backend == "native_cpu" and dtype != torch.float32:
        pytest.skip("it computes in float32")
    spec, page_size = make_spec((4, 2, 8), num_layers=1), 4
    generator = torch.Generator().manual_seed(31)
    numbers = [
        torch.randn(count, 8, 8, generator=generator).to(dtype) for count in (14, 3, 3, 5, 1)
    ]  # tokens of each step

    def outputs(is_broken: bool) -> list[torch.Tensor]:
        tested = chosen(spec, dtype, backend)
        tested.bind([torch.zeros(tested.kv_shape(spec, 12, page_size, 1), dtype=dtype)], 3)
        broken, short, long = Row([0] * 16, [0, 9]), Row([0] * 16, [5]), Row([0] * 16, [3, 7, 2])
        heads = [part.clone() for part in numbers]
        if is_broken:
            heads[0][:6, 4:, ::2] = value  # keys and values of its prompt …
            heads[0][:6, 4:, 1::2] = -value
            heads[1][0, 4:] = value  # … and of two decode steps
            heads[2][0, 4:] = value
        found = [run_step(tested, spec, [(broken, 6), (short, 2), (long, 6)], heads[0], page_size)[6:]]
        for step in (1, 2):  # `short` is padded with page 0 up to `long`'s pages
            steps = [(broken, 1), (short, 1), (long, 1)]
            found.append(run_step(tested, spec, steps, heads[step], page_size)[1:])
        later = Row([0] * 16, [0, 9])  # writes 6 of the 8 cells: the others still hold `broken`'s values
        found.append(run_step(tested, spec, [(later, 5)], heads[3], page_size))
        found.append(run_step(tested, spec, [(later, 1)], heads[4], page_size))
        return found

    for step, (found, expected) in enumerate(zip(outputs(True), outputs(False), strict=True)):
        assert expected.isfinite().all()
        assert torch.equal(found, expected), f"step {step}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", ["everything", "one prompt"])
def test_non_finite_keys_and_values_count_as_zero_in_every_backend(backend: str, mix: str) -> None:
    spec = make_spec((4, 2, 8))
    found, expected = (
        attend(chosen(spec, torch.float32, name), spec, MIXES[mix], 4, torch.float32, seed=11, broken_share=0.1)
        for name in (backend, "reference")
    )
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_flag_offers_every_backend() -> None:
    (flag,) = (f for f in dataclasses.fields(ModelConfig) if f.name == "attention_backend")
    assert {"auto", *ATTENTION_BACKENDS} == set(flag.metadata["choices"])
    for name in ATTENTION_BACKENDS:
        assert backend_class(name).name == name


def test_every_backend_of_the_folder_is_offered() -> None:
    for module in pkgutil.iter_modules(attention.__path__):
        things = vars(importlib.import_module(f"octavo.attention.{module.name}")).values()
        is_backend = any(isinstance(kind, type) and getattr(kind, "name", "") == module.name for kind in things)
        assert is_backend == (module.name in ATTENTION_BACKENDS), module.name
