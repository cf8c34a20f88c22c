"""Damaged and malicious files: read, or refused in one line, without any large allocation."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.quants import PACKED_TYPES, Quants
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.formats.gguf_tensors import GGUFTensors
from octavo.weights.formats.safetensors_files import read_entries
from octavo.weights.sources.source import local
from octavo.worker.load import Loader
from tests.models import checkpoints
from tests.models.walk import build_from, tensors
from tests.native import native
from tests.scalar_quants import QUANTS, as_tensor, random_quants
from tests.weights.gguf_writer import Packed, gguf_bytes, write_gguf
from tests.weights.test_weights_gguf_tensors import stand_in_family

# ── headers of safetensors ──────────────────────────────────────────────────────────────────────────

HUGE = [2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, 10**30]
number = st.one_of(
    st.integers(-3, 40), st.sampled_from(HUGE), st.floats(allow_nan=False), st.none(), st.text(max_size=3)
)
entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "BOOL", "F4", "C64", "", "f32"]), number),
        "shape": st.one_of(st.lists(number, max_size=3), st.lists(st.integers(0, 4), max_size=3), number),
        "data_offsets": st.one_of(
            st.lists(number, max_size=3), st.tuples(st.integers(0, 64), st.integers(0, 64)), number
        ),
    },
)
header = st.dictionaries(
    st.sampled_from(["a", "b", "", "__metadata__", "../x", "a\n"]), st.one_of(entry, number), max_size=3
)


SIZES = {"F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1}
error_of_one = st.sampled_from([0] * 12 + [-1, 1])


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header as it should be, but that any number may be wrong by one; and the bytes after it."""
    head, end = {}, 0
    for at in range(draw(st.integers(1, 3))):
        dtype, shape = draw(st.sampled_from([*SIZES])), draw(st.lists(st.integers(0, 3), max_size=3))
        first, end = end, end + SIZES[dtype] * math.prod(shape)
        shape = [size + draw(error_of_one) for size in shape]
        head[f"t{at}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [first + draw(error_of_one), end + draw(error_of_one)],
        }
    return head, max(0, end + draw(error_of_one))


def write_safetensors(folder: Path, head: bytes, body: bytes, header_len: int | None = None) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    length = len(head) if header_len is None else header_len
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length & 2**64 - 1) + head + body)
    return folder


def read_or_refuse(folder: Path) -> str:
    """Return the refusal; "": the folder was read."""
    try:
        for _, tensor in open_checkpoint(folder).tensors("cpu", torch.float32):
            assert tensor.shape.numel() < 1000
    except ConfigError as error:
        assert "\n" not in error.message and len(error.message) < 600
        return error.message
    return ""


