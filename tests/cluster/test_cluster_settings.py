"""Settings of a cluster that cannot be, and what an engine on a node is told."""

from pathlib import Path

import pytest

from octavo.config import Config, replace
from octavo.engine.build import load_executor
from octavo.errors import ConfigError
from octavo.weights.sources.source import ModelSource


def test_an_address_needs_the_backend() -> None:
    with pytest.raises(ConfigError, match="--ray-address needs --distributed-executor-backend ray"):
        replace(Config(), ray_address="host:6379")


def test_only_a_server_places_replicas(tmp_path: Path) -> None:
    config = replace(Config(), distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="ray is for octavo serve"):
        load_executor(config, ModelSource(tmp_path, "model", "folder"))
