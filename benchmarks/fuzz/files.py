"""Targets: parsers of files that a model's folder, a batch or a recording holds."""

import io
import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from benchmarks.fuzz.target import Target
from octavo.errors import ConfigError, OctavoError
from octavo.gguf import GGUFFile
from octavo.models import families, load_family
from octavo.recording.format import read as read_recording
from octavo.server.batch.lines import Rules, read_lines
from octavo.server.batch.records import Seen, Tally, read_back
from octavo.text.load import load_text
from octavo.text.tokenize.gguf_vocab import gguf_chat_templates, gguf_eos_ids, gguf_tokenizer, read_vocabulary
from octavo.text.tokenize.sentencepiece_vocab import (
    AddedTokens,
    SentencePieceTokenizer,
    control_tokens,
    write_bpe_model,
)
from octavo.text.tokenize.tiktoken_vocab import is_tiktoken, read_qwen_tiktoken, read_tekken
from octavo.text.tokenize.tokenizer import Tokenizer, byte_level_name, read_tokenizer_json
from octavo.weights.formats.quantised_folder import QuantisedFiles
from octavo.weights.formats.safetensors_files import SafetensorsFiles
from octavo.weights.sources.folder import read_config
from octavo.weights.sources.source import local
from tests.doubles import write_byte_tokenizer
from tests.recording.recorded import Recorded
from tests.schedule.workload import Workload
from tests.weights.gguf_writer import Packed, gguf_bytes

_TEXT = "Hello, world 123 — «ünï» \U0001f44b <s> <|end|>\n"
_RULES = Rules(("/v1/chat/completions", "/v1/completions", "/v1/embeddings"), 4096, seeded=frozenset(), seed=1)