relaxed = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(header, st.integers(0, 64))
@example({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 16)
@example(
    {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
    },
    24,
)
@example({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}, 0)
@example({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, 16)
def test_any_header_is_read_or_refused(tmp_path: Path, head: dict[str, Any], body_len: int) -> None:
    read_or_refuse(write_safetensors(tmp_path, json.dumps(head).encode(), bytes(body_len)))


@relaxed
@given(st.one_of(nearly_right(), st.tuples(header, st.integers(0, 64))))
@example(
    (
        {
            "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
            "b": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]},
        },
        1,
    )
)
@example(({"a": {"dtype": "F32", "shape": [4]}}, 16))
@example(({"a": {"dtype": "F32", "shape": [2**65, 0], "data_offsets": [0, 0]}}, 0))
@example(({"a": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, 0))
@example(({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4))
@example(({"a": {"dtype": "F32", "shape": [0]}}, 0))
@example(({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16))
@example(({"\ud800": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 16))
@example(({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, 16))
@example(({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 17))
@example(({"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}, 20))
@example(({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 15))
@example(({"a": {"dtype": "F32", "shape": [9] * 100_000, "data_offsets": [0, 16]}}, 16))
def test_a_header_that_the_library_refuses_is_refused(tmp_path: Path, file: tuple[dict[str, Any], int]) -> None:
    """Entries are read without the library; for a GPU, tensors too."""
    head, body_len = file
    head.pop("__metadata__", None)
    path = write_safetensors(tmp_path, json.dumps(head).encode(), bytes(body_len)) / "model.safetensors"
    try:
        with safe_open(path, framework="numpy"):
            pass
        is_right = True
    except SafetensorError:
        is_right = False
    try:
        found = read_entries(path, 1 << 20)
    except ConfigError as error:
        assert not is_right or "which cannot be read" in error.message
    else:
        assert is_right and found.keys() == head.keys()


@relaxed
@given(st.binary(max_size=60), st.one_of(st.integers(0, 80), st.sampled_from(HUGE[:5])), st.binary(max_size=20))
def test_any_bytes_are_read_or_refused(tmp_path: Path, head: bytes, header_len: int, body: bytes) -> None:
    read_or_refuse(write_safetensors(tmp_path, head, body, header_len))


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ('{"a": %s, "a": %s}', "it names a twice"),
        ('{"a": %s, "\\u0061": %s}', "it names a twice"),
        ('{"a": %s, "a": {"dtype": "F32", "shape": [4], "data\\u005foffsets": [0, 16]}}', "it names a twice"),
        ('{"a": {"dtype": "F32", "shape": [4]}, "a": %s}', "it names a twice"),
        ('{"a": {"dtype": "F16", "dtype": "F32", "shape": [8], "shape": [4], "data_offsets": [0, 16]}}', "twice"),
        ('{"a": %s, "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', "corrupt"),
        ('{"a": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 16]}}', "corrupt"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}', "corrupt"),
        ("[" * 100_000, "corrupt"),
    ],
)
def test_what_headers_must_not_say(tmp_path: Path, head: str, problem: str) -> None:
    head = head.replace("%s", '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}')
    message = read_or_refuse(write_safetensors(tmp_path, head.encode(), bytes(16)))
    assert problem in message and "model.safetensors" in message


@pytest.mark.parametrize("metadata", ['{"shape": "data_offsets"}', '{"dtype": "\\"data_offsets\\""}', "{}"])
def test_words_in_metadata_describe_no_tensor(tmp_path: Path, metadata: str) -> None:
    head = '{"__metadata__": ' + metadata + ', "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    found = read_entries(write_safetensors(tmp_path, head.encode(), bytes(16)) / "model.safetensors", 1000)
    assert [*found] == ["a"] and found["a"].shape == (4,)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_safetensors(folder, b"{}", b"")
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    for name in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "..",
        "",
        "x/../model.safetensors",
        "a\0b",
    ):
        index = {"weight_map": {"a": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert read_or_refuse(folder), name


# ── headers of GGUF files ───────────────────────────────────────────────────────────────────────────

METADATA = {"general.architecture": "llama", "words": ["a", "b"], "numbers": [1, 2]}
PLAIN = [Packed("first", (2, 4), "F32", struct.pack("<8f", *range(8))), Packed("second", (4,), "F32", bytes(16))]


@relaxed
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(["<B", "<I", "<Q"]), st.sampled_from([0, 1, 9, *HUGE[:5]])),
        max_size=4,
    )
)
def test_any_damage_to_a_gguf_file_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, str, int]]) -> None:
    data = bytearray(gguf_bytes(METADATA, PLAIN))
    for at, code, value in changes:
        size = struct.calcsize(code)
        at %= len(data) - size
        struct.pack_into(code, data, at, value % (1 << 8 * size))
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        weights = GGUFTensors(GGUFFile(path), stand_in_family(), {"shift": 1.0})
        for _, tensor in weights.tensors("cpu", torch.float32):
            assert tensor.shape.numel() <= len(data)
    except ConfigError as error:
        assert "\n" not in error.message


def gguf_refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        GGUFFile(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_what_gguf_files_must_not_say(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    twice = [PLAIN[0], Packed("first", (4,), "F32", bytes(16))]
    assert "names the tensor 'first' twice" in gguf_refusal(path, gguf_bytes(METADATA, twice))
    data = gguf_bytes({"key_1": 1, "key_2": 2}, PLAIN).replace(b"key_2", b"key_1")
    assert "names 'key_1' twice" in gguf_refusal(path, data)
    # The second tensor's offset, from 32 to 0: into the first.
    data = gguf_bytes(METADATA, PLAIN)
    at = data.index(b"second") + 6 + 4 + 8 + 4
    assert struct.unpack_from("<Q", data, at) == (32,)
    overlapping = data[:at] + struct.pack("<Q", 0) + data[at + 8 :]
    assert "'second' and 'first' overlap" in gguf_refusal(path, overlapping)
    for empty in (Packed("first", (4, 0), "Q8_0", b""), Packed("first", (0,), "F32", b"")):
        assert "tensor first" in gguf_refusal(path, gguf_bytes(METADATA, [empty]))
    many = Packed("first", (1,) * 100, "F32", bytes(4))
    assert "'first' has 100 dimensions" in gguf_refusal(path, gguf_bytes(METADATA, [many]))


def test_absurd_sizes_take_no_memory(tmp_path: Path) -> None:
    """In a process with a tight memory limit: a large allocation would end it."""
    safetensors, gguf = tmp_path / "m", tmp_path / "m.gguf"
    safetensors.mkdir()
    write_safetensors(safetensors, b"{}", b"", header_len=90_000_000)
    head = gguf_bytes(METADATA, PLAIN)
    heads = [
        head[:8] + struct.pack("<QQ", 2**40, 3) + head[24:],
        head[:8] + struct.pack("<QQ", 2, 2**60) + head[24:],
        head.replace(struct.pack("<IQ", 4, 2), struct.pack("<IQ", 4, 2**40)),
        head.replace(struct.pack("<IQ", 8, 2), struct.pack("<IQ", 8, 2**40)),
        head.replace(struct.pack("<IQQ", 2, 4, 2), struct.pack("<IQQ", 2, 2**20, 2**20)),
    ]
    assert all(other != head for other in heads)
    for index, data in enumerate(heads):
        gguf.with_suffix(f".{index}.gguf").write_bytes(data)
    program = (
        "import resource, sys; from pathlib import Path; import torch\n"
        "from octavo.errors import ConfigError\n"
        "from octavo.gguf import GGUFFile; from octavo.weights.formats.checkpoint import open_checkpoint\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 2**28\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    try:\n"
        "        GGUFFile(path) if path.suffix == '.gguf' else open_checkpoint(path)\n"
        "    except ConfigError as error:\n"
        "        print(error.message)\n"
    )
    paths = [str(safetensors), *(str(gguf.with_suffix(f".{index}.gguf")) for index in range(len(heads)))]
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == len(paths), done.stdout


# ── infinities and NaN ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, value: float) -> None:
    reference = checkpoints.llama()
    weights = dict(tensors(reference))
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][3, 5] = value
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict(), default=str))
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=rf"tensor {name} holds a NaN or an infinity") as caught:
        build_from(checkpoint.config, checkpoint.tensors("cpu", torch.float32))
    assert "\n" not in caught.value.message


def test_numbers_too_large_for_the_asked_type_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.tensor([1.0, 1e6])}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert len(list(checkpoint.tensors("cpu", torch.bfloat16))) == 1
    with pytest.raises(ConfigError, match=r"tensor a holds .* float16.* too large"):
        list(checkpoint.tensors("cpu", torch.float16))


