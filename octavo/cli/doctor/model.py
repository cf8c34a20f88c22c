"""`octavo doctor MODEL`: checks whether a model would serve, with the code that serving runs. It prints one line per check."""

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.cache.span import pages_of
from octavo.cli.doctor.findings import Finding, printer, size
from octavo.config import Config
from octavo.errors import ConfigError, OctavoError
from octavo.messages import EngineReport, LoadReport
from octavo.spec import ModelSpec
from octavo.text import Text, load_text
from octavo.weights.sources.source import ModelSource, resolve

_SAMPLES = (
    "Hello, world! It's 12:30.",
    "def f(x):\n\treturn x  # twice  two",
    "naïve café, Größe, 東京, مرحبا, 👩‍👩‍👧 and \U0001f9ea",
)
_CONTEXTS = (2048, 8192, 32768, 131072)
_SEQUENCES = (1, 8, 32, 256)


@dataclass(slots=True)
class Diagnosis:
    model: str
    findings: list[Finding] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # numbers for the JSON report; empty: a check before it failed

    @property
    def failure(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.status == "failed"), None)


class _DryRun(Protocol):
    """The interface of worker/dry_run.py, which is imported by name because it imports torch."""

    spec: ModelSpec

    def configuration(self) -> str: ...
    def arithmetic(self) -> str: ...
    def tensors(self) -> str: ...
    def numbers(self) -> str: ...
    def adapter(self, path: str, max_rank: int) -> str: ...
    def needs(self) -> LoadReport: ...
    def settled(self, needs: LoadReport) -> EngineReport: ...


def run(config: Config, *, deep: bool, as_json: bool, adapters: Sequence[str] = ()) -> int:
    """Print the report. Raises ConfigError with the first reason why the model would not serve."""
    diagnosis = Diagnosis(config.model.model or "the embedded model")
    show = None if as_json else printer(config.model.model)
    for finding in examine(config, diagnosis, deep=deep, adapters=adapters):
        diagnosis.findings.append(finding)
        if show is not None:
            show(finding)
    if as_json:
        print(json.dumps(_as_json(diagnosis), ensure_ascii=False, indent=2))
    elif diagnosis.memory and diagnosis.memory["kv_bytes"]:
        print("\n".join(_table(diagnosis.memory)))
    if (failure := diagnosis.failure) is not None:
        raise ConfigError(f"{failure.check}: {failure.message}")
    return 0