@cache
def _folder() -> Path:
    """A folder in memory where there is one: a case writes its file there."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None, prefix="octavo-fuzz-"))


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(_TEXT, True)
    tokenizer.decode(ids[:50], False)
    for token_id in (0, 1, 255, 10**6):
        tokenizer.token_name(token_id)
        tokenizer.spell(token_id)


# ── GGUF ──


def _run_gguf(data: bytes) -> None:
    file = GGUFFile(_file("model.gguf", data))
    for name in list(file.tensors)[:20]:
        bytes(file.bytes_of(name)[:16])
    gguf_chat_templates(file.metadata)
    if any(key.startswith("tokenizer") for key in file.metadata):
        vocabulary = read_vocabulary(file.metadata)
        gguf_eos_ids(vocabulary)
        _use(gguf_tokenizer(vocabulary))


def _gguf_seeds() -> list[bytes]:
    words: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    letters = [byte_level_name(bytes([byte])) for byte in range(256)]
    byte_level = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*letters, "he", "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁he", "▁", "h", "e"]
    sentencepiece = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(at) for at in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 4,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    bert = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁he", "llo", "▁h"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1],
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }
    tensors = [
        Packed("token_embd.weight", (4, 32), "F32", bytes(512)),
        Packed("blk.0.attn_q.weight", (2, 32), "Q4_0", bytes(36)),
        Packed("blk.0.attn_k.weight", (1, 256), "Q6_K", bytes(210)),
    ]
    return [gguf_bytes(words | more, tensors) for more in ({}, byte_level, sentencepiece, bert)]


# ── safetensors ──


def _run_safetensors(data: bytes) -> None:
    _file("model.safetensors", data)
    files = SafetensorsFiles(_folder())
    for _ in files.regions():
        pass


def _safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + bytes(64)


def _safetensors_seed() -> bytes:
    import octavo.weights.pinned_reader  # noqa: F401  torch, before memory is limited

    return _safetensors(
        {
            "__metadata__": {"format": "pt"},
            "a.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
            "b.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [32, 64]},
        }
    )


# ── configurations ──


def _run_config(data: bytes) -> None:
    folder = _folder() / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    config = read_config(folder)
    load_family(config["model_type"]).spec(config)


_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
    "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    "word_embed_proj_dim": 64, "ffn_dim": 128, "do_layer_norm_before": True, "rotary_pct": 0.25, "use_parallel_residual": True,
    "type_vocab_size": 2, "position_embedding_type": "absolute", "pad_token_id": 1, "partial_rotary_factor": 1.0, "logits_scaling": 8.0,
}  # fmt: skip
"""The sizes of every family: each reads its own."""


def _config_seeds() -> list[bytes]:
    for family in families():
        load_family(family)  # torch, before memory is limited
    return [json.dumps(_CONFIG | {"model_type": family}).encode() for family in families()]


def _run_index(data: bytes) -> None:
    folder = _folder() / "index"
    if not folder.is_dir():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(_CONFIG | {"model_type": "llama"}))
        (folder / "a.safetensors").write_bytes(_safetensors({}))
    (folder / "model.safetensors.index.json").write_bytes(data)
    local(folder)


_INDEX = {"metadata": {"total_size": 8}, "weight_map": {"a.weight": "a.safetensors", "b.weight": "a.safetensors"}}


def _run_quantised(data: bytes) -> None:
    """quantization_config beside packed weights of every method."""
    folder = _folder() / "quantised"
    if not folder.is_dir():
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(_packed())
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError):
        return
    QuantisedFiles(SafetensorsFiles(folder, is_quantised=True), settings)


def _packed() -> bytes:
    entries, at = {}, 0
    for name, dtype, shape, size in (
        ("a.qweight", "I32", [16, 64], 4), ("a.qzeros", "I32", [1, 8], 4), ("a.scales", "F16", [1, 64], 2), ("a.g_idx", "I32", [128], 4),
        ("b.weight", "F8_E4M3", [64, 64], 1), ("b.weight_scale", "F32", [1], 4), ("b.weight_scale_inv", "F32", [1, 1], 4),
        ("c.weight_packed", "I32", [64, 16], 4), ("c.weight_scale", "BF16", [64, 1], 2), ("c.weight_shape", "I64", [2], 8),
        ("d.weight", "U8", [2048, 1], 1), ("d.weight.absmax", "F32", [64], 4), ("d.weight.quant_map", "F32", [16], 4),
        ("norm.weight", "F32", [64], 4),
    ):  # fmt: skip
        length = size * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


_QUANTISED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic", "fmt": "e4m3"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 64, "strategy": "group"}}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["norm"]},
]  # fmt: skip

# ── tokenizers ──


def _run_tokenizer_json(data: bytes) -> None:
    _use(read_tokenizer_json(_file("tokenizer.json", data)))


def _tokenizer_json_seeds() -> list[bytes]:
    write_byte_tokenizer(_folder())
    trained = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁b", -2.0)], 0, True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    levels = tokenizers.Tokenizer(models.BPE())
    levels.pre_tokenizer = pre_tokenizers.ByteLevel()
    levels.train_from_iterator(["hello hello world"], trainers.BpeTrainer(vocab_size=30, show_progress=False))
    texts = [(_folder() / "tokenizer.json").read_text(), trained.to_str(), words.to_str(), levels.to_str()]
    return [text.encode() for text in texts]


def _run_tekken(data: bytes) -> None:
    _use(read_tekken(_file("tekken.json", data)))


def _tekken_seed() -> bytes:
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"he"]
    return json.dumps(
        {
            "config": {
                "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+",
                "num_vocab_tokens": 257,
                "default_vocab_size": 267,
                "default_num_special_tokens": 10,
                "version": "v3",
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                for rank, token in enumerate(tokens)
            ],
            "special_tokens": [{"rank": 0, "token_str": "<unk>", "is_control": True}, {"rank": 1, "token_str": "<s>"}],
        }
    ).encode()


def _run_tiktoken(data: bytes) -> None:
    if is_tiktoken(data[:200]):
        _use(read_qwen_tiktoken(_file("qwen.tiktoken", data)))


def _tiktoken_seed() -> bytes:
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"hel"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _run_sentencepiece(data: bytes) -> None:
    ids = control_tokens(data)
    _use(SentencePieceTokenizer(data, AddedTokens(ids, frozenset(ids.values()))))


def _sentencepiece_seed() -> bytes:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁he", "▁", "h", "e"]
    return write_bpe_model(
        pieces,
        [-float(at) for at in range(len(pieces))],
        [2, 3, 3] + [6] * 256 + [1] * 4,
        unknown_id=0,
        dummy_prefix=True,
    )


def _run_folder(data: bytes) -> None:
    """tokenizer_config.json beside a good tokenizer.json."""
    folder = _folder() / "folder"
    if not folder.is_dir():
        folder.mkdir()
        write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_bytes(data)
    (folder / "generation_config.json").write_bytes(data)
    text = load_text(folder)
    text.render_chat([{"role": "user", "content": "Hi"}])


_FOLDER_SEED = {
    "eos_token": {"content": "<|end|>"},
    "bos_token": "<|turn|>",
    "chat_template": [
        {"name": "default", "template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ],
    "added_tokens_decoder": {"256": {"content": "<|end|>", "special": True}},
    "temperature": 0.6,
    "top_k": 20,
    "eos_token_id": [256],
}

# ── recordings ──


def _run_recording(data: bytes) -> None:
    read_recording(_file("crash.recording", data))


def _recording_seeds() -> list[bytes]:
    seeds = []
    for number in (1, 2):
        folder = _folder() / f"recorded-{number}"
        folder.mkdir(exist_ok=True)
        recorded = Recorded(Workload(number, has_beams=True), folder, number == 2)
        recorded.run()
        recorded.loop.close()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        seeds += [path.read_bytes()[: 48 * 2**10] for path in files[:3]]
    return seeds


# ── batches ──


def _run_batch(data: bytes) -> None:
    for _ in read_lines(io.BytesIO(data), _RULES):
        pass


def _run_records(data: bytes) -> None:
    read_back(io.BytesIO(data), "out.jsonl", Seen(), Tally())


_LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": None},
}
_RECORD = {
    "id": "batch_req_1",
    "custom_id": "a",
    "response": {
        "status_code": 200,
        "request_id": "r",
        "body": {"usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    },
    "error": None,
}


def _as_lines(value: Any) -> bytes:
    lines = value if isinstance(value, list) else [value]
    return b"".join(json.dumps(line).encode("utf-8", "surrogatepass") + b"\n" for line in lines)


def _lines_of(data: bytes) -> Any:
    return [json.loads(line) for line in data.splitlines()]


TARGETS: dict[str, Callable[[], Target]] = {
    "gguf": lambda: Target(
        "gguf", _gguf_seeds(), _run_gguf, (OctavoError,), ("GGUF", "general.alignment", "tokenizer.ggml.tokens", "gpt2")
    ),
    "safetensors": lambda: Target(
        "safetensors", [_safetensors_seed()], _run_safetensors, (OctavoError,),
        ("dtype", "shape", "data_offsets", "__metadata__", "F8_E4M3", "I64", "U8", "F64"),
        is_json=True, encode=_safetensors, decode=lambda data: json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]),
    ),
    "config": lambda: Target(
        "config", _config_seeds(), _run_config, (ConfigError,),
        ("model_type", "architectures", "rope_scaling", "rope_parameters", "yarn", "llama3", "head_dim", "num_key_value_heads",
         "layer_types", "sliding_window"), is_json=True,
    ),
    "weights_index": lambda: Target(
        "weights_index", [json.dumps(_INDEX).encode()], _run_index, (ConfigError,), ("weight_map", "../a", "a.safetensors"), is_json=True
    ),
    "quantised": lambda: Target(
        "quantised", [json.dumps(settings).encode() for settings in _QUANTISED], _run_quantised, (ConfigError,),
        ("quant_method", "bits", "group_size", "config_groups", "targets", "re:.*", "Linear", "ignore", "weights", "strategy"), is_json=True,
    ),
    "tokenizer_json": lambda: Target(
        "tokenizer_json", _tokenizer_json_seeds(), _run_tokenizer_json, (OctavoError,),
        ("ByteLevel", "Metaspace", "Split", "BPE", "Unigram", "WordPiece", "Sequence", "Replace", "Regex", "Strip", "Fuse",
         "ByteFallback", "TemplateProcessing", "truncation", "padding", "NFC", "Prepend"), is_json=True,
    ),
    "tekken": lambda: Target(
        "tekken", [_tekken_seed()], _run_tekken, (OctavoError,),
        ("config", "vocab", "special_tokens", "default_vocab_size", "default_num_special_tokens", "token_bytes", "pattern"),
        is_json=True,
    ),
    "tiktoken": lambda: Target("tiktoken", [_tiktoken_seed()], _run_tiktoken, (OctavoError,), ("IQ== 0\n", "aGU= 256\n")),
    "sentencepiece": lambda: Target(
        "sentencepiece", [_sentencepiece_seed()], _run_sentencepiece, (OctavoError,), ("\x0a", "\x12", "\x18", "\x25")
    ),
    "tokenizer_config": lambda: Target(
        "tokenizer_config", [json.dumps(_FOLDER_SEED).encode()], _run_folder, (OctavoError,),
        ("chat_template", "name", "template", "default", "eos_token", "content", "added_tokens_decoder"), is_json=True,
    ),
    "recording": lambda: Target("recording", _recording_seeds(), _run_recording, (ConfigError,)),
    "batch": lambda: Target(
        "batch", [_as_lines([_LINE, _LINE | {"url": "/v1/embeddings"}])], _run_batch, (OctavoError,),
        (*_LINE, "POST", "/v1/completions", "stream", "\n"), is_json=True, encode=_as_lines, decode=_lines_of,
    ),
    "batch_records": lambda: Target(
        "batch_records", [_as_lines([_RECORD, _RECORD])], _run_records, (ConfigError,), (*_RECORD, "usage", "status_code"),
        is_json=True, encode=_as_lines, decode=_lines_of,
    ),
}  # fmt: skip
