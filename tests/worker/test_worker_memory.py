"""KV sizing: what auto takes, what is refused, and that the numbers in a refusal work."""

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import CacheConfig
from octavo.errors import ConfigError
from octavo.limits import resolve
from octavo.messages import DeviceMemory, LoadReport
from octavo.supervisor.memory_report import budget_lines
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import GiB, MiB, in_words, settle, weights_too_large
from tests.worker.tiny import tiny_config, write_tiny_llama

REPORT = LoadReport(
    device="cpu (2 threads)",
    dtype="float32",
    vocab_size=1000,
    max_model_len=4096,
    max_model_len_is_auto=True,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    weights_bytes=300 * MiB,
    page_bytes=MiB,
    available_bytes=8 * GiB,
    host_available_bytes=8 * GiB,
    notes=["first"],
)
GPU = msgspec.structs.replace(REPORT, device="cuda:0 (some GPU)", available_bytes=60 * GiB)


def changed(report: LoadReport = REPORT, **values: object) -> LoadReport:
    return msgspec.structs.replace(report, **values)


def test_auto_takes_a_share_or_what_is_useful() -> None:
    assert settle(CacheConfig(), [REPORT]).num_pages == int(0.4 * 8 * 1024)
    assert settle(CacheConfig(), [changed(available_bytes=30 * GiB)]).num_pages == int(0.4 * 30 * 1024)
    small = settle(CacheConfig(), [changed(max_num_seqs=2, max_model_len=100)])
    assert small.num_pages == 2 * 7
    assert small.max_model_len == 100
    assert settle(CacheConfig(), [GPU]).num_pages == 64 * 256
    assert settle(CacheConfig(), [changed(GPU, available_bytes=3 * GiB)]).num_pages == 3 * 1024


def test_idle_prefixes_keep_the_whole_store_on_a_cpu_or_what_the_flag_says() -> None:
    whole = settle(CacheConfig(), [REPORT])
    assert whole.num_warm_pages == whole.num_pages
    asked = settle(CacheConfig(kv_cache_memory_bytes=GiB), [REPORT])
    assert asked.num_warm_pages == asked.num_pages == 1024
    frugal = settle(CacheConfig(idle_prefix_bytes=192 * MiB), [REPORT])
    assert frugal.num_warm_pages == 192
    assert any("idle prefixes may keep 192 MiB" in note for note in frugal.notes)
    assert settle(CacheConfig(idle_prefix_bytes=0), [REPORT]).num_warm_pages == 0
    assert settle(CacheConfig(), [GPU]).num_warm_pages is None, "all memory is taken at the start"


def test_ranks_add_up_and_the_poorest_decides() -> None:
    rich, poor = changed(GPU, available_bytes=20 * GiB), changed(GPU, available_bytes=5 * GiB)
    report = settle(CacheConfig(), [rich, poor])
    assert report.num_pages == 5 * 1024
    assert (report.page_bytes, report.weights_bytes) == (2 * MiB, 600 * MiB)
    assert report.device == "2 ranks, each cuda:0 (some GPU)"


def test_an_automatic_context_shrinks_to_what_fits_and_says_so() -> None:
    report = settle(CacheConfig(kv_cache_memory_bytes=100 * MiB), [REPORT])
    assert (report.num_pages, report.max_model_len) == (100, 1600)
    assert any("from 4096 to 1600" in note for note in report.notes)
    assert report.notes[0] == "first"


