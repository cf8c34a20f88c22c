"""Gemma 3, the multimodal checkpoints: only the text part is served, and the tensors for images are ignored."""

import dataclasses
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import gemma3_text
from octavo.spec import ModelSpec

# Defaults for keys that text_config may leave out, in addition to those of a text model.
_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(gemma3_text.spec(text_config(config)), family="gemma3")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError("text_config is missing: it must be an object with the sizes of the text model")
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return _DEFAULTS | text | ({} if is_tied is None else {"tie_word_embeddings": is_tied})


class Model(gemma3_text.Model):
    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(text_config(config), spec, context)

    def is_ignored(self, name: str) -> bool:
        return name.startswith(_IMAGES) or super().is_ignored(name)

    def hf_name(self, name: str) -> str:
        return super().hf_name(_text_name(name))


def _text_name(name: str) -> str:
    """The text model's name of a tensor. Checkpoints from before transformers 4.52 have the prefix's parts in reverse order."""
    for prefix, short in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


# ── GGUF: files hold only the text part, under this architecture's name ─────────────────────────────

GGUF_ROWS_STAY_WHOLE = gemma3_text.GGUF_ROWS_STAY_WHOLE
gguf_config = gemma3_text.gguf_config
gguf_name = gemma3_text.gguf_name
gguf_fix = gemma3_text.gguf_fix
