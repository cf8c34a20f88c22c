"""Parts of the gateway in front of several models: names and settings, merged metrics, the command line."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.flags import config_from
from octavo.cli.main import build_parser
from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.server.gateway.catalog import name_of, read_models
from octavo.server.gateway.metrics import merged


def parsed(*arguments: str) -> Config:
    return config_from(build_parser().parse_args(["serve", *arguments]), {})


def test_several_models_on_the_command_line(tmp_path: Path) -> None:
    assert parsed("a", "b=org/b").models.models == "a,b=org/b"
    assert parsed("b=org/b").models.models == "b=org/b", "a name makes one of several, of which there may be one"
    assert not parsed("org/a").models.are_several and parsed("org/a").model.model == "org/a"
    assert not parsed().models.are_several
    odd = tmp_path / "x=y"
    odd.mkdir()
    assert parsed(str(odd)).model.model == str(odd), "a folder whose name has a ="
    arguments = build_parser().parse_args(["serve", "a", "b"])
    assert config_from(arguments, {"OCTAVO_MODEL": "c"}).model.model == "", "a flag comes before a variable"
    assert not config_from(build_parser().parse_args(["serve", "a"]), {"OCTAVO_MODELS": "b,c"}).models.are_several
    with pytest.raises(ConfigError, match="beside --models"):
        config_from(build_parser().parse_args(["serve"]), {"OCTAVO_MODEL": "c", "OCTAVO_MODELS": "b,c"})
    with pytest.raises(ConfigError, match="named twice"):
        parsed("a", "b", "--models", "c")
    with pytest.raises(ConfigError, match="--max-loaded-models is for several models"):
        parsed("a", "--max-loaded-models", "1")


def test_each_model_gets_its_share_and_its_settings(tmp_path: Path) -> None:
    config = parsed(
        "chat=org/a", "org/b.gguf", "--port", "0", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "8M",
        "--model-settings", '{"b": {"max-num-seqs": 2}}', "--files-folder", str(tmp_path / "files"),
    )  # fmt: skip
    chat, other = read_models(config, tmp_path)
    assert (chat.name, chat.config.model.model, chat.config.model.served_model_name) == ("chat", "org/a", "chat")
    assert (other.name, other.config.model.model) == ("b", "org/b.gguf")
    assert (chat.config.scheduler.max_num_seqs, other.config.scheduler.max_num_seqs) == (4, 2)
    assert chat.config.cache.kv_cache_memory_bytes == 4 * 2**20 and chat.config.cache.memory_share == 0.5
    assert chat.config.server.uds != other.config.server.uds and not chat.config.models.are_several
    assert chat.config.batches.own_folder != other.config.batches.own_folder
    (alone, _) = read_models(replace(config, max_loaded_models=1), tmp_path)
    assert alone.config.cache.kv_cache_memory_bytes == 8 * 2**20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "x/a"), "two models are called 'a'"),
        (("a", "b", "--served-model-name", "c"), "--served-model-name is for one model"),
        (("a", "b", "--model-settings", '{"c": {}}'), "'c', which is none of the models: a, b"),
        (("a", "b", "--model-settings", '{"b": {"port": 1}}'), "port is of the whole server"),
        (("a", "b", "--keep-loaded", "c"), "--keep-loaded has 'c'"),
        (("a", "b", "--keep-loaded", "a", "--max-loaded-models", "1"), "could never be loaded"),
        (("a", "b", "--model-settings", '{"b": 3}'), "must be an object of flags"),
        (("a", "b", "--model-settings", '{"b": {"max_num_seq": 3}}'), "model 'b': .*max_num_seqs"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_models(parsed(*arguments), tmp_path)


def test_names() -> None:
    assert name_of("/models/Qwen3-0.6B") == ("Qwen3-0.6B", "/models/Qwen3-0.6B")
    assert name_of("org/name") == ("name", "org/name") and name_of("x.gguf") == ("x", "x.gguf")
    assert name_of("chat=/models/a=b") == ("chat", "/models/a=b")


def test_metrics_of_several_servers_are_one_text() -> None:
    one = (
        "# HELP vllm:requests_total Requests.\n# TYPE vllm:requests_total counter\n"
        'vllm:requests_total{model_name="a",engine="0"} 3.0\n'
        "# HELP process_open_fds Files.\n# TYPE process_open_fds gauge\nprocess_open_fds 7.0\n"
        '# HELP seconds Time.\n# TYPE seconds histogram\nseconds_bucket{le="1.0"} 1.0\nseconds_bucket{le="+Inf"} 2.0\n'
        "seconds_count 2.0\nseconds_sum 3.5\n"
    )
    text = merged({"a": one, 'b"': one.replace('"a"', '"b"')})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: len(family.samples) for name, family in families.items()} == {
        "vllm:requests": 2, "process_open_fds": 2, "seconds": 8,
    }  # fmt: skip
    assert all("model_name" in sample.labels for family in families.values() for sample in family.samples)
    assert {sample.labels["model_name"] for sample in families["process_open_fds"].samples} == {"a", 'b"'}
    assert text.count("# TYPE seconds ") == 1
