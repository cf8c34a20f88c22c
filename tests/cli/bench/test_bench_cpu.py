"""The CPU benchmark, rehearsed with a tiny model and without peers: the servers compared, the verdicts, and that all parts run.
No figure is compared with a clock."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cpu import compare, engine, hf_folder, loads, peers, perplexity, processes, questions
from benchmarks.cpu.__main__ import main
from benchmarks.cpu.servers import DidNotStart, Server, started
from benchmarks.cpu.targets import OCTAVO, OCTAVO_FLOAT32, TARGETS
from benchmarks.gpu.show import Results
from octavo import LLM
from octavo.errors import ConfigError
from octavo.kernels.cpu.build import NoCompiler
from octavo.text import load_text
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.sources.source import resolve
from tests.text.vocabularies import SAMPLES, byte_level, gguf_of_byte_level
from tests.weights.gguf_writer import Packed, write_gguf

ROOT = Path(__file__).resolve().parents[3]
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 64, 2, 4, 2, 96, 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = gguf_of_byte_level(byte_level(), "gpt-2")
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"])
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, *shape: int) -> Packed:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        return Packed(name, shape, "F32", values.numpy().tobytes())

    kv_size = HIDDEN // HEADS * KV_HEADS
    tensors = [tensor("token_embd.weight", vocab_size, HIDDEN), tensor("output_norm.weight", HIDDEN)]
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        tensors += [
            tensor(f"{name}.attn_q.weight", HIDDEN, HIDDEN),
            tensor(f"{name}.attn_k.weight", kv_size, HIDDEN),
            tensor(f"{name}.attn_v.weight", kv_size, HIDDEN),
            tensor(f"{name}.attn_output.weight", HIDDEN, HIDDEN),
            tensor(f"{name}.ffn_gate.weight", INNER, HIDDEN),
            tensor(f"{name}.ffn_up.weight", INNER, HIDDEN),
            tensor(f"{name}.ffn_down.weight", HIDDEN, INNER),
            tensor(f"{name}.attn_norm.weight", HIDDEN),
            tensor(f"{name}.ffn_norm.weight", HIDDEN),
        ]
    metadata = vocabulary | {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": CONTEXT,
        "llama.vocab_size": vocab_size,
    }
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", metadata, tensors)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files converted from the model, shared by the tests of this module."""
    return tmp_path_factory.mktemp("cache")


def a_setting(model: Path, cache: Path, **changes: Any) -> peers.Setting:
    values: dict[str, Any] = {"llama_server": "", "llama_python": "", "vllm_python": ""} | changes
    return peers.Setting(resolve(str(model)), loads.QUICK, (0, 1), cache=cache, **values)


# ── the rehearsal ───────────────────────────────────────────────────────────────────────────────────


