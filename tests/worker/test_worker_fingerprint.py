"""What an engine says the bits of its answers depend on: equal where they are equal, other where they may be other.
And the bits themselves: who changes them raises NUMERICS."""

import hashlib
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM
from octavo.config import ModelConfig
from octavo.kernels.cpu.library import isa, use_isa
from octavo.models import load_family
from octavo.parallel import Group
from octavo.weights.methods.torch import PlainWeight
from octavo.weights.sources.source import local
from octavo.worker.fingerprint import NUMERICS, fingerprint_of
from tests.contexts import context
from tests.doubles import write_byte_tokenizer
from tests.native import native
from tests.worker.tiny import MIXED, random_prompts, write_tiny_llama

OPTIONS = {"device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**20, "cpu_threads": 1}


GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
GPT_OSS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(path, vocab_size=300)
    write_byte_tokenizer(path)
    return path


def parts_of(folder: Path, **options: Any) -> dict[str, str]:
    with LLM(str(folder), **OPTIONS | options) as llm:
        assert llm.report.system_fingerprint.startswith(f"octavo-{NUMERICS['cpu']}-")
        return llm.report.fingerprint


def test_parts(folder: Path, tmp_path: Path) -> None:
    native()
    parts = parts_of(folder)
    shown = {name: value for name, value in parts.items() if name not in ("model", "words")}
    assert shown == {
        "numerics": NUMERICS["cpu"],
        "weights": "float32",
        "arithmetic": "float32",
        "kernels": f"native {isa()} torch {torch.__version__}",
        "attention": "native_cpu",
        "kv": "float32",
        "tensor_parallel": "1",
        "deterministic": "yes",
    }
    copy = tmp_path / "another name"
    shutil.copytree(folder, copy)
    others: dict[str, Any] = {"cpu_threads": 2, "page_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 5}
    assert parts_of(copy, **others, deterministic=True, enforce_eager=True) == parts
    assert differing(parts, parts_of(folder, quantization="int8")) == {"weights", "kv"}
    assert parts_of(folder, quantization="int8")["weights"] == "codes8+float32"
    assert differing(parts, parts_of(folder, dtype="bfloat16")) == {"weights"}
    assert differing(parts, parts_of(folder, load_format="dummy")) == {"model"}
    (copy / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert differing(parts, parts_of(copy)) == {"words"}
    write_tiny_llama(copy, seed=1, vocab_size=300)
    assert differing(parts, parts_of(copy)) == {"model", "words"}


def weights_named(folder: Path, num_ranks: int = 1, **settings: Any) -> str:
    """What a GPU's fingerprint says of gpt-oss's weights. Building the model does not use the ranks' group."""
    group = Group(0, num_ranks, object()) if num_ranks > 1 else None  # type: ignore[arg-type]
    family, surroundings = load_family("gpt_oss"), context(group, **settings, has_triton=True)
    spec = family.spec(GPT_OSS)
    model = family.Model(GPT_OSS, spec, surroundings)
    return fingerprint_of(surroundings, ModelConfig(), local(folder), spec, model, "float32", "")["weights"]


MXFP4 = frozenset({"MXFP4"})


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, "float32"),
        ({"packed_types": MXFP4}, "mxfp4+float32"),
        ({"packed_types": MXFP4, "num_ranks": 2}, "mxfp4+float32"),
        ({"packed_types": MXFP4, "num_ranks": 4}, "mxfp4+float32"),  # an expert's share is half a group: it is decoded
        ({"quantization": "fp8"}, "fp8+float32"),
        ({"quantization": "fp8", "packed_types": MXFP4}, "fp8+mxfp4+float32"),
    ],
)
def test_weights_that_stay_packed_on_a_gpu_are_named(folder: Path, settings: dict[str, Any], weights: str) -> None:
    pytest.importorskip("triton")
    assert weights_named(folder, **settings) == weights


def test_a_new_way_of_holding_weights_is_named_by_its_method(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(PlainWeight, "name", "nf3")
    assert weights_named(folder, packed_types=MXFP4) == "mxfp4+nf3+float32"


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


ISAS = ("portable", "avx2", "avx512vnni")
TORCH = "2.13.0"  # which computes rotations and logprobs; another may do so otherwise, and is part of the fingerprint
BITS = {
    ("portable", "none"): "b0f5914a4f71984f",
    ("portable", "int8"): "8fa88031126c11d4",
    ("portable", "int4"): "d67b2b94a0f27bd1",
    ("avx2", "none"): "7423dd413878dc8c",
    ("avx2", "int8"): "70fe5d028b18e41b",
    ("avx2", "int4"): "204d46c7647159b6",
    ("avx512vnni", "none"): "b6737cf816865b9d",
    ("avx512vnni", "int8"): "9d39906387056a0f",
    ("avx512vnni", "int4"): "fbb083d920f5817a",
}


@pytest.fixture(params=ISAS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    native()
    before = isa()
    if not use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    use_isa(before)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_bits_are_those_of_these_numerics(folder: Path, quantization: str, instructions: str) -> None:
    """Other than written? Then the same request gives another answer than before: raise NUMERICS, and write them anew."""
    if torch.__version__.split("+")[0] != TORCH:
        pytest.skip(f"the bits are written for torch {TORCH}")
    digest = hashlib.sha256()
    wanted = {"seed": 5, "max_tokens": 12, "min_tokens": 0, "ignore_eos": True, "logprobs": 2}
    params = [msgspec.structs.replace(kind, **wanted) for kind in MIXED]
    with LLM(str(folder), **OPTIONS, quantization=quantization) as llm:
        for output in llm.generate(random_prompts(len(MIXED), seed=9), params, use_tqdm=False):
            for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                by_rank = {one.rank: one.logprob for one in entry.values()}
                digest.update(struct.pack("<i3f", token, entry[token].logprob, by_rank[1], by_rank[2]))
    assert digest.hexdigest()[:16] == BITS[instructions, quantization]
