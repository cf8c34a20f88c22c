"""The text room and the engine, made at the same time, and checked to fit each other.
Knows nothing of HTTP or of what either does."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.text import Text, load_text


async def prepare(
    client: EngineClient, model_path: str | Path, config: Config, default_sampling: Mapping[str, Any]
) -> Text:
    model, server = config.model, config.server
    loading = asyncio.to_thread(
        load_text,
        Path(model_path),
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        default_sampling=dict(default_sampling),
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
    )
    text, report = await asyncio.gather(loading, client.ready())
    text.require_fit(report.vocab_size)
    return text
