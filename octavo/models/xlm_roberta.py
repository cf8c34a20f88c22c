"""XLM-RoBERTa, multilingual: a RoBERTa with a larger vocabulary."""

import dataclasses
from typing import Any

from octavo.models import roberta
from octavo.models.roberta import Model
from octavo.spec import ModelSpec

__all__ = ["Model", "spec"]


def spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(roberta.spec(config), family="xlm_roberta")
