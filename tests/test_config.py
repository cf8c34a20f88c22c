"""resolve(): what each `auto` becomes on a CPU and on a GPU, and which options are refused there. The model's numbers are made up."""

import dataclasses
from typing import Any

import pytest

from octavo.config import (
    CacheConfig,
    Config,
    DiskTier,
    FleetConfig,
    KVTiers,
    ParallelConfig,
    read_tiers,
    replace,
    sections,
    without_keys,
)
from octavo.errors import ConfigError
from octavo.limits import Limits, resolve


def resolved(device: str, stored_dtype: str = "bfloat16", **options: Any) -> Limits:
    config = replace(Config(), **options)
    return resolve(config, device=device, stored_dtype=stored_dtype, context_len=128, num_cores=2)


@pytest.mark.parametrize(
    ("device", "options", "keeps_packed"),
    [
        ("cpu", {}, True),
        ("cuda", {}, True),
        ("cuda", {"dtype": "bfloat16"}, False),
        ("cpu", {"dtype": "float32"}, True),
        ("cuda", {"dtype": "float32"}, False),
        ("cpu", {"dtype": "float32", "quantization": "none"}, False),
        ("cpu", {"dtype": "bfloat16"}, False),
        ("cpu", {"quantization": "none"}, False),
        ("cpu", {"quantization": "int8"}, False),
        ("cpu", {"quantization": "int4", "dtype": "float32"}, False),
        ("cuda", {"quantization": "fp8"}, False),
    ],
)
def test_weights_may_stay_packed_where_nothing_else_is_asked_for(
    device: str, options: dict[str, str], keeps_packed: bool
) -> None:
    limits = resolved(device, **options)
    assert limits.keeps_packed is keeps_packed
    assert limits.decodes_packed is (keeps_packed and options.get("dtype") == "float32")


@pytest.mark.parametrize(
    ("device", "asked", "dtype"),
    [("cpu", "auto", "float32"), ("cpu", "bfloat16", "bfloat16"), ("cuda", "auto", "bfloat16"), ("cuda", "float32", "float32")],
)  # fmt: skip
def test_the_type_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(device: str, asked: str, dtype: str) -> None:
    assert resolved(device, dtype=asked).dtype == dtype


REFUSED = [
    ("cuda", {"quantization": "int8", "dtype": "float32"}, "--quantization int8 works with 16-bit arithmetic on a GPU: use it with --dtype bfloat16 or float16"),
    ("cuda", {"quantization": "int4", "dtype": "float32"}, "--quantization int4 works with 16-bit arithmetic on a GPU: use it with --dtype bfloat16 or float16"),
    ("cuda", {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is for CPUs, and this model runs on a GPU: use fp8 there, or --device cpu"),
    ("cuda", {"kv_cache_dtype": "float16"}, "--kv-cache-dtype float16 is for CPUs, and this model runs on a GPU: use fp8 there, or --device cpu"),
    ("cpu", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is for GPUs, and this model runs on a CPU: use int8 there, which takes about the same memory"),
    ("cpu", {"quantization": "int8", "dtype": "bfloat16"}, "--quantization int8 computes in float32, --dtype asks for bfloat16: leave one of them out"),
    ("cpu", {"quantization": "int4", "dtype": "float16"}, "--quantization int4 computes in float32, --dtype asks for float16: leave one of them out"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "options", "line"), REFUSED)
def test_what_a_device_cannot_do_is_refused_in_one_line(device: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(device, **options)
    assert caught.value.message == line


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}])
def test_the_same_is_taken_on_a_cpu(options: dict[str, Any]) -> None:
    assert resolved("cpu", **options).dtype == "float32"


def test_no_option_of_python_takes_a_word_that_is_not_offered() -> None:
    """LLM(quantization=…) does not pass through the flags."""
    words = [knob.name for _, cls in sections() for knob in dataclasses.fields(cls) if knob.metadata["choices"]]
    assert {"quantization", "dtype", "kv_cache_dtype", "attention_backend", "device"} <= set(words)
    for name in words:
        flag = "--" + name.replace("_", "-")
        for value in ("int7", "", None, 8):
            with pytest.raises(ConfigError, match=f"^{flag} must be one of .*, got {value!r}$"):
                replace(Config(), **{name: value})
    with pytest.raises(ConfigError) as caught:
        replace(Config(), quantization="q4")
    assert caught.value.message == "--quantization must be one of auto, packed, none, fp8, int8, int4, got 'q4'"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"metrics_key": ","}, "--metrics-key (or OCTAVO_METRICS_KEY) ',' holds no key"),
        ({"metrics_key": "a", "metrics_open": True}, "--metrics-open needs no key and --metrics-key needs one"),
        ({"metrics_key": "a,b", "admin_key": "b"}, "1 of the keys of --metrics-key are API keys, too"),
    ],
)
def test_keys_for_metrics_make_sense(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Config(), **options)
    assert caught.value.message.startswith(problem)


def test_the_models_own_name_as_the_tokenizer_is_its_own_tokenizer() -> None:
    assert replace(Config(), model="org/name", tokenizer="org/name") == replace(Config(), model="org/name")
    assert replace(Config(), model="org/name", tokenizer="other").model.tokenizer == "other"
    assert replace(Config(), model="", tokenizer="").model.tokenizer == ""


def test_keys_are_in_no_repr_and_not_given_to_those_who_need_none() -> None:
    config = replace(Config(), api_key="sesame", admin_key="sesame-too", metrics_key="sesame-three")
    assert "sesame" not in repr(config)
    assert config.server.api_keys == ["sesame", "sesame-too"]
    assert not without_keys(config).server.metrics_keys
    assert not without_keys(config).server.api_keys and without_keys(config).server.port == config.server.port


def test_tiers_are_read_one_by_one_and_together():
    disk = DiskTier(2**30, "/a,b/pages")
    assert not read_tiers("")
    assert read_tiers("disk:1GiB:/a,b/pages") == KVTiers(0, disk)
    assert read_tiers("ram:8GiB") == KVTiers(8 * 2**30)
    assert (
        read_tiers("disk:1GiB:/a,b/pages,ram:512M")
        == read_tiers("ram:512M, disk:1GiB:/a,b/pages")
        == KVTiers(2**29, disk)
    )


def test_a_folder_on_every_node_of_a_cluster_has_an_absolute_path():
    ray = ParallelConfig(distributed_executor_backend="ray")
    here, anywhere = CacheConfig(kv_tier="disk:1GiB:pages"), CacheConfig(kv_tier="disk:1GiB:/tmp/pages")
    Config(cache=here, fleet=FleetConfig(data_parallel_size=2))
    Config(cache=anywhere, parallel=ray)
    with pytest.raises(ConfigError, match="--kv-tier disk: 'pages' must be an absolute path"):
        Config(cache=here, parallel=ray)
