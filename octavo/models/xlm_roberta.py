"""XLM-RoBERTa, the multilingual one: to this house a RoBERTa with a larger vocabulary.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

import dataclasses
from typing import Any

from octavo.models import roberta
from octavo.models.roberta import Model
from octavo.spec import ModelSpec

__all__ = ["Model", "spec"]


def spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(roberta.spec(config), family="xlm_roberta")
