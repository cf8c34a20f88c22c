"""Targets: files that a server keeps or is given beside the model (adapters, keys, settings, plans, pins, pages, streams, usage), and what its
processes send each other."""

import contextlib
import gzip
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fuzz.files import _file, _folder, _safetensors
from benchmarks.fuzz.target import Target
from octavo.cli.settings import arguments_in
from octavo.cluster.messages import AgentHello, AgentMessage, ToPlacer, ToRelay
from octavo.config import Config, read_tiers, replace
from octavo.engine.pin_files import PinFiles, SavedPin
from octavo.errors import ConfigError, OctavoError
from octavo.ipc import secure_channel
from octavo.ipc.usage_ledger import Charge, UsageLedger
from octavo.key_settings import KeySettings, decode, encode, read_key_file
from octavo.kv_tier.folder import TierFolder
from octavo.kv_tier.run_file import RunHeader, checksum
from octavo.messages import FromEngine, GenerateRequest, SamplingParams, ToEngine, TokenDelta
from octavo.messages.prefixes import HoldPrefix
from octavo.messages.requests import Abort, Finish, ToSupervisor
from octavo.plan.machine import read_costs
from octavo.plan.model_shape import ModelShape
from octavo.plan.trace_files import read_trace
from octavo.schedule.step_costs import StepShape
from octavo.server.batch.crash_memory import CrashMemory
from octavo.server.gateway.catalog import read_models
from octavo.server.gateway.metrics import merged
from octavo.server.gateway.passage import _Named
from octavo.server.http.inflate import inflater_for
from octavo.server.state.stream_records import RecordHead, StreamRecords
from octavo.text.pooling_config import read_pooling_config
from octavo.weights.adapters.adapter_file import check_rank, open_adapter, stamp_of
from octavo.weights.sources.hub_api import _repository
from octavo.weights.sources.store import MANIFEST, Store
from tests.weights.gguf_writer import Packed, gguf_bytes

_MSGPACK = msgspec.msgpack.encode


@cache
def _own(name: str) -> Path:
    folder = _folder() / name
    folder.mkdir(exist_ok=True)
    return folder


# ── resumable streams ──

_STREAM = "cmpl-" + "0" * 32
_REQUEST = GenerateRequest("a", [1, 2], SamplingParams(n=2, max_tokens=8), [0])


def _run_stream(data: bytes) -> None:
    folder = _own("streams")
    (folder / f"stream-{_STREAM}").write_bytes(data)
    records = StreamRecords()
    records.open(folder)
    record = records.claim(_STREAM, lambda owner: True)
    if record is None:
        return
    record.source()
    record.note_attempt()
    record.begun(_REQUEST)
    ledger = UsageLedger(folder / "ledger")
    record.num_known(len(_REQUEST.prompt_ids))
    record.num_charged(ledger.accounts({b"k" * 16: KeySettings()})[b"k" * 16])
    ledger.close()
    record.release()
    records.remove_old(0.0)


def _parts(value: Any) -> bytes:
    """A stream's file with these parts, as MessagePack."""
    parts = value if isinstance(value, list) else [value]
    written = b""
    for part in parts:
        with contextlib.suppress(TypeError, OverflowError, ValueError):
            encoded = _MSGPACK(part)
            written += len(encoded).to_bytes(4) + encoded
    return written


def _parts_of(data: bytes) -> list[Any]:
    found, at = [], 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4])
        found.append(json.loads(msgspec.json.encode(msgspec.msgpack.decode(data[at + 4 : end]))))
        at = end
    return found


def _stream_seeds() -> list[bytes]:
    head = RecordHead("/v1/completions", b"{}", b"", bytes(32), 1.0, "octavo-2-x")
    lists = [[TokenDelta("a", 0, [5]), TokenDelta("a", 1, [6, 7])], [TokenDelta("a", 0, [8], Finish("stop"))]]
    charges = [Charge(12, 3, 0, 1, 15), Charge(13, 1, 255, 9, 2**40)]
    return [
        _parts([head, *lists]),
        _parts([head, None, lists[0], None, None]),
        _parts([head]),
        _parts([head, charges[0], lists[0], charges[1]]),
    ]


# ── pages on disk ──

_PAGE_BYTES = 512


def _run_tier(data: bytes) -> None:
    folder = _own("tier")
    tier = TierFolder(folder, 2**20, "layout", _PAGE_BYTES)
    (folder / "layout" / "a.kv").write_bytes(data)
    found = tier.look().stored
    pages = [[memoryview(bytearray(_PAGE_BYTES))] for _ in found[:8]]
    tier.read(found[:8], pages)
    tier.look()


