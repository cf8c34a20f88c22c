"""Quantised checkpoints: each method's weights decode to the right values, and a model of them answers as one with those values.
Golden: by_their_tools.safetensors holds weights of 32 × 64 that autoawq 0.2.9, auto_gptq 0.7.1, compressed-tensors 0.20.0 and
bitsandbytes 0.50.2 packed, with the first eight rows as these tools decode them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from octavo import LLM
from octavo.errors import ConfigError
from octavo.kernels.cpu.build import NoCompiler
from octavo.quants import ORDERED, Quants
from octavo.quants.exact import HELD_SIZES, kept_on_cpu
from octavo.weights.formats.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.formats.quantised import methods
from tests.engine.exactness import check, greedy_references, scores
from tests.models import checkpoints
from tests.models.walk import build_from, prompts, reference_logits, walk
from tests.native import native
from tests.weights import packers
from tests.weights.packers import Packer

GOLDEN = Path(__file__).parent / "by_their_tools.safetensors"
MODULE = "model.layers.0.mlp.up_proj"


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [24, 32], "activation_scheme": "dynamic"}
NARROW = BLOCKS | {"weight_block_size": [32, 16]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
INT8 = compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
ROWS = compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")

# name → settings, packer, and the type of Quants in which it may stay ("": it is decoded)
KINDS: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "gptq": (GPTQ, packers.gptq(), "Q4_0"),
    "gptq-zeros": (GPTQ | {"sym": False}, packers.gptq(is_centred=False), "Q5_0"),
    "gptq-v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        packers.gptq(is_centred=False, version=2),
        "Q5_0",
    ),
    "gptq-order": (GPTQ | {"desc_act": True}, packers.gptq(is_ordered=True), "Q4_0"),
    "gptq-8": (GPTQ | {"bits": 8}, packers.gptq(bits=8), "Q8_0"),
    "gptq-2": (GPTQ | {"bits": 2}, packers.gptq(bits=2, is_centred=False), "Q4_0"),
    "awq": (AWQ, packers.awq(), "Q5_0"),
    "fp8": ({"quant_method": "fp8"}, packers.float8("weight_scale", None), "FP8"),
    "fp8-blocks": (BLOCKS, packers.float8("weight_scale_inv", (24, 32)), "FP8"),
    "fp8-narrow": (NARROW, packers.float8("weight_scale_inv", (32, 16)), ""),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, packers.float8("weight_scale", (1, 0)), "FP8"),
    "compressed-fp8": (ROWS, packers.float8("weight_scale", (1, 0)), "FP8"),
    "compressed-int8": (INT8, packers.int8_rows(), "Q8_0"),
    "compressed-int8-wide": (INT8, packers.int8_rows(torch.float32), ""),
    "compressed-int4": (INT4, packers.packed_integers(), "Q4_0"),
    "compressed-int4-zeros": (INT4, packers.packed_integers(is_centred=False), "Q5_0"),
    "nf4": (NF4, packers.four_bits(), ""),
    "nf4-nested": (NF4, packers.four_bits(nested=48), ""),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packers.int8_largest, ""),
}


def write(folder: Path, settings: dict[str, Any], packer: Packer) -> PreTrainedModel:
    """Write a tiny Llama with packed products over two files, each module's parts in both. Return the model with the decoded values."""
    model = checkpoints.llama(hidden_size=64, intermediate_size=96)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.clone()
            continue
        parts, decoded = packer(tensor)
        tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        with torch.no_grad():
            tensor.copy_(decoded)
    folder.mkdir(exist_ok=True)
    config = model.config.to_dict() | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    for half in (0, 1):
        mine = {name: tensors[name] for name in sorted(tensors)[half::2]}
        save_file(mine, folder / f"model-{half + 1:05}-of-00002.safetensors")
    return model


def read(checkpoint: Checkpoint, keep_packed: bool = False) -> dict[str, Any]:
    return dict(checkpoint.tensors("cpu", torch.float32, keep_packed))


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_it_answers_as_the_weights_it_stands_for(kind: str, tmp_path: Path) -> None:
    settings, packer, _ = KINDS[kind]
    reference = write(tmp_path, settings, packer)
    checkpoint = open_checkpoint(tmp_path)
    want, got = reference.state_dict(), read(checkpoint)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-6, atol=1e-7)
    ours, store = build_from(checkpoint.config, iter(got.items()))
    (tokens,) = prompts(seed=4, lengths=(24,))
    (logits,) = walk(ours, store, [tokens], seed=4)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