def examine(config: Config, diagnosis: Diagnosis, *, deep: bool, adapters: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield each finding as soon as it is known."""
    is_dummy = config.model.load_format == "dummy"
    try:
        source = resolve(
            config.model.model,
            config.model.revision,
            allow_missing_weights=is_dummy,
            download_dir=config.model.download_dir,
        )
    except ConfigError as error:
        yield Finding("files", "failed", error.message)
        return
    diagnosis.model = source.name
    yield Finding("files", "ok", f"a {'GGUF file' if source.kind == 'gguf' else 'folder'}, {source.path}")
    dry_run = _load_dry_run(config, source)
    spec: ModelSpec | None = None
    checks = [
        ("adapter", functools.partial(dry_run.adapter, path, config.lora.max_lora_rank))
        for path in (*adapters, *config.lora.modules.values())
    ]
    for finding in _model(dry_run, diagnosis, checks, deep=deep and not is_dummy):
        if finding.check == "configuration" and finding.status == "ok":
            spec = dry_run.spec
        yield finding
    yield from _text_findings(config, source, spec)


def _load_dry_run(config: Config, source: ModelSource) -> _DryRun:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in the engine; read when torch is first imported
    dry_run: _DryRun = importlib.import_module("octavo.worker.dry_run").DryRun(config, source)
    return dry_run


# ── the model ───────────────────────────────────────────────────────────────────────────────────────


def _model(
    dry_run: _DryRun, diagnosis: Diagnosis, adapters: Sequence[tuple[str, Callable[[], str]]] = (), *, deep: bool
) -> Iterator[Finding]:
    steps: list[tuple[str, Callable[[], str]]] = [
        ("configuration", dry_run.configuration),
        ("arithmetic", dry_run.arithmetic),
        ("tensors", dry_run.tensors),
        ("memory", lambda: _memory(dry_run, diagnosis)),
    ]
    if deep:
        steps.insert(3, ("numbers", dry_run.numbers))
    steps += adapters
    for at, (name, step) in enumerate(steps):
        try:
            message = step()
        except ConfigError as error:
            yield Finding(name, "failed", error.message)
            for later, _ in steps[at + 1 :]:
                yield Finding(later, "skipped", f"not checked, because {name} failed")
            return
        yield Finding(name, "ok", message)
    if not deep:
        yield Finding("numbers", "skipped", "not checked: --deep reads every weight and looks for NaN")


def _memory(dry_run: _DryRun, diagnosis: Diagnosis) -> str:
    needs = dry_run.needs()
    settled = dry_run.settled(needs)
    diagnosis.memory = {
        "weights_bytes": needs.weights_bytes,
        "available_bytes": needs.available_bytes + needs.weights_bytes,
        "page_bytes": settled.page_bytes,
        "page_size": settled.page_size,
        "num_pages": settled.num_pages,
        "max_model_len": settled.max_model_len,
        "kv_bytes": _kv_bytes(dry_run.spec.context_len, settled) if settled.can_generate else [],
    }
    if not settled.can_generate:
        available = needs.available_bytes + needs.weights_bytes
        return f"weights {size(needs.weights_bytes)} of the {size(available)} available; an encoder keeps no KV pages"
    room = f"{settled.num_pages * settled.page_size:,} tokens, in"
    if any(settled.windows):
        room = f"{settled.num_pages // _pages_of(settled.max_model_len, settled):,}"
    return (
        f"weights {size(needs.weights_bytes)} of the {size(needs.available_bytes + needs.weights_bytes)} available; "
        f"KV pages {size(settled.num_pages * settled.page_bytes)} for {room} requests of up to "
        f"{settled.max_model_len:,} tokens"
    )


def _kv_bytes(context_len: int, settled: EngineReport) -> list[dict[str, int]]:
    lengths = sorted({*(length for length in _CONTEXTS if length < context_len), context_len})
    return [
        {
            "tokens": length,
            "sequences": count,
            "bytes": count * _pages_of(length, settled) * settled.page_bytes,
        }
        for length in lengths
        for count in _SEQUENCES
    ]


def _pages_of(num_tokens: int, settled: EngineReport) -> int:
    return pages_of(num_tokens, settled.page_size, settled.windows, settled.max_num_batched_tokens)


# ── tokenizer, template, stop tokens ────────────────────────────────────────────────────────────────


def _text_findings(config: Config, source: ModelSource, spec: ModelSpec | None) -> Iterator[Finding]:
    try:
        text = load_text(
            source.path,
            tokenizer=config.model.tokenizer,
            chat_template=config.model.chat_template,
            default_chat_template_kwargs=config.model.default_chat_template_kwargs,
            default_sampling=source.default_sampling,
            generation_config=config.model.generation_config,
            override_generation_config=config.model.override_generation_config,
            hf_overrides=config.model.hf_overrides,
        )
    except ConfigError as error:
        yield Finding("tokenizer", "failed", error.message)
        return
    yield _tokenizer(text, spec)
    if spec is not None and spec.is_encoder:
        yield _pooling(text)
        return
    yield _chat(text)
    yield _stops(text, spec)


def _tokenizer(text: Text, spec: ModelSpec | None) -> Finding:
    if spec is not None:
        try:
            text.require_fit(spec.vocab_size)
        except ConfigError as error:
            return Finding("tokenizer", "failed", error.message)
    size = f"{text.vocab_size:,} tokens"
    lossy = ""
    for sample in _SAMPLES:
        ids = text.encode(sample, add_special_tokens=False)
        back = text.decode(ids)
        if back != sample and not lossy:
            lossy = f"; decoding does not restore every text: {sample!r} became {back!r}"
    if spec is not None and text.vocab_size > spec.vocab_size:
        beyond = (
            f"ids from {spec.vocab_size} on are beyond the model's vocabulary; a text that contains them is rejected"
        )
        return Finding("tokenizer", "warning", f"{size}: {beyond}{lossy}")
    if lossy and not (spec is not None and spec.is_encoder):  # an encoder generates no text
        return Finding("tokenizer", "warning", size + lossy)
    if lossy:
        return Finding("tokenizer", "ok", size)
    return Finding("tokenizer", "ok", f"{size}; decoding restores texts in several scripts exactly")


def _pooling(text: Text) -> Finding:
    pooling_config = text.pooling_config
    if pooling_config.unsupported:
        return Finding(
            "pooling",
            "warning",
            f"{pooling_config.unsupported} is not supported: every request must set its own pooling",
        )
    how = f"by {pooling_config.kind or 'mean'}{', normalised' if pooling_config.normalize else ''}"
    longest = f", of up to {pooling_config.max_len:,} tokens" if pooling_config.max_len else ""
    return Finding(
        "pooling", "ok", f"{how}{longest}{'' if pooling_config.kind else ' (the model does not specify it)'}"
    )


def _chat(text: Text) -> Finding:
    if not text.has_chat_template:
        return Finding("chat template", "warning", "none: completions only, unless --chat-template FILE gives one")
    messages = [{"role": "user", "content": "Hello!"}]
    try:
        ids = text.encode_chat(messages)
    except OctavoError as error:
        return Finding("chat template", "failed", f"{error.message}; give another one with --chat-template FILE")
    if "Hello!" not in text.render_chat(messages):
        return Finding(
            "chat template", "failed", "it omits the user's message: give another one with --chat-template FILE"
        )
    try:
        text.render_chat([{"role": "system", "content": "Be brief."}, *messages])
    except OctavoError as error:
        return Finding("chat template", "warning", f"it does not accept a system message ({error.message})")
    return Finding("chat template", "ok", f"one message becomes {len(ids)} tokens")


def _stops(text: Text, spec: ModelSpec | None) -> Finding:
    names = [f"{text.decode([token], skip_special_tokens=False)!r} ({token})" for token in text.eos_ids]
    if not names:
        return Finding(
            "stop tokens",
            "warning",
            "none: every output continues to max_tokens; set eos_token_id in generation_config.json",
        )
    if spec is not None and (beyond := [token for token in text.eos_ids if token >= spec.vocab_size]):
        return Finding(
            "stop tokens",
            "warning",
            f"{', '.join(names)}: of these {', '.join(map(str, beyond))} cannot be sampled, because the vocabulary ends at "
            f"{spec.vocab_size - 1}; correct eos_token_id",
        )
    return Finding("stop tokens", "ok", ", ".join(names))


# ── the report ──────────────────────────────────────────────────────────────────────────────────────


def _table(memory: dict[str, Any]) -> list[str]:
    """Table of KV memory by context length and number of sequences; what does not fit beside the weights is in brackets."""
    left = memory["available_bytes"] - memory["weights_bytes"]
    heads = ["1 sequence", *(f"{count} sequences" for count in _SEQUENCES[1:])]
    lines = ["", f"   {'KV pages for':>14}" + "".join(f"{head:>16}" for head in heads)]
    for length in sorted({entry["tokens"] for entry in memory["kv_bytes"]}):
        cells = [entry["bytes"] for entry in memory["kv_bytes"] if entry["tokens"] == length]
        shown = [size(cell) if cell <= left else f"({size(cell)})" for cell in cells]
        lines.append(f"   {f'{length:,} tokens':>14}" + "".join(f"{cell:>16}" for cell in shown))
    lines.append(f"   {size(left)} is free beside the weights; sizes in brackets do not fit")
    return lines


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "model": diagnosis.model,
        "serves": diagnosis.failure is None,
        "findings": [finding.as_json() for finding in diagnosis.findings],
        "memory": diagnosis.memory or None,
    }
