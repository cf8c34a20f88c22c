"""A request's logits are the same bits at any batch size, chunking and number of threads, whatever holds the weights."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import LLM
from octavo.attention.choose import choose
from octavo.batch import Batch
from octavo.config import Config, replace
from octavo.device import Device
from octavo.errors import ConfigError
from octavo.kernels.cpu.build import NoCompiler
from octavo.kernels.cpu.library import Kind, library
from octavo.limits import resolve
from octavo.models import load_family
from octavo.weights.methods.cpu_native import kind_name
from octavo.worker.cpu_steps import CpuSteps, find_native, record
from tests.contexts import context
from tests.engine.exactness import check, greedy_references
from tests.models import checkpoints
from tests.models.batches import Row, Store, make_batch
from tests.models.test_models_gpt_neox import neox
from tests.models.test_models_opt import opt
from tests.models.walk import CPU, tensors
from tests.models.walk import prompts as random_prompts
from tests.native import native

HELD = {
    "float32": (torch.float32, ""),
    "bfloat16": (torch.bfloat16, ""),
    "int8": (torch.float32, "int8"),
    "int4": (torch.float32, "int4"),
}
MAKERS = {"llama": checkpoints.llama, "qwen3": checkpoints.qwen3, "gpt2": checkpoints.gpt2}
OTHERS = {"opt": opt, "gpt_neox": neox}  # built of the same operations: one case each
KV_DTYPES = (torch.float32, torch.float16, torch.int8)
MAX_TOKENS, MAX_ROWS = 64, 8


def build(family_name: str, held: str, num_threads: int, kv_dtype: torch.dtype) -> tuple[CpuSteps, Store]:
    kernels, (weight_dtype, quantization) = native(num_threads), HELD[held]
    reference = (MAKERS | OTHERS)[family_name]()
    config = reference.config.to_dict()
    family = load_family(config["model_type"])
    spec = family.spec(config)
    attention, _ = choose(spec, CPU, torch.float32, kv_dtype, "native_cpu", kernels)
    surroundings = context(attention=attention, quantization=quantization, native=kernels, weight_dtype=weight_dtype)
    model = family.Model(config, spec, surroundings)
    model.load(tensors(reference))
    store = Store(spec, attention, dtype=kv_dtype)
    with torch.inference_mode():
        steps = record(model, kernels, MAX_TOKENS, MAX_ROWS)
    assert isinstance(steps, CpuSteps), steps
    return steps, store


def last_logits(steps: CpuSteps, store: Store, prompts: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"head_dim": 320}, "attention is by torch_cpu"), ({"hidden_act": "relu"}, "torch computes ")],
    ids=["wide heads", "activation"],
)
def test_what_cannot_be_recorded_runs_all_the_same_and_is_said(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    native()
    reference = checkpoints.llama(**changes)
    reference.save_pretrained(tmp_path)
    references = greedy_references(reference, random_prompts(seed=5, lengths=(3, 18)), 12)
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**20) as llm:
        assert f"steps run operation by operation: {problem}" in " ".join(llm.report.notes)
        assert check(llm, references, "unrecorded") == 2


@pytest.mark.parametrize(
    ("family", "held", "kv_dtype"),
    [
        *itertools.product(MAKERS, HELD, KV_DTYPES),
        ("opt", "bfloat16", torch.float16),
        ("gpt_neox", "int8", torch.float32),
    ],
)
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


def test_the_report_names_the_bits_of_a_code():
    """A weight takes those, and about one more for its scales."""
    native()
    for kind in filter(lambda kind: kind.is_quantised, Kind):
        number, unit = kind_name(kind).split()
        taken = library().octavo_packed_bytes(kind, 64, 2048) * 8 / (64 * 2048)
        assert unit == "bits" and int(number) < taken < int(number) + 1.2


class _Gpu(Device):
    def __init__(self) -> None:
        self.kind, self.is_cuda = "cuda", True


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_gpu_needs_no_native_kernels_to_round_weights(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernels(*_: object) -> None:
        raise NoCompiler("no compiler here")

    monkeypatch.setattr("octavo.worker.cpu_steps.Native", no_kernels)
    config = replace(Config(), quantization=quantization)

    def find(device: Device) -> object:
        limits = resolve(config, device=device.kind, stored_dtype="bfloat16", context_len=128, num_cores=1)
        return find_native(config, limits, device, 0)

    assert find(_Gpu()) == (None, "")
    with pytest.raises(ConfigError, match=f"--quantization {quantization} needs native CPU kernels"):
        find(Device("cpu"))