@pytest.mark.parametrize("type", PACKED_TYPES)
def test_every_scale_of_a_packed_weight_is_looked_at(type: str) -> None:
    """Set one byte after the other: a value that decodes to inf or NaN is found, and nothing else."""
    num_bytes = QUANTS[type][2]
    base = bytearray(random_quants(type, 3, 1))
    assert Quants(type, as_tensor(bytes(base)).view(1, -1)).is_finite()
    for byte in range(num_bytes):
        for value in (0x7C, 0xFC, 0x7F, 0xFF):
            changed = bytearray(base)
            changed[num_bytes + byte] = value
            quants = Quants(type, as_tensor(bytes(changed)).view(1, -1))
            decoded = quants.dequantise()
            # An MXFP4 scale of all ones is NaN, though decoders read it as a power of two.
            is_number = value != 0xFF if type == "MXFP4" and byte == 0 else bool(torch.isfinite(decoded).all())
            assert quants.is_finite() is is_number, (byte, value)


def test_a_gguf_file_with_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    data = bytearray(random_quants("Q4_1", 8, 2))
    struct.pack_into("<e", data, 20 * 5, float("nan"))
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 1, "llama.embedding_length": 64}
    metadata |= {"llama.block_count": 1, "llama.feed_forward_length": 4, "tokenizer.ggml.tokens": ["a"]}
    path = write_gguf(tmp_path / "m.gguf", metadata, [Packed("blk.0.ffn_up.weight", (4, 64), "Q4_1", bytes(data))])
    for keep_packed in (True, False):
        with pytest.raises(ConfigError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds a NaN"):
            list(open_checkpoint(path).tensors("cpu", torch.float32, keep_packed))


# ── sizes that no model has ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hidden_size", 2**62, "hidden_size is 4611686018427387904"),
        ("vocab_size", 10**30, "vocab_size is 1000000000000000000000000000000"),
        ("num_hidden_layers", 10**9, "1000000000 layers"),
        ("intermediate_size", 2**31 - 1, "the weights take"),
        ("vocab_size", 2**31 - 1, "the weights take"),
    ],
)
def test_absurd_configurations_are_refused_before_anything_is_taken(
    tmp_path: Path, key: str, value: int, problem: str
) -> None:
    native()
    reference = checkpoints.llama()
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict() | {key: value}, default=str))
    save_file(dict(tensors(reference)), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        Loader(replace(Config(), device="cpu", cpu_threads=1), local(tmp_path)).load()
    assert problem in caught.value.message and "\n" not in caught.value.message