def _run_of(value: Any) -> bytes:
    """A run whose header has these members and the right checksum: [layout, page_bytes, keys, sums]."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if isinstance(value, list) and len(value) > 2 and isinstance(value[2], list):
            value[2] = [key.encode() if isinstance(key, str) else key for key in value[2]]
        header = _MSGPACK(value)
        start = struct.pack("<8sII", b"octavoKV", len(header), zlib.crc32(header)) + header
        return start + bytes(-len(start) % 4096) + bytes(2 * _PAGE_BYTES)
    return b""


def _run_value(data: bytes) -> Any:
    try:
        (length,) = struct.unpack_from("<I", data, 8)
        header = msgspec.msgpack.decode(data[16 : 16 + length], type=RunHeader)
        return [header.layout, header.page_bytes, [key.decode() for key in header.keys], header.sums]
    except struct.error as error:
        raise ValueError from error


def _tier_seeds() -> list[bytes]:
    pages = [[memoryview(bytes(_PAGE_BYTES))]] * 2
    sums = [checksum(key, page) for key, page in zip((b"k1", b"k2"), pages, strict=True)]
    header = msgspec.to_builtins(RunHeader("layout", _PAGE_BYTES, [b"k1", b"k2"], sums), builtin_types=(bytes,))
    return [_run_of(list(header)), _run_of(["other", _PAGE_BYTES, [b"k1"], [1]])]


# ── adapters ──

_PEFT = {
    "config": {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "use_rslora": False, "use_dora": False, "bias": "none",
        "modules_to_save": None, "base_model_name_or_path": "tiny", "init_lora_weights": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 4, "^x$": 2}, "alpha_pattern": {"q_proj": 32},
    },
    "tensors": {
        "base_model.model.layers.0.self_attn.q_proj.lora_A.weight": {"dtype": "F32", "shape": [8, 1], "data_offsets": [0, 32]},
        "base_model.model.layers.0.self_attn.q_proj.lora_B.weight": {"dtype": "F32", "shape": [1, 8], "data_offsets": [32, 64]},
    },
}  # fmt: skip


def _run_peft(data: bytes) -> None:
    """Both files from one JSON object; from other bytes, each of them from all."""
    folder = _own("peft")
    config = tensors = data
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            config = json.dumps(value.get("config")).encode("utf-8", "surrogatepass")
            tensors = _safetensors(value.get("tensors"))
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    _open_adapter(folder)


def _run_gguf_adapter(data: bytes) -> None:
    _open_adapter(_file("adapter.gguf", data))


def _open_adapter(path: Path) -> None:
    file = open_adapter(path)
    check_rank(file, 64)
    stamp_of(path)
    str(file.base)
    for name in list(file.pairs)[:4]:
        file.matrices(name)
        int(file.num_weights)


def _gguf_adapter_seed() -> bytes:
    import torch  # noqa: F401  before memory is limited

    words: dict[str, Any] = {
        "general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 16.0,
        "general.base_model.0.name": "tiny",
    }  # fmt: skip
    tensors = [
        Packed("blk.0.attn_q.weight.lora_a", (8, 32), "F32", bytes(1024)),
        Packed("blk.0.attn_q.weight.lora_b", (32, 8), "F32", bytes(1024)),
        Packed("blk.0.attn_v.weight.lora_a", (8, 32), "Q8_0", bytes(8 * 34)),
        Packed("blk.0.attn_v.weight.lora_b", (32, 8), "F16", bytes(512)),
    ]
    return gguf_bytes(words, tensors)


# ── keys and what they have used ──


def _run_keys(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    found = read_key_file(text, "keys.txt")
    assert decode(encode(found.settings)) == found.settings or not found.settings


def _run_key_settings(data: bytes) -> None:
    decode(data.decode("utf-8", "surrogateescape"))  # as a command line has it


_KEYS = b"# keys\nsk-1\nadmin: sk-2\nsk-3 alice 2.5 60 50k - 2M/day\nsk-4 name=bob weight=0.5 rpm=10\n"
_KEY_SETTINGS = {"sk-1": {"name": "alice", "weight": 2.5, "rpm": 60}, "sk-2": {"tpm": "50k", "budget_tokens": 1000}}


def _run_usage(data: bytes) -> None:
    """Lay the case over a file of the right size: its head, a key, and the counts of the first row."""
    path = _folder() / "usage.ledger"
    path.unlink(missing_ok=True)
    key = b"k" * 16
    settings = KeySettings(rpm=5, tpm=1000, max_tokens_in_flight=500, budget_tokens=5000)
    if len(data) % 4 == 0:  # any file
        path.write_bytes(data)
    else:
        ledger = UsageLedger(path, lambda: 1e9)
        ledger.accounts({key: settings})
        ledger.close()
        with open(path, "r+b") as file:
            for offset, part in ((64, data[:8]), (4096, data[8:24]), (69632, data[24:40]), (135168, data[40:])):
                file.seek(offset)
                file.write(part)
    ledger = UsageLedger(path, lambda: 1e9)
    try:
        for account in ledger.accounts({key: settings, b"l" * 16: settings}).values():
            account.admit(10, 20)
            account.hold(20)
            account.charge(10, 5)
            account.used()
            account.remaining_requests()
            account.remaining_tokens()
            account.is_spent()
            account.hold(-20)
        ledger.sync()
    finally:
        ledger.close()


# ── plans, pins, settings ──


def _run_trace(data: bytes) -> None:
    read_trace(_file("trace", data))


_TRACES = [
    b'{"octavo_trace": 1, "block_size": 16}\n{"seconds": 0.5, "prompt_len": 5, "output_len": 3, "prefix": [1, 2], "session": 1}\n'
    b'{"seconds": 1, "prompt_len": 5, "output_len": 3, "session": 1, "after_previous": true}\n',
    b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n',
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47Z,1,2\n",
    b"Timestamp,Session ID,Request tokens,Response tokens\n5,,472,18\n45,x,1087,230\n",
]


def _run_costs(data: bytes) -> None:
    costs = read_costs(_file("costs.json", data))
    other = msgspec.structs.replace(costs.shape, num_parameters=costs.shape.num_parameters * 2)
    step = costs.step_of(other, costs.weights_bytes * 2, 2.0)
    step.step_seconds(StepShape(1, 0, 10, 0))
    step.costs(4, 64)


def _costs_seed() -> bytes:
    shape = ModelShape("m", 1000, 1000, 0, 0, 0, 2, 64, 4, 16, 128, 100, 256, 2000)
    return msgspec.json.encode(
        {
            "format": 1, "made": "2026-01-01", "version": "1", "machine": "x", "is_cpu": True, "shape": shape, "weights_bytes": 2000,
            "page_bytes": 4096, "page_size": 16, "num_pages": 100, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512,
            "depth": 0, "step": {"tokens": [1, 16, 64], "seconds": [0.01, 0.02, 0.05], "row": 0.001, "context": 1e-6, "pair": 1e-7,
            "noise": [0.9, 1.1]}, "front": {"seconds": 0.001, "token_seconds": 1e-6}, "start_seconds": 2.0, "num_steps": 10,
            "median_error": 0.1, "p90_error": 0.2, "flags": ["--x"],
        }
    )  # fmt: skip


def _run_pins(data: bytes) -> None:
    folder = _own("pins")
    (folder / "a").write_bytes(data)
    PinFiles(folder).load()


def _run_yaml(data: bytes) -> None:
    arguments_in(str(_file("settings.yaml", data)))


_YAML = [
    b"model: a\nmax-model-len: 8k\nenable_prefix_caching: false\nport: 9000\nstops: [a, b]\nmodel-settings: {a: {x: 1}}\nmax-inter-token-ms: off\n",
    b"a: &x [1, 2]\nb: *x\nc: {<<: {d: 1}}\nd: 2001-01-01\ne: !!binary aGk=\nf: |\n  text\ng: ~\n",
]


def _run_model_settings(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    read_models(replace(Config(), models="a=x,b=y", model_settings=text), Path("/nowhere"))


def _run_tier_flag(data: bytes) -> None:
    read_tiers(data.decode("utf-8", "replace"))


def _run_crashes(data: bytes) -> None:
    folder = _own("crashes")
    (folder / "suspects.json").write_bytes(data)
    (folder / "lines-in-flight").write_bytes(data)
    memory = CrashMemory(folder, 4)
    memory.open()
    memory.suspects("batch_1")
    memory.is_guilty("batch_1", 2)
    with memory.trying("batch_1", 2):
        pass
    memory.forget("batch_1")
    memory.close()


_FLIGHT = struct.pack("<8sQQQ", b"octavo 1", 5, 1, 0) + struct.pack("<38sxxQ", b"batch_1", 2)


def _run_pooling(data: bytes) -> None:
    folder = _own("pooling")
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).write_bytes(data)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_bytes(data)
    read_pooling_config(folder)


_POOLING = [
    [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}, {"type": "x.Normalize"}],
    {"max_seq_length": 512, "pooling_mode_mean_tokens": True, "pooling_mode": "cls"},
]  # fmt: skip


def _run_listing(data: bytes) -> None:
    _repository("a/b", data, "hub")


_LISTING = {
    "sha": "0" * 40,
    "siblings": [
        {"rfilename": "config.json", "size": 5},
        {"rfilename": "model.safetensors", "size": 1, "lfs": {"size": 9, "sha256": "0" * 64}},
    ],
}


def _run_manifest(data: bytes) -> None:
    folder = _own("store") / "a" / "b" / "c"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(data)
    Store(_own("store"))._read(folder)


# ── between processes ──


def _run_channel(data: bytes) -> None:
    """A stranger's bytes where a rank is expected; or, after a proper handshake, in place of messages."""
    secret = b"s" * 32
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
    try:
        is_stranger = len(data) % 2
        client.sendall(data if is_stranger else b"")
        if is_stranger:
            client.shutdown(socket.SHUT_WR)
        thread = threading.Thread(target=_say_hello, args=(client, secret, data))
        if not is_stranger:
            thread.start()
        try:
            connection, _ = secure_channel.accept(server, secret)
            with contextlib.suppress(EOFError):
                while True:
                    connection.recv_bytes()
        finally:
            if not is_stranger:
                thread.join()
    finally:
        client.close()
        server.close()


