"""RoBERTa: a BERT whose positions start at the padding token's id + 1."""

import dataclasses
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import bert
from octavo.spec import ModelSpec


def _first_position(config: dict[str, Any]) -> int:
    padding = config.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ConfigError(f"pad_token_id is {padding!r}: it must be a whole number, positions are counted from it")
    return padding + 1


def spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(bert.spec(config, _first_position(config)), family="roberta")


class Model(bert.Model):
    classifier_names = ("classifier.dense", "classifier.out_proj")

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(config, spec, context)
        self.first_position = _first_position(config)
