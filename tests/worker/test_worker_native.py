"""A request's logits are the same bits at any batch size, chunking and number of threads, whatever holds the weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.choose import choose
from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.models import load_family
from octavo.parallel import Group
from octavo.worker.native import WholeSteps, record
from tests.models import checkpoints
from tests.models.batches import Row, Store, make_batch
from tests.models.walk import CPU, tensors
from tests.native import native

HELD = {
    "float32": (torch.float32, ""),
    "bfloat16": (torch.bfloat16, ""),
    "int8": (torch.float32, "int8"),
    "int4": (torch.float32, "int4"),
}
MAKERS = {"llama": checkpoints.llama, "qwen3": checkpoints.qwen3, "gpt2": checkpoints.gpt2}
MAX_TOKENS, MAX_ROWS = 64, 8


def build(family_name: str, held: str, num_threads: int, kv_dtype: torch.dtype) -> tuple[WholeSteps, Store]:
    kernels, (weight_dtype, quantization) = native(num_threads), HELD[held]
    reference = MAKERS[family_name]()
    config = reference.config.to_dict()
    family = load_family(config["model_type"])
    spec = family.spec(config)
    attention, _ = choose(spec, CPU, torch.float32, kv_dtype, "native_cpu", kernels)
    context = BuildContext(
        Group.single(), torch.float32, CPU, attention, 4,
        quantization=quantization, native=kernels, weight_dtype=weight_dtype,
    )  # fmt: skip
    model = family.Model(config, spec, context)
    model.load(tensors(reference))
    store = Store(spec, attention, dtype=kv_dtype)
    with torch.inference_mode():
        steps = record(model, kernels, MAX_TOKENS, MAX_ROWS)
    assert isinstance(steps, WholeSteps), steps
    return steps, store


def last_logits(steps: WholeSteps, store: Store, prompts: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
    """Of each prompt's last token, the prompts going side by side, cut as `chunks` say."""
    rows = [store.row(tokens) for tokens in prompts]
    found: dict[int, torch.Tensor] = {}
    turn = 0
    with torch.inference_mode():
        while waiting := [row for row in rows if row.computed < len(row.tokens)]:
            parts: list[tuple[Row, int]] = []
            for row in waiting[:MAX_ROWS]:
                turn += 1
                left = MAX_TOKENS - sum(count for _, count in parts)
                count = min(chunks[turn % len(chunks)], len(row.tokens) - row.computed, left)
                if count:
                    parts.append((row, count))
            parts.sort(key=lambda part: part[1] > 1)
            batch: Batch = make_batch(parts, store.page_size)
            logits = steps.run(batch).clone()
            for (row, _), result in zip(parts, logits, strict=True):
                found[id(row)] = result
    store.free += [page for row in rows for page in row.pages]
    return [found[id(row)] for row in rows]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.int8], ids=["32 bits", "16 bits", "8 bits"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("family", MAKERS)
def test_same_bits_whatever_the_company(family: str, held: str, kv_dtype: torch.dtype) -> None:
    builds = [build(family, held, num_threads, kv_dtype) for num_threads in (1, 2, 3)]

    @settings(max_examples=6, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
        chunks=st.lists(st.integers(1, 30), min_size=1, max_size=5),
        seed=st.integers(0, 2**30),
    )
    def check(lengths: list[int], chunks: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(0, 160, (length,), generator=generator).tolist() for length in lengths]
        alone = [last_logits(*builds[0], [prompt], [MAX_TOKENS])[0] for prompt in prompts]
        assert all(logits.isfinite().all() and logits.std() > 0.05 for logits in alone)
        for steps, store in builds:
            for found, expected in zip(last_logits(steps, store, prompts, chunks), alone, strict=True):
                assert torch.equal(found, expected)

    check()