@each_kind
def test_what_kernels_can_hold_exactly_stays_packed(kind: str, tmp_path: Path) -> None:
    settings, packer, type = KINDS[kind]
    write(tmp_path, settings, packer)
    checkpoint = open_checkpoint(tmp_path)
    plain, kept = read(checkpoint), read(checkpoint, keep_packed=True)
    assert plain.keys() == kept.keys()
    types = {weight.type for weight in kept.values() if isinstance(weight, Quants)}
    assert types == ({type} if type else set())
    for name, weight in kept.items():
        same = weight.dequantise() if isinstance(weight, Quants) else weight
        assert torch.equal(same, plain[name]), name
    outlines = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors("meta", torch.float32)}
    assert outlines == {name: tuple(tensor.shape) for name, tensor in plain.items()}
    if type:
        named = {f"{type}{ORDERED}" if kind == "gptq-order" else type}
        assert checkpoint.weights is not None and checkpoint.weights.packed_types == named
        is_for_cpu = named <= HELD_SIZES.keys()
        assert kept_on_cpu(checkpoint.weights.packed_types) == (named if is_for_cpu else frozenset())
        if is_for_cpu:
            taken = sum(w.rows.nbytes if isinstance(w, Quants) else w.nbytes for w in kept.values())
            assert checkpoint.weights.held_bytes(4, HELD_SIZES) == taken


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}),
    ],
)
def test_settings_in_a_file_of_their_own(kind: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """As older tools wrote them, without any mention in config.json."""
    want = write(tmp_path, KINDS[kind][0], KINDS[kind][1]).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(settings))
    got = read(open_checkpoint(tmp_path))
    assert got.keys() == want.keys()
    torch.testing.assert_close(got[f"{MODULE}.weight"], want[f"{MODULE}.weight"], rtol=1e-6, atol=1e-7)


# ── weights written by the methods' own tools ───────────────────────────────────────────────────────