def _say_hello(client: socket.socket, secret: bytes, data: bytes) -> None:
    """The connecting side of a handshake, then `data`."""
    mine = b"m" * 32
    signed = secure_channel._exactly(client, 32) + mine + b"hi"
    signature = secure_channel._signature(secret, secure_channel._CONNECT + signed)
    client.sendall(mine + struct.pack("<I", 2) + b"hi" + signature)
    secure_channel._exactly(client, 32)
    with contextlib.suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)


_DECODERS = [
    msgspec.msgpack.Decoder(kind).decode
    for kind in (ToEngine, FromEngine, AgentHello, AgentMessage, ToPlacer, ToRelay)  # type: ignore[arg-type]
]
_LINES = [msgspec.json.Decoder(kind).decode for kind in (ToSupervisor, _Named)]  # type: ignore[arg-type]


def _run_messages(data: bytes) -> None:
    """Every kind of message between processes. A process that reads one from a peer ends the connection at these errors alone."""
    for decoded in (*_DECODERS, *_LINES):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OctavoError):
            decoded(data)


_MESSAGES = [
    _MSGPACK(_REQUEST),
    _MSGPACK(Abort("a")),
    _MSGPACK(HoldPrefix(1, "a", [1, 2])),
    _MSGPACK(AgentHello(0, "data")),
    b'{"type": "ScaleFleet", "replicas": 2}',
    b'{"model": "a", "stream": true}',
]


