"""Weights that stay packed on their way out of a GGUF file: which do, what families do to them, what is still refused.
Packed and decoded weights are compared by value."""

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ConfigError
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.layers.sharding import WeightSlot, fill
from octavo.models import load_family
from octavo.quants import PACKED_TYPES, Quants, Weight
from octavo.quants.exact import held_bytes
from octavo.weights.formats.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.methods.cpu_native import NativeWeight
from octavo.weights.sources.source import resolve
from tests.contexts import context
from tests.native import native
from tests.scalar_quants import QUANTS, as_tensor, random_quants
from tests.weights.gguf_writer import Packed, write_gguf

HIDDEN, INNER, VOCAB = 256, 512, 24  # every row holds whole quants of every type
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 32
KV = NUM_KV_HEADS * HEAD_SIZE
NUM_MATRICES = 9


def packed(name: str, shape: tuple[int, ...], type: str) -> Packed:
    rng = random.Random(name)
    count = 1
    for extent in shape:
        count *= extent
    if type == "F32":
        return Packed(name, shape, type, struct.pack(f"<{count}f", *(rng.uniform(-1, 1) for _ in range(count))))
    return Packed(name, shape, type, random_quants(type, count // QUANTS[type][1], rng.randrange(1000)))


def llama_like(architecture: str, types: Iterator[str]) -> list[Packed]:
    """One layer; each matrix takes the next type, vectors are not packed."""
    matrices = {
        "token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN),
        "blk.0.attn_q": (NUM_HEADS * HEAD_SIZE, HIDDEN), "blk.0.attn_k": (KV, HIDDEN), "blk.0.attn_v": (KV, HIDDEN),
        "blk.0.attn_output": (HIDDEN, NUM_HEADS * HEAD_SIZE),
        "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    vectors = dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), HIDDEN)
    if architecture == "qwen3":
        vectors |= {"blk.0.attn_q_norm": HEAD_SIZE, "blk.0.attn_k_norm": HEAD_SIZE}
    found = [packed(f"{name}.weight", shape, next(types)) for name, shape in matrices.items()]
    found += [packed(f"{name}.weight", (size,), "F32") for name, size in vectors.items()]
    if architecture == "qwen2":
        sizes = {"attn_q": NUM_HEADS * HEAD_SIZE, "attn_k": KV, "attn_v": KV}
        found += [packed(f"blk.0.{name}.bias", (size,), "F32") for name, size in sizes.items()]
    return found


def metadata(architecture: str) -> dict[str, Any]:
    sizes = {
        "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": INNER, "context_length": 128,
        "attention.head_count": NUM_HEADS, "attention.head_count_kv": NUM_KV_HEADS, "attention.key_length": HEAD_SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    return (
        {"general.architecture": architecture}
        | {f"{architecture}.{key}": value for key, value in sizes.items()}
        | {"tokenizer.ggml.tokens": ["x"] * VOCAB}
    )


def cycle(seed: int) -> Iterator[str]:
    """The packed types in turn: each seed continues where the one before it ends."""
    return itertools.islice(itertools.cycle(PACKED_TYPES), NUM_MATRICES * seed, None)


def opened(path: Path, architecture: str, tensors: list[Packed]) -> Checkpoint:
    return open_checkpoint(write_gguf(path / "m.gguf", metadata(architecture), tensors))


def both(checkpoint: Checkpoint) -> Iterator[tuple[str, Weight, torch.Tensor]]:
    """(name, weight with keep_packed, weight without)."""
    kept = list(checkpoint.tensors("cpu", torch.float32, keep_packed=True))
    plain = list(checkpoint.tensors("cpu", torch.float32))
    for (name, weight), (same_name, tensor) in zip(kept, plain, strict=True):
        assert name == same_name and isinstance(tensor, torch.Tensor) and tuple(weight.shape) == tuple(tensor.shape)
        yield name, weight, tensor


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(-(-len(PACKED_TYPES) // NUM_MATRICES)))
def test_packed_matrices_stay_packed_and_mean_the_same(tmp_path: Path, architecture: str, seed: int) -> None:
    """Includes the rows of a Llama's q and k, which its converter has reordered."""
    tensors = llama_like(architecture, cycle(seed))
    types = set()
    for name, weight, tensor in both(opened(tmp_path, architecture, tensors)):
        assert isinstance(weight, Quants) is (tensor.dim() == 2), name
        if isinstance(weight, Quants):
            types.add(weight.type)
            weight = weight.dequantise()
        assert torch.equal(weight, tensor), name
    assert types == set(itertools.islice(cycle(seed), NUM_MATRICES))


def test_what_is_not_packed_in_the_file_comes_in_the_asked_type(tmp_path: Path) -> None:
    tensors = [packed("token_embd.weight", (VOCAB, HIDDEN), "F32"), packed("blk.0.ffn_up.weight", (2, HIDDEN), "Q4_1")]
    found = dict(opened(tmp_path, "llama", tensors).tensors("cpu", torch.bfloat16, keep_packed=True))
    embedding, up = found["model.embed_tokens.weight"], found["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(embedding, torch.Tensor) and embedding.dtype == torch.bfloat16
    assert isinstance(up, Quants) and up.type == "Q4_1" and up.rows.shape == (2, HIDDEN // 32 * 20)


def test_only_matrices_stay_packed(tmp_path: Path) -> None:
    """A stack of matrices, such as experts, is one matrix of all their rows."""
    tensors = [packed("blk.0.attn_norm.weight", (HIDDEN,), "Q8_0"), packed("output.weight", (2, 3, HIDDEN), "Q8_0")]
    (_, norm, plain_norm), (_, stack, plain_stack) = both(opened(tmp_path, "llama", tensors))
    assert isinstance(norm, torch.Tensor) and torch.equal(norm, plain_norm)
    assert isinstance(stack, Quants) and stack.shape == plain_stack.shape == (6, HIDDEN)
    assert torch.equal(stack.dequantise(), plain_stack)


def test_a_family_whose_other_checkpoints_are_turned_gets_them_packed(tmp_path: Path) -> None:
    sizes = {"embedding_length": HIDDEN, "block_count": 1, "attention.head_count": NUM_HEADS, "context_length": 128}
    values = {"general.architecture": "gpt2", "tokenizer.ggml.tokens": ["x"] * VOCAB}
    values |= {f"gpt2.{key}": value for key, value in sizes.items()}
    shapes = {"token_embd": (VOCAB, HIDDEN), "position_embd": (128, HIDDEN), "blk.0.attn_qkv": (3 * HIDDEN, HIDDEN)}
    tensors = [packed(f"{name}.weight", shape, "Q5_1") for name, shape in shapes.items()]
    found = list(both(open_checkpoint(write_gguf(tmp_path / "m.gguf", values, tensors))))
    assert len(found) == 3
    for name, weight, tensor in found:
        assert isinstance(weight, Quants) and torch.equal(weight.dequantise(), tensor), name


def test_rows_that_keep_their_order_are_the_files_own_bytes(tmp_path: Path) -> None:
    """Nothing is copied, and nothing can be written back."""
    tensors = llama_like("llama", cycle(0))
    path = write_gguf(tmp_path / "m.gguf", metadata("llama"), tensors)
    before = path.read_bytes()
    found = dict(open_checkpoint(path).tensors("cpu", torch.float32, keep_packed=True))
    up, down = (found[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert isinstance(up, Quants) and isinstance(down, Quants)
    assert up.rows.untyped_storage().data_ptr() == down.rows.untyped_storage().data_ptr()
    up.rows.zero_()
    assert path.read_bytes() == before


def test_safetensors_hold_nothing_packed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2, 32)}, tmp_path / "model.safetensors")
    ((name, tensor),) = open_checkpoint(tmp_path).tensors("cpu", torch.bfloat16, keep_packed=True)
    assert name == "a" and isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("type", PACKED_TYPES)
def test_every_type_is_held_by_the_native_kernels(type: str) -> None:
    """As it is, in another type with the same values, or decoded: the rows read back equal the file's."""
    weight = Quants(type, as_tensor(random_quants(type, 48 * 512 // QUANTS[type][1], 3)).view(48, -1))
    held = NativeWeight(NativeOps(native()), (48,), torch.float32)
    held.fill(0, weight)
    want = weight.dequantise()
    torch.testing.assert_close(held.look_up(torch.arange(48)), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    assert held.nbytes == pytest.approx(held_bytes(type, 48 * 512, 4), rel=0.03)  # 6-bit scales have bytes of their own
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    exact = x @ want.T
    assert (held.product(x) - exact).norm() < 0.02 * exact.norm()  # activations in 8 bits


# --- what is refused ---


def test_a_packed_weight_of_another_shape_is_refused_by_its_slot() -> None:
    stored: list[Weight] = []
    weight = Quants("Q4_1", torch.zeros(3, 40, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"tensor w has shape \[3, 64\], its config asks for \[3, 32\]") as refusal:
        fill({"w": WeightSlot((3, 32), stored.append)}, iter([("w", weight)]), lambda name: False)
    assert "\n" not in refusal.value.message and stored == []
    fill({"w": WeightSlot((3, 64), stored.append)}, iter([("w", weight)]), lambda name: False)
    assert stored == [weight]


@pytest.mark.parametrize("keep_packed", [True, False])
@pytest.mark.parametrize("shape", [(HEAD_SIZE + 2, HIDDEN), (3, HIDDEN), (HEAD_SIZE, HIDDEN), (HIDDEN,), ()])
def test_rows_that_are_not_all_heads_are_refused_by_name(
    tmp_path: Path, shape: tuple[int, ...], keep_packed: bool
) -> None:
    tensors = [packed("blk.0.attn_q.weight", shape, "Q8_0" if shape else "F32")]
    checkpoint = opened(tmp_path, "llama", tensors)
    family = load_family("llama")
    model = family.Model(checkpoint.config, family.spec(checkpoint.config), context())
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj\.weight has shape .* asks for \[256, 256\]"):
        model.load(checkpoint.tensors("cpu", torch.float32, keep_packed))


def test_a_row_that_ends_within_a_quant_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    tensors = [Packed("blk.0.ffn_up.weight", (2, 48), "Q4_1", random_quants("Q4_1", 3, 0))]
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.ffn_up\.weight \(Q4_1, \(2, 48\)\) is misplaced"):
        opened(tmp_path, "llama", tensors)


@pytest.mark.model
def test_the_embedded_model_stays_packed() -> None:
    checkpoint = open_checkpoint(resolve(""))
    found = list(checkpoint.tensors("cpu", torch.float32, keep_packed=True))
    types = [weight.type for _, weight in found if isinstance(weight, Quants)]
    assert (types.count("Q4_1"), types.count("Q8_0"), len(found)) == (210, 1, 272)
    num_bytes = sum(weight.rows.nbytes if isinstance(weight, Quants) else weight.nbytes for _, weight in found)
    assert num_bytes == checkpoint.num_bytes