TOOLS = {
    "awq": AWQ, "gptq4": GPTQ | {"desc_act": True}, "gptq8": GPTQ | {"bits": 8}, "ct4": INT4, "ct4z": INT4, "ct8": INT8,
    "ctf": ROWS, "nf4": NF4, "nf4n": NF4, "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_weights_that_their_own_tools_packed(tool: str, tmp_path: Path) -> None:
    golden = {name.removeprefix(f"{tool}/"): t for name, t in load_file(GOLDEN).items() if name.startswith(f"{tool}/")}
    want = golden.pop("want")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": TOOLS[tool]}))
    save_file({f"{MODULE}.{part}": t for part, t in golden.items()}, tmp_path / "model.safetensors")
    for keep_packed in (False, True):
        (weight,) = read(open_checkpoint(tmp_path), keep_packed).values()
        weight = weight.dequantise() if isinstance(weight, Quants) else weight
        assert weight.shape == (32, 64)
        torch.testing.assert_close(weight[:8], want, rtol=1e-5, atol=1e-6)


# ── served ──────────────────────────────────────────────────────────────────────────────────────────


def no_kernels(num_threads: int, first_cpu: int) -> None:
    raise NoCompiler("turned off")


@pytest.mark.parametrize("kind", ["gptq-order", "awq", "nf4-nested"])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_the_engine_gives_the_reference_tokens(
    kind: str, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native:
        native()
    else:
        monkeypatch.setattr("octavo.worker.cpu_steps.Native", no_kernels)
    settings, packer, type = KINDS[kind]
    references = greedy_references(write(tmp_path, settings, packer), prompts(seed=5, lengths=(3, 18, 30)), 16)
    with LLM(str(tmp_path), dtype="float32", quantization="none", kv_cache_memory_bytes=2**20) as llm:
        assert check(llm, references, "decoded") >= 2
        decoded = scores(llm, references)
        notes = [note for note in llm.report.notes if "in the checkpoint" in note]
        assert len(notes) == 1 and settings["quant_method"] in notes[0] and "float32" in notes[0]
    stays = is_native and bool(type) and kind != "gptq-order"  # that order is for kernels of a GPU
    with LLM(str(tmp_path), dtype="float32", kv_cache_memory_bytes=2**20) as llm:
        assert any("where they are used" in note for note in llm.report.notes) is stays
        if is_native:  # the bits of torch's products depend on the batch
            assert scores(llm, references) == decoded
    if stays:
        with LLM(str(tmp_path), kv_cache_memory_bytes=2**20) as llm:
            assert any("bits" in note and note.startswith("weights:") for note in llm.report.notes)


def test_loading_keeps_few_weights_at_a_time(tmp_path: Path) -> None:
    """32 weights of 16 MiB decoded, in four files of 16 MiB: reading them all takes a file, a weight and its temporaries."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": GPTQ}))
    for shard in range(4):
        tensors: dict[str, torch.Tensor] = {}
        for index in range(8):
            tensors |= {
                f"m{shard}.{index}.qweight": torch.full((256, 2048), index * 0x11111111, dtype=torch.int32),
                f"m{shard}.{index}.qzeros": torch.zeros(64, 256, dtype=torch.int32),
                f"m{shard}.{index}.scales": torch.ones(64, 2048, dtype=torch.float16),
            }
        save_file(tensors, tmp_path / f"model-{shard + 1:05}-of-00004.safetensors")
    program = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from octavo.weights.formats.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1]))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "for name, tensor in checkpoint.tensors('cpu', torch.float32):\n"
        "    assert tensor[-1, -1] == int(name.split('.')[1]) - 1\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    grown = int(ran.stdout)  # MiB
    assert grown < 160, grown  # everything together would be 512


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(open_checkpoint(folder))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "quip#"}, "quantised by 'quip#'"),
        ({"bits": 4}, "does not name"),
        ("gptq", "does not name"),
        (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
        (GPTQ | {"bits": "four"}, "bits is 'four'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"bits": 8}, "8 bits"),
        (BLOCKS | {"weight_block_size": [0, 16]}, "block size is '[0, 16]'"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (INT4 | {"config_groups": [1]}, "config_groups"),
    ],
)
def test_settings_that_cannot_be_read(settings: Any, problem: str, tmp_path: Path) -> None:
    write(tmp_path, settings, packers.gptq())
    message = refusal(tmp_path)
    assert problem in message
    if "cannot be read" in message and "quantised" in message:
        assert all(method in message for method in methods())


DAMAGES = [
    ("gptq", "qzeros", None, "lacks qzeros of"),
    ("gptq", "qzeros", torch.zeros(2, 12, dtype=torch.float32), "do not fit each other"),
    ("gptq", "scales", torch.zeros(3, 96, dtype=torch.float16), "do not fit each other"),
    ("gptq-order", "g_idx", torch.full((64,), 2, dtype=torch.int32), "names a group beyond its 2"),
    ("awq", "scales", torch.zeros(2, 64, dtype=torch.float16), "do not fit each other"),
    ("fp8-blocks", "weight_scale_inv", torch.zeros(2, 4), "do not fit each other"),
    ("fp8", "weight_scale", None, "lacks scale of"),
    ("compressed-int8", "weight_scale", torch.zeros(95, 1), "do not fit each other"),
    ("compressed-int4", "weight_shape", torch.tensor([96, 999]), "do not fit each other"),
    ("nf4", "weight.absmax", torch.zeros(95), "do not fit each other"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "quant_state of"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "stored as U8 without"),
    ("nf4-nested", "weight.nested_absmax", torch.zeros(9), "do not fit each other"),
    ("int8", "SCB", torch.zeros(3), "do not fit each other"),
]


@pytest.mark.parametrize(("kind", "part", "tensor", "problem"), DAMAGES)
def test_parts_that_are_missing_or_do_not_fit(
    kind: str, part: str, tensor: torch.Tensor | None, problem: str, tmp_path: Path
) -> None:
    settings, packer, _ = KINDS[kind]
    write(tmp_path, settings, packer)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if tensors.pop(f"{MODULE}.{part}", None) is not None and tensor is not None:
            tensors[f"{MODULE}.{part}"] = tensor
        save_file(tensors, path)
    message = refusal(tmp_path)
    assert problem in message and MODULE in message


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GPTQ, packers.gptq())
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file(load_file(path) | {f"{MODULE}.weight": torch.zeros(96, 64)}, path)
    assert f"{MODULE}.weight twice" in refusal(tmp_path)
