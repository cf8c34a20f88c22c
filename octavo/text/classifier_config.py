"""The labels of a sequence classifier and how its numbers become probabilities or scores, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.messages.params import Activation

_BY_PROBLEM: dict[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_FUNCTION: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    labels: Mapping[int, str]  # by number; those without a name are missing
    # None: nothing says it. One label then gets a sigmoid, several a softmax.
    activation: Activation | None = None

    def label(self, number: int) -> str:
        return self.labels.get(number, f"LABEL_{number}")

    def activation_for(self, num_labels: int) -> Activation:
        if self.activation is not None:
            return self.activation
        return "sigmoid" if num_labels == 1 else "softmax"


def read_classifier_config(config: Mapping[str, Any]) -> ClassifierConfig:
    """`config`: that of a model's folder. The activation that sentence-transformers has saved goes before that of the kind of problem."""
    named = config.get("id2label")
    labels: dict[int, str] = {}
    if isinstance(named, dict):
        labels = {int(key): str(name) for key, name in named.items() if str(key).isascii() and str(key).isdecimal()}
    saved = config.get("sentence_transformers")
    function = saved.get("activation_fn") if isinstance(saved, dict) else None
    function = function or config.get("sbert_ce_default_activation_function")
    activation = _BY_FUNCTION.get(function.rpartition(".")[2]) if isinstance(function, str) else None
    problem = config.get("problem_type")
    if activation is None and isinstance(problem, str):
        activation = _BY_PROBLEM.get(problem)
    return ClassifierConfig(labels, activation)
