"""KV sizing: what auto takes, what is refused, and that the numbers in a refusal work."""

import re
from pathlib import Path

import msgspec
import pytest

from octavo.config import CacheConfig
from octavo.errors import ConfigError
from octavo.messages import LoadReport
from octavo.worker.cores import _quota, usable_cores
from octavo.worker.memory import GiB, MiB, in_words, settle

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


def test_auto_takes_a_share_a_ceiling_or_what_is_useful() -> None:
    assert settle(CacheConfig(), [REPORT]).num_pages == int(0.4 * 8 * 1024)
    assert settle(CacheConfig(), [changed(available_bytes=100 * GiB)]).num_pages == 4096
    small = settle(CacheConfig(), [changed(max_num_seqs=2, max_model_len=100)])
    assert small.num_pages == 2 * 7
    assert small.max_model_len == 100
    assert settle(CacheConfig(), [GPU]).num_pages == 64 * 256
    assert settle(CacheConfig(), [changed(GPU, available_bytes=3 * GiB)]).num_pages == 3 * 1024


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
    asked = changed(max_model_len_is_auto=False)
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


def test_more_than_there_is_and_less_than_a_page_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 8192M or less"):
        settle(CacheConfig(kv_cache_memory_bytes=9 * GiB), [REPORT])
    with pytest.raises(ConfigError, match=f"use at least {MiB}"):
        settle(CacheConfig(kv_cache_memory_bytes=1000), [REPORT])
    with pytest.raises(ConfigError, match="free some memory"):
        settle(CacheConfig(), [changed(available_bytes=1000)])
    with pytest.raises(ConfigError, match="free some memory"):
        settle(CacheConfig(), [changed(GPU, available_bytes=-5 * GiB)])


def test_swap_space_becomes_host_pages_out_of_the_same_memory_on_a_cpu() -> None:
    report = settle(CacheConfig(swap_space=2.0), [REPORT])
    assert report.num_host_pages == 2048
    assert report.num_pages == int(0.4 * 6 * 1024)
    assert settle(CacheConfig(swap_space=2.0), [GPU]).num_pages == 64 * 256
    with pytest.raises(ConfigError, match=r"--swap-space asks for 9 GiB.*use 4.0 or less"):
        settle(CacheConfig(swap_space=9.0), [REPORT])


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (5, 2048, 3 * MiB // 2, 7 * GiB)] == ["5 bytes", "2 KiB", "1.5 MiB", "7 GiB"]


def test_cores_follow_the_quota_of_either_version(tmp_path: Path) -> None:
    assert usable_cores() >= 1
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert _quota(tmp_path, 8) == 3
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert _quota(tmp_path, 8) == 2