def test_a_context_that_was_asked_for_is_refused_with_numbers_that_work() -> None:
    asked = changed(max_model_len_is_auto=False, bfloat16_weights_bytes=150 * MiB, bfloat16_page_bytes=MiB // 2)
    with pytest.raises(ConfigError) as caught:
        settle(CacheConfig(kv_cache_memory_bytes=100 * MiB), [asked])
    message = caught.value.message
    assert "\n" not in message
    (more,) = re.findall(r"--kv-cache-memory-bytes (\d+)M", message)
    (fewer,) = re.findall(r"--max-model-len (\d+)$", message)
    settle(CacheConfig(kv_cache_memory_bytes=int(more) * MiB), [asked])
    settle(CacheConfig(kv_cache_memory_bytes=100 * MiB), [changed(asked, max_model_len=int(fewer))])
    assert "bfloat16" not in message  # half the bytes would still not fit

    with pytest.raises(ConfigError) as caught:
        settle(CacheConfig(kv_cache_memory_bytes=128 * MiB), [changed(asked, available_bytes=200 * MiB)])
    assert "use --dtype bfloat16, or --max-model-len 2048" in caught.value.message
    packed = changed(asked, available_bytes=200 * MiB, bfloat16_weights_bytes=0)
    with pytest.raises(ConfigError) as caught:
        settle(CacheConfig(kv_cache_memory_bytes=128 * MiB), [packed])
    assert "bfloat16" not in caught.value.message


def test_more_than_there_is_and_less_than_a_page_are_refused() -> None:
    with pytest.raises(ConfigError, match="use --kv-cache-memory-bytes 8192M or less"):
        settle(CacheConfig(kv_cache_memory_bytes=9 * GiB), [REPORT])
    with pytest.raises(ConfigError, match=f"use at least {MiB}"):
        settle(CacheConfig(kv_cache_memory_bytes=1000), [REPORT])
    with pytest.raises(ConfigError, match="free some memory"):
        settle(CacheConfig(), [changed(available_bytes=1000)])
    with pytest.raises(ConfigError, match="free some memory"):
        settle(CacheConfig(), [changed(GPU, available_bytes=-5 * GiB)])


# ── a GPU that was measured ──


def measured(other: int = 0, own: int = 20 * GiB, working: int = 8 * GiB, **values: object) -> LoadReport:
    """80 GiB, of which the weights take 16; a step takes `working`, a fourth of that when rows only decode."""
    memory = DeviceMemory(80 * GiB, other, own, working, working // 4, working // 16, GiB)
    report = changed(GPU, dtype="bfloat16", max_model_len=131072, max_num_batched_tokens=8192, weights_bytes=16 * GiB)
    return changed(report, memory=memory, available_bytes=memory.for_pages, **values)


def asked(len_: int, report: LoadReport) -> LoadReport:
    return changed(report, max_model_len=len_, max_model_len_is_auto=False)


def test_a_share_of_the_gpu_is_ours_whoever_else_is_there() -> None:
    whole = int(80 * GiB * 0.92) - 29 * GiB  # less own, working space and reserve
    assert settle(CacheConfig(), [measured()]).num_pages == whole // MiB
    beside = settle(CacheConfig(), [measured(other=2 * GiB)])
    assert beside.num_pages == whole // MiB, "what another holds is not ours, while there is enough"
    assert any("92% of the GPU, less weights, working space and reserve" in note for note in beside.notes)
    crowded = settle(CacheConfig(), [measured(other=40 * GiB)])
    assert crowded.num_pages == 11 * 1024
    assert any(
        "other processes hold 40 GiB, so that 92% of the GPU cannot be reached" in note for note in crowded.notes
    )
    alone = settle(CacheConfig(gpu_memory_utilization=1.0), [measured()])
    assert alone.num_pages == 51 * 1024 and alone.memory == measured().memory


def test_bytes_that_were_asked_for_are_absolute() -> None:
    config = CacheConfig(kv_cache_memory_bytes=50 * GiB, gpu_memory_utilization=0.4)
    assert settle(config, [measured()]).num_pages == 50 * 1024
    with pytest.raises(ConfigError, match="use --kv-cache-memory-bytes 52224M or less"):
        settle(CacheConfig(kv_cache_memory_bytes=52 * GiB), [measured()])


def test_ranks_add_up_their_measurements() -> None:
    report = settle(CacheConfig(), [measured(), measured(other=40 * GiB)])
    assert report.num_pages == 11 * 1024 and report.memory is not None
    assert (report.memory.total, report.memory.other) == (160 * GiB, 40 * GiB)
    assert any("other processes" in note for note in report.notes)


FLAG = {
    "--gpu-memory-utilization": lambda config, report, text: (
        dataclasses.replace(config, gpu_memory_utilization=float(text)),
        report,
    ),
    "--kv-cache-memory-bytes": lambda config, report, text: (
        dataclasses.replace(config, kv_cache_memory_bytes=int(text.removesuffix("M")) * MiB),
        report,
    ),
    "--max-model-len": lambda config, report, text: (config, changed(report, max_model_len=int(text))),
    "--kv-cache-dtype": lambda config, report, text: (config, changed(report, page_bytes=report.fp8_page_bytes)),
    "--quantization": lambda config, report, text: (config, lighter(report)),
    "--max-num-batched-tokens": lambda config, report, text: (config, stepping(report, int(text))),
    "--max-num-seqs": lambda config, report, text: (config, stepping(report, None, int(text))),
}


def lighter(report: LoadReport) -> LoadReport:
    saved = report.weights_bytes - report.fp8_weights_bytes
    memory = msgspec.structs.replace(report.memory, own=report.memory.own - saved)
    return changed(report, memory=memory, available_bytes=memory.for_pages)


def stepping(report: LoadReport, num_tokens: int | None, num_rows: int | None = None) -> LoadReport:
    """What a smaller step takes where `measured` is the truth for a model with two parts, one of which grows with
    tokens (all of the working space at 8192) and one with rows (a fourth of it at 64)."""
    tokens, rows = num_tokens or report.max_num_batched_tokens, num_rows or report.max_num_seqs
    per_token, per_row = 8 * GiB / 8192, 2 * GiB / 64
    working = int(max(per_token * tokens, per_row * rows))
    memory = msgspec.structs.replace(report.memory, working=working)
    return changed(
        report, memory=memory, available_bytes=memory.for_pages, max_num_batched_tokens=tokens, max_num_seqs=rows
    )


def ways(config: CacheConfig, report: LoadReport) -> list[str]:
    """What the refusal offers, each tried out by hand."""
    with pytest.raises(ConfigError) as caught:
        settle(config, [report])
    message = caught.value.message
    assert "\n" not in message
    offered = message.split(": use ")[1].split(", or ")
    for way in offered:
        new_config, new_report = config, report
        for flag, text in re.findall(r"(--[a-z-]+) (\S+)", way):
            new_config, new_report = FLAG[flag](new_config, new_report, text)
        least = min(2048, report.max_model_len) if report.max_model_len_is_auto else new_report.max_model_len
        assert settle(new_config, [new_report]).max_model_len >= least, way
    return [re.sub(r" [\d.]+M?", "", way) for way in offered]


def test_ways_out_are_ranked_and_were_counted_through() -> None:
    both = {"fp8_page_bytes": MiB // 2, "fp8_weights_bytes": 9 * GiB}
    # 44.6 GiB for pages are 45,670 of them: 730,000 tokens.
    assert ways(CacheConfig(), asked(800_000, measured(**both))) == [
        "--gpu-memory-utilization",
        "--max-num-batched-tokens",
        "--kv-cache-dtype fp8",
        "--quantization fp8",
        "--max-model-len",
    ]
    # Beyond what is free, whatever the share; too much for smaller steps alone.
    assert ways(CacheConfig(), asked(1_000_000, measured(**both))) == ["--kv-cache-dtype fp8", "--max-model-len"]
    assert ways(CacheConfig(), asked(1_000_000, measured())) == ["--max-model-len"]
    assert ways(CacheConfig(kv_cache_memory_bytes=10 * GiB), asked(200_000, measured())) == [
        "--kv-cache-memory-bytes (51 GiB is available)",
        "--max-model-len",
    ]


def test_smaller_steps_are_as_large_as_they_may_be() -> None:
    # Free are 51 - 40 GiB = 11 GiB. 9 GiB more come from tokens alone only in part (6 GiB), with rows in whole.
    crowded = measured(other=40 * GiB)
    assert ways(CacheConfig(), asked(16 * 1024 * 15, crowded)) == ["--max-num-batched-tokens", "--max-model-len"]
    assert ways(CacheConfig(), asked(16 * 1024 * 18, crowded)) == [
        "--max-num-batched-tokens --max-num-seqs",
        "--max-model-len",
    ]
    assert ways(CacheConfig(), asked(16 * 1024 * 20, crowded)) == ["--max-model-len"]


def test_where_not_one_page_fits_it_is_said_where_the_memory_is() -> None:
    full = measured(other=51 * GiB)
    assert ways(CacheConfig(), full) == ["--max-num-batched-tokens"]
    with pytest.raises(
        ConfigError, match=r"of the GPU's 80 GiB .* take 20 GiB, a step 8 GiB, .* processes hold 51 GiB"
    ):
        settle(CacheConfig(), [full])
    with pytest.raises(ConfigError, match="use a smaller model, or free some memory"):
        settle(CacheConfig(), [measured(other=60 * GiB)])


@settings(max_examples=300, deadline=None)
@given(
    other=st.integers(0, 60),
    utilization=st.integers(20, 100),
    explicit=st.integers(0, 60),
    length=st.integers(1, 2_000_000),
    is_auto=st.booleans(),
    fp8=st.booleans(),
)
def test_whatever_is_offered_fits(
    other: int, utilization: int, explicit: int, length: int, is_auto: bool, fp8: bool
) -> None:
    config = CacheConfig(
        gpu_memory_utilization=utilization / 100, kv_cache_memory_bytes=explicit * GiB if explicit else "auto"
    )
    report = changed(measured(other * GiB), max_model_len=length, max_model_len_is_auto=is_auto)
    report = changed(report, fp8_page_bytes=MiB // 2 * fp8, fp8_weights_bytes=9 * GiB * fp8)
    try:
        settled = settle(config, [report])
    except ConfigError as error:
        if "smaller model" not in error.message:
            ways(config, report)
        return
    assert settled.memory is not None
    assert settled.num_pages * settled.page_bytes <= settled.memory.for_pages


def test_the_budget_adds_up() -> None:
    (line,) = [
        line for line in budget_lines(settle(CacheConfig(), [measured(other=GiB)])) if line.startswith("GPU memory")
    ]
    whole, *parts = [int(number.replace(",", "")) for number in re.findall(r"[\d,]{4,}", line)]
    assert whole == 80 * GiB == sum(parts) and len(parts) == 6
    assert "1,073,741,824 other processes" in line


def test_weights_that_do_not_fit() -> None:
    assert weights_too_large(16 * GiB, "as bfloat16", 10 * GiB, 9 * GiB) == (
        "the weights take 16 GiB as bfloat16 and 10 GiB is available: "
        "use --quantization fp8 (9 GiB), or a smaller model, or more memory"
    )
    assert "--quantization" not in weights_too_large(16 * GiB, "as bfloat16", 8 * GiB, 9 * GiB)
    assert "--dtype bfloat16 (8 GiB)" in weights_too_large(16 * GiB, "as float32", 10 * GiB, bfloat16_needed=8 * GiB)
    assert "--dtype" not in weights_too_large(16 * GiB, "as float32", 7 * GiB, bfloat16_needed=8 * GiB)


def test_8_bits_are_not_offered_where_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "llama")
    (weights,) = source.path.glob("*.safetensors")
    loader = Loader(tiny_config(), source)
    # Enough for the weights with 8 bits, which are a little more than half as large.
    monkeypatch.setattr(loader.device, "memory_available", lambda: weights.stat().st_size * 7 // 10)
    with pytest.raises(ConfigError, match="the weights take") as refusal:
        loader.load()
    assert "--quantization" not in refusal.value.message


def test_what_the_pages_hold_is_passed_on() -> None:
    assert settle(CacheConfig(), [changed(kv_dtype="fp8")]).kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("device", "page_size", "is_taken"), [("cuda", 24, False), ("cuda", 32, True), ("cpu", 24, True)]
)
def test_kernels_want_pages_of_a_power_of_two(device: str, page_size: int, is_taken: bool) -> None:
    def ask() -> None:
        resolve(tiny_config(page_size=page_size), device=device, stored_dtype="float32", context_len=128, num_cores=2)

    if is_taken:
        return ask()
    with pytest.raises(ConfigError, match="--block-size must be a power of two on a GPU, got 24"):
        ask()


def test_swap_space_becomes_host_pages_out_of_the_same_memory_on_a_cpu() -> None:
    report = settle(CacheConfig(swap_space=2.0), [REPORT])
    assert report.num_host_pages == 2048
    assert report.num_pages == int(0.4 * 6 * 1024)
    assert settle(CacheConfig(swap_space=2.0), [GPU]).num_pages == 64 * 256
    with pytest.raises(ConfigError, match=r"--swap-space asks for 9 GiB.*use 4.0 or less"):
        settle(CacheConfig(swap_space=9.0), [REPORT])


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (5, 2048, 3 * MiB // 2, 7 * GiB)] == ["5 bytes", "2 KiB", "1.5 MiB", "7 GiB"]


# ── layers with windows ──


def test_windows_are_counted_in_what_fits_and_what_is_useful() -> None:
    """Of two groups of layers one keeps 256 pages a request of 4096 tokens, the other ceil((1023 + 512 - 1) / 16) + 1."""
    windowed = changed(windows=(0, 1024), max_num_seqs=4)
    report = settle(CacheConfig(), [windowed])
    assert (report.num_pages, report.windows) == (4 * (256 + 97), (0, 1024))
    assert any(
        "KV pages" in line and " pages of 16 tokens = 4 requests of the full" in line for line in budget_lines(report)
    )
    cut = settle(CacheConfig(kv_cache_memory_bytes=200 * MiB), [windowed])
    assert cut.max_model_len == (200 - 97) * 16
    asked = changed(windowed, max_model_len_is_auto=False)
    with pytest.raises(ConfigError, match=r"needs 353 MiB of KV pages.*use --kv-cache-memory-bytes 353M"):
        settle(CacheConfig(kv_cache_memory_bytes=200 * MiB), [asked])
    assert settle(CacheConfig(kv_cache_memory_bytes=353 * MiB), [asked]).max_model_len == 4096
    # With a window on every layer the context is no matter of memory once a window and a step fit.
    every = settle(CacheConfig(kv_cache_memory_bytes=97 * MiB), [changed(windows=(1024,))])
    assert every.max_model_len == 4096
