"""Builds the application while the engine loads, and checks that the engine and the tokenizer fit together."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from octavo.client.client import EngineClient
from octavo.config import Config
from octavo.server.app import build_app
from octavo.text import Text, load_text


async def prepare(
    client: EngineClient, model_path: str | Path, model_name: str, config: Config, default_sampling: Mapping[str, Any]
) -> FastAPI:
    """Return when both are ready."""
    model, server = config.model, config.server

    async def build() -> tuple[FastAPI, Text]:
        text = await asyncio.to_thread(
            load_text,
            Path(model_path),
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            default_chat_template_kwargs=model.default_chat_template_kwargs,
            default_sampling=dict(default_sampling),
            generation_config=model.generation_config,
            override_generation_config=model.override_generation_config,
            hf_overrides=model.hf_overrides,
            tool_call_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
        )
        return build_app(client, text, config, model_name, Path(model_path)), text

    (app, text), report = await asyncio.gather(build(), client.ready())
    text.require_fit(report.vocab_size)
    return app
