"""What a checkpoint is that a person has named as something to draft with, by its configuration alone."""

from typing import Any

EAGLE3, MTP = "eagle3", "mtp"

# What names of architectures contain, in lower case → the kind. Those of one kind may contain those of a later one.
_ARCHITECTURES = {"eagle3": EAGLE3, "eagle": "eagle", "medusa": "medusa", "mlpspeculator": "mlp_speculator"}
_MODEL_TYPES = ("eagle3", "eagle", "medusa", "mlp_speculator")


def kind_of(config: dict[str, Any]) -> str:
    """The kind of draft head; empty: it is a whole model. Packages write it in different places: speculators in a field of its own, others
    in the architecture or the model_type."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return str(kind)[:40]
    names = config.get("architectures")
    architectures = [str(name).lower() for name in names] if isinstance(names, list) else []
    for part, kind in _ARCHITECTURES.items():
        if any(part in name for name in architectures):
            return kind
    if config.get("model_type") in _MODEL_TYPES:
        return str(config["model_type"])
    if str(config.get("model_type")).endswith("_mtp") or any(name.endswith(("nextn", "mtp")) for name in architectures):
        return MTP
    return EAGLE3 if "draft_vocab_size" in config else ""


def has_prediction_layers(config: dict[str, Any]) -> bool:
    """Whether a whole model has layers for multi-token prediction behind its own."""
    count = config.get("num_nextn_predict_layers")
    return type(count) is int and count > 0