def _run_inflate(data: bytes) -> None:
    for encoding in ("gzip", "deflate", "br"):
        with contextlib.suppress(OctavoError):
            inflater = inflater_for(encoding)
            assert inflater is not None
            middle = len(data) // 2
            for at, part in enumerate((data[:middle], data[middle:])):
                inflater.feed(part, at == 1)
                while (piece := inflater.take()) and inflater.num_bytes < 2**22:
                    assert len(piece) <= 2**17


def _run_metrics(data: bytes) -> None:
    merged({"a": data.decode("utf-8", "replace"), 'b"\n': "# TYPE x counter\nx_total 1\n"})


_METRICS = (
    b'# HELP octavo:x y\n# TYPE octavo:x counter\noctavo:x_total{a="b,}"} 1\nx_bucket{le="+Inf"} 3 17\noctavo:key_a 1\n'
)

TARGETS: dict[str, Callable[[], Target]] = {
    "stream_record": lambda: Target(
        "stream_record", _stream_seeds(), _run_stream, (), ("\xc0", "\x00\x00\x00\x01\xc0", "path", "owner", "stop"), is_json=True,
        encode=_parts, decode=_parts_of,
    ),
    "tier_run": lambda: Target(
        "tier_run", _tier_seeds(), _run_tier, (), ("octavoKV", "layout", "k1"), is_json=True, encode=_run_of, decode=_run_value
    ),
    "peft_adapter": lambda: Target(
        "peft_adapter", [json.dumps(_PEFT).encode()], _run_peft, (ConfigError,),
        ("config", "tensors", "rank_pattern", "alpha_pattern", "r", "lora_alpha", "shape", "dtype", "data_offsets", "F16", "I64", "lora_A.weight"),
        is_json=True,
    ),
    "gguf_adapter": lambda: Target(
        "gguf_adapter", [_gguf_adapter_seed()], _run_gguf_adapter, (OctavoError,),
        ("GGUF", "adapter.lora.alpha", ".lora_a", ".lora_b", "adapter", "general.type"),
    ),
    "key_file": lambda: Target(
        "key_file", [_KEYS], _run_keys, (ConfigError,), ("admin:", "name=", "weight=", "rpm=", "/day", "50k", "2M", "-", "\n", " ", "#")
    ),
    "key_settings": lambda: Target(
        "key_settings", [json.dumps(_KEY_SETTINGS).encode()], _run_key_settings, (ConfigError,),
        ("name", "weight", "rpm", "tpm", "budget_tokens", "max_tokens_in_flight", "5k"), is_json=True,
    ),
    "usage_ledger": lambda: Target(
        "usage_ledger", [struct.pack("<q", 1) + b"k" * 16 + bytes(81), b"octavo-usage-01\n" + bytes(48)], _run_usage, (ConfigError,)
    ),
    "plan_trace": lambda: Target(
        "plan_trace", _TRACES, _run_trace, (ConfigError,), ("seconds", "prefix", "hash_ids", "session", "after_previous", ",", "\n", '"', "1e400")
    ),
    "plan_costs": lambda: Target(
        "plan_costs", [_costs_seed()], _run_costs, (ConfigError,), ("step", "tokens", "seconds", "shape", "noise", "num_experts"), is_json=True
    ),
    "pins": lambda: Target(
        "pins", [_MSGPACK(SavedPin(HoldPrefix(1, "a", [1, 2, 3], b"o", 5.0), 10.0))], _run_pins, (), ("wish", "until", "tries")
    ),
    "settings_yaml": lambda: Target(
        "settings_yaml", _YAML, _run_yaml, (ConfigError,), ("&x ", "*x", "<<: ", "!!python/object:os.system ", "? ", "- ", "{", "}", ": ", "\n")
    ),
    "model_settings": lambda: Target(
        "model_settings", [b'{"a": {"max_model_len": 512, "dtype": "auto", "kv_cache_memory_bytes": "64M"}, "b": {}}'], _run_model_settings,
        (ConfigError,), ("a", "b", "port", "max_num_seqs", "memory_share", "--max-model-len", "auto", "1e400"), is_json=True,
    ),
    "tier_flag": lambda: Target("tier_flag", [b"ram:8GiB,disk:50GiB:/var/x"], _run_tier_flag, (ConfigError,), ("ram:", "disk:", "GiB", ",")),
    "crash_memory": lambda: Target(
        "crash_memory", [_FLIGHT, b'{"run": 4, "strikes": {"batch_1": {"2": 1}}}'], _run_crashes, (), ("octavo 1", "batch_1", "strikes", "run")
    ),
    "pooling_config": lambda: Target(
        "pooling_config", [json.dumps(each).encode() for each in _POOLING], _run_pooling, (ConfigError,),
        ("path", "type", "x.Pooling", "1_Pooling", "..", "pooling_mode", "max_seq_length"), is_json=True,
    ),
    "hub_listing": lambda: Target(
        "hub_listing", [json.dumps(_LISTING).encode()], _run_listing, (ConfigError,), ("siblings", "rfilename", "lfs", "size", "sha256"), is_json=True
    ),
    "manifest": lambda: Target(
        "manifest", [b'{"name": "a:b", "kind": "gguf", "commit": "0", "files": [{"name": "x", "num_bytes": 1, "sha256": ""}], "pulled": 1.0}'], _run_manifest, (), ("files", "name", "../x", ""), is_json=True
    ),
    "channel": lambda: Target(
        "channel", [b"", bytes(32) + struct.pack("<I", 2) + b"hi" + bytes(32), struct.pack("<I", 4) + bytes(20), b"GET / HTTP/1.1\r\n\r\n"],
        _run_channel, (secure_channel.Refused, OSError),
    ),
    "messages": lambda: Target(
        "messages", _MESSAGES, _run_messages, (), ("type", "Abort", "prompt_ids", "params", "model", "stream")
    ),
    "inflate": lambda: Target("inflate", [gzip.compress(b"{}" * 100), zlib.compress(b"{}" * 100), b"\x0b\x02\x80hello\x03"], _run_inflate, ()),
    "gateway_metrics": lambda: Target("gateway_metrics", [_METRICS], _run_metrics, (), ("# HELP ", "# TYPE ", "{", "}", '"', "octavo:key_", " ")),
}  # fmt: skip