def test_without_peers_octavo_is_measured_and_they_are_skipped_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no peer on this path
    file = tmp_path / "result.json"
    names = [OCTAVO, "llama.cpp", "llama.cpp-f32", "vllm-float32"]
    assert main(["--quick", "--model", str(model), "--servers", ",".join(names), "--result", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result["skipped"]) == names[1:]
    (figures,) = result["compare"]["rounds"][OCTAVO]
    assert figures["start_s"] > 0 and figures["memory_bytes"] > 50e6
    assert list(figures["loads"]) == [load.name for load in loads.QUICK]
    for load in loads.QUICK:
        found = figures["loads"][load.name]
        assert found["num_errors"] == 0 and found["num_requests"] == load.num_requests
        assert found["output_tokens"] == found["expected_tokens"] == load.num_requests * load.output_len
        assert found["token_counts_from"] == "usage" and found["output_tokens_per_second"] > 0
        assert found["prompt_tokens"] >= load.num_requests * (load.input_len + load.shared_len)
        assert found["client_share"] < 1 and 0 <= found["others_share"] <= 1
    printed = capsys.readouterr().out
    for name in names[1:]:
        assert f"{name}: skipped, not installed" in printed
    assert "a rehearsal: nothing here is a measurement" in printed and "✗" not in printed and "✓" not in printed
    assert [verdict["title"] for verdict in result["compare"]["verdicts"]] == [
        target.title for target in TARGETS if target.server == OCTAVO
    ]
    assert all(verdict["ratio"] is None for verdict in result["compare"]["verdicts"])


def test_a_benchmark_that_is_ended_leaves_no_server_behind(model: Path) -> None:
    command = [sys.executable, "-u", "-m", "benchmarks.cpu", "--quick", "--model", str(model), "--servers", OCTAVO]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("round 1, octavo: first token after")
        members = processes.tree(process.pid)
        assert len(members) >= 2
        process.terminate()
    assert process.returncode == 130
    # A zombie that init has not reaped yet counts as ended.
    assert not [pid for pid in members if (fields := processes._stat(pid)) and fields[0] != "Z"]


def test_a_server_that_ends_at_once_is_reported_with_its_last_words() -> None:
    server = Server("broken", (sys.executable, "-c", "import sys; sys.exit('there is no such model')"))
    with pytest.raises(DidNotStart, match="exit code 1: there is no such model"), started(server):
        pass


def test_the_tree_of_a_process_and_what_it_holds() -> None:
    grandchild = "held = bytearray(b'x') * (64 << 20); print(1, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    started_here = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with started_here as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        before = processes.work(process.pid)
        assert len(processes.tree(process.pid)) == 2
        assert 64 << 20 < processes.resident_bytes(process.pid) < 200 << 20
        assert 0 <= before.server <= before.machine
        process.stdin.write("\n")
    assert processes.resident_bytes(process.pid) == 0


# ── the servers compared ────────────────────────────────────────────────────────────────────────────


def test_peers_serve_the_same_file_under_the_same_name(model: Path, cache: Path) -> None:
    given = a_setting(model, cache, llama_server="/opt/llama-server", vllm_python=sys.executable)
    found, skipped = peers.servers([OCTAVO, OCTAVO_FLOAT32, "llama.cpp", "llama.cpp-q8_0", "vllm-float32"], given)
    assert list(skipped) == ["llama.cpp-q8_0"] and "llama-cpp-python" in skipped["llama.cpp-q8_0"]
    by_name = {server.name: server for server in found}
    for server in found:
        assert loads.MODEL_NAME in server.command and "{port}" in server.command
    assert str(model) in by_name[OCTAVO].command and str(model) in by_name["llama.cpp"].command
    assert set(by_name[OCTAVO_FLOAT32].command) - set(by_name[OCTAVO].command) == {"--dtype", "float32"}
    assert [server.name for server in found if server.is_peer] == ["llama.cpp", "vllm-float32"]
    assert [server.name for server in found if server.is_float32] == [OCTAVO_FLOAT32, "vllm-float32"]
    slots = dict(zip(by_name["llama.cpp"].command, by_name["llama.cpp"].command[1:], strict=False))
    assert int(slots["--ctx-size"]) // int(slots["--parallel"]) >= max(load.longest for load in loads.QUICK)
    # vLLM's folder is written from the file, and is the same model.
    folder = Path(by_name["vllm-float32"].command[by_name["vllm-float32"].command.index("--model") + 1])
    ours, theirs = (dict(open_checkpoint(path).tensors("cpu", torch.float32)) for path in (model, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    words, again = load_text(model), load_text(folder)
    for text in SAMPLES:
        ids = words.encode(text, add_special_tokens=False)
        assert again.encode(text, add_special_tokens=False) == ids and again.decode(ids) == words.decode(ids)
    # The folder is written once and then reused.
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert peers.folder_of(given) == folder and (folder / "config.json").stat().st_mtime_ns == stamp


def test_a_vocabulary_that_cannot_be_written_is_said_to_be_the_reason(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama"}
    assert "byte-level" in hf_folder.check(write_gguf(tmp_path / "m.gguf", metadata, []))
    metadata["general.architecture"] = "gemma3"
    assert "gemma3" in hf_folder.check(write_gguf(tmp_path / "m.gguf", metadata, []))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--llama-server", "/nowhere/llama-server"], "--llama-server /nowhere/llama-server is not a program"),
        (["--vllm-python", "/nowhere/python"], "--vllm-python /nowhere/python is not a program"),
        (["--llama-python", sys.executable], "has no llama_cpp: give an interpreter that has it"),
        (["--model", "/nowhere/model.gguf"], "no such file or folder: /nowhere/model.gguf"),
        (["--result", "/nowhere/result.json"], "the folder /nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(model: Path, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--model", str(model), *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("benchmarks.cpu: error: ") and problem in said and said.count("\n") == 1


def test_an_unknown_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--servers", "octavo,sglang"])
    assert "'sglang' is not one of octavo" in capsys.readouterr().err


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────


def a_round(rate: float, ttft: float, tpot: float, start: float = 2.0, gigabytes: float = 0.5) -> dict[str, Any]:
    found = {
        "num_errors": 0,
        "output_tokens": 10,
        "output_tokens_per_second": rate,
        "ttft_ms": {"p50": ttft},
        "tpot_ms": {"p50": tpot},
    }
    every = {load.name: found for load in loads.FULL}
    return {"start_s": start, "memory_bytes": gigabytes * 1e9, "loads": every}


def test_ratios_are_to_the_best_peer_of_the_same_kind_in_the_median() -> None:
    servers = [
        Server(OCTAVO, (), is_peer=False),
        Server(OCTAVO_FLOAT32, (), is_peer=False, is_float32=True),
        Server("fast", ()),
        Server("exact", (), is_float32=True),
    ]
    rounds = {
        OCTAVO: [a_round(400, 60, 5), a_round(300, 50, 6, start=3.5), a_round(100, 90, 9, start=3.5)],
        OCTAVO_FLOAT32: [a_round(130, 100, 20)],
        "fast": [a_round(100, 200, 10), a_round(150, 200, 12), a_round(50, 100, 11)],
        "exact": [a_round(80, 150, 40), a_round(90, 100, 40), a_round(70, 130, 40)],
    }
    verdicts = {verdict["title"]: verdict for verdict in compare.judge(servers, rounds)}
    assert len(verdicts) == len(TARGETS)
    token = verdicts["c1: time per output token, ms"]
    assert (token["ours"], token["best_peer"], token["theirs"]) == (6, "fast", 11)
    assert token["ratio"] == pytest.approx(11 / 6) and token["reaches_must"] and not token["reaches_aim"]
    first = verdicts["c1: time to first token, ms"]
    assert (first["ours"], first["best_peer"], first["theirs"]) == (60, "exact", 130) and first["reaches_must"]
    many = verdicts["c8: output tokens/s"]
    assert (many["ours"], many["theirs"], many["ratio"]) == (300, 100, 3.0)
    exact = verdicts["float32, c8: output tokens/s"]
    assert (exact["best_peer"], exact["theirs"], exact["ratio"]) == ("exact", 80, 130 / 80)
    assert verdicts["start to first token, s"]["reaches_must"] is False
    assert verdicts["resident memory, GB"]["reaches_aim"] is True
    shown = compare.show_verdicts(list(verdicts.values()), is_rehearsal=False)
    assert "1.83 ×  1.45 × ✓   2.2 × ✗" in shown and "≤ 0.8 ✓" in shown


def test_a_load_with_failed_requests_has_no_figure_and_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    figures = a_round(100, 10, 5)
    figures["loads"] = dict(figures["loads"]) | {"c8": figures["loads"]["c8"] | {"num_errors": 3}}
    assert compare.value(figures, "c8", "rate") is None and compare.value(figures, "c32", "rate") == 100
    assert compare.median([figures], "c8", "rate") is None
    servers = [Server(OCTAVO, (sys.executable, "-c", ""), is_peer=False)]
    assert compare.run(servers, loads.QUICK, 2, Results(None), is_rehearsal=True) == 2
    assert "octavo, round 2: did not start: exit code 0" in capsys.readouterr().out


# ── in this process ─────────────────────────────────────────────────────────────────────────────────


def test_the_loss_of_a_text_is_that_of_its_tokens_one_by_one(
    model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = a_setting(model, cache)
    windows = [window[:40] for window in perplexity.cut(model)[:2]]
    losses = perplexity.octavo_losses(given, {"dtype": "float32"}, windows)
    seen: list[torch.Tensor] = []
    with LLM(str(model), dtype="float32", kv_cache_memory_bytes=2**20, enforce_eager=True) as llm:
        runner = llm._loop.executor._runner  # type: ignore[attr-defined]
        head = runner.model.logits
        runner.model.logits = lambda hidden: seen.append(head(hidden).clone()) or head(hidden)
        for window in windows:
            for end in range(1, len(window)):
                llm.generate([window[:end]], perplexity.exactly(1), use_tqdm=False)
    scores = torch.cat(seen).double().log_softmax(-1)
    targets = torch.tensor([token for window in windows for token in window[1:]])
    by_hand = -scores.gather(1, targets[:, None]).view(2, -1).sum(1)
    assert losses == pytest.approx(by_hand.tolist(), rel=1e-5)
    perplexity.run(given, 1, Results(None))
    printed = capsys.readouterr().out
    assert "llama.cpp, the same file: skipped, llama-cpp-python is not installed" in printed
    assert f"\n{perplexity.WINDOW - 1} tokens of 1 windows of {perplexity.WINDOW}" in printed


@pytest.fixture(scope="module")
def needs_kernels() -> None:
    try:
        engine.ceilings(2**21)
    except ConfigError as error:
        assert isinstance(error.__cause__, NoCompiler)
        pytest.skip("no compiler here: limits and operations are those of the native kernels")


@pytest.mark.usefixtures("needs_kernels")
def test_limits_growth_and_profile(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    parts = ["--limits", "--growth", "--profile"]
    assert main(["--quick", *parts, "--model", str(model), "--servers", OCTAVO_FLOAT32, "--result", str(file)]) == 0
    result = json.loads(file.read_text())
    figures = result["limits"][OCTAVO_FLOAT32]
    assert [figure["batch"] for figure in figures] == [1, 8, 32]
    tensors = dict(open_checkpoint(model).tensors("cpu", torch.float32))
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 2)
    assert [figure["operations"] for figure in figures] == [2 * matrices * batch for batch in (1, 8, 32)]
    for figure in figures:
        assert figure["bytes"] > 4 * matrices and figure["bandwidth_share"] > 0 and 0 < figure["rate_share"] < 1
    points = result[f"growth of {OCTAVO_FLOAT32}"]["points"]
    assert {point["batch"] for point in points} == {1, 2, 4, 8, 16, 32, 64}
    assert max(point["context"] for point in points) > 4096 * 0.125 - 40
    operations = {found["name"]: found for found in result["profile"][OCTAVO_FLOAT32]["operations"]}
    assert operations["attend"]["count"] == LAYERS and all(found["ms"] >= 0 for found in operations.values())
    columns = HIDDEN + 2 * HIDDEN // HEADS * KV_HEADS
    assert operations[f"linear {HIDDEN} → {columns}"]["bytes"] == 4 * LAYERS * HIDDEN * columns
    printed = capsys.readouterr().out
    assert "GB/s read" in printed and "plan, assemble, sample, hand over" in printed


def test_parts_that_look_into_octavo_need_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--growth", "--model", str(model), "--servers", "llama.cpp"]) == 2
    assert "--growth measures Octavo: name one of octavo, octavo-float32 in --servers" in capsys.readouterr().err


def test_an_answer_is_right_by_its_words_alone() -> None:
    assert questions.is_right("It has Eight legs.", "eight|8") and questions.is_right("8.", "eight|8")
    assert not questions.is_right("It has 18 legs.", "eight|8") and not questions.is_right("", "Paris")
    assert len({question for question, _ in questions.QUESTIONS}) == 48
