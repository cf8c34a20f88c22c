"""`octavo doctor --determinism`: runs the same requests in many ways on this machine and compares the bytes. Engines are started
as for serving, one after the other."""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.admission.validate import admit
from octavo.cli.doctor.ways import Ask, Setting, Way, alone, in_batches, make_asks, one_by_one, settings, together
from octavo.config import AUTO, Config, replace
from octavo.engine.build import start_engine
from octavo.errors import ConfigError, RequestFailed
from octavo.messages import EngineReport, Logprobs
from octavo.weights.sources.source import resolve

EXIT_DIFFERS = 1
# Values for `auto`: enough for all ways, and small enough to start several engines one after the other on one GPU.
_MAX_NUM_SEQS, _KV_BYTES = 64, 2**30


@dataclass(slots=True)
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


Outputs = dict[int, Output]
"""Outputs by the request's number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    way: str
    is_same: bool
    message: str
    seconds: float


class _Engine:
    """One engine in this process."""

    def __init__(self, config: Config) -> None:
        is_dummy = config.model.load_format == "dummy"
        source = resolve(
            config.model.model,
            config.model.revision,
            allow_missing_weights=is_dummy,
            download_dir=config.model.download_dir,
        )
        self._loop, self.report, _ = start_engine(config, source, source.name)
        self._num_asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        del self._loop
        gc.collect()  # on a GPU the next engine needs the memory

    def run_way(self, way: Way) -> tuple[Outputs, int]:
        """Run the requests of a way. Returns their outputs, and by how much the counter way.must has grown."""
        before, outputs = self._figure(way.must), dict[int, Output]()
        for group in way.groups:
            if not way.keeps_prefixes:
                self._loop.scheduler.cache.reset_prefixes()
            waiting = sorted(group, key=lambda arrival: arrival.step)
            numbers: dict[str, int] = {}
            step = 0
            while waiting or self._loop.has_work:
                while waiting and (waiting[0].step <= step or not self._loop.has_work):
                    self._ask(waiting.pop(0).ask, numbers)
                self._step(numbers, outputs)
                step += 1
        outputs.pop(-1, None)
        return outputs, self._figure(way.must) - before

    def _ask(self, ask: Ask, numbers: dict[str, int]) -> None:
        name = f"ask-{self._num_asked}"
        self._num_asked += 1
        numbers[name] = ask.number
        self._loop.add(admit(name, ask.prompt, ask.params, self.report, ()))

    def _step(self, numbers: dict[str, int], outputs: Outputs) -> None:
        for delta in self._loop.step():
            if delta.finish is not None and delta.finish.reason == "error":
                raise RequestFailed(f"request {numbers[delta.request_id]} failed: {delta.finish.message}")
            output = outputs.setdefault(numbers[delta.request_id], Output())
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs

    def _figure(self, name: str) -> int:
        scheduler = self._loop.scheduler
        return {"preemptions": scheduler.num_preemptions, "hit_tokens": scheduler.cache.hit_tokens}.get(name, 0)


def examine(config: Config) -> Iterator[Verdict | EngineReport]:
    """Yield the first engine's report, then each verdict as soon as it is known."""
    if config.scheduler.max_num_seqs == AUTO:
        config = replace(config, max_num_seqs=_MAX_NUM_SEQS)
    if config.cache.kv_cache_memory_bytes == AUTO:
        config = replace(config, kv_cache_memory_bytes=_KV_BYTES)
    with _Engine(config) as engine:
        report = engine.report
        if not report.can_generate:
            raise ConfigError("--determinism is for models that generate, and this one is an encoder")
        yield report
        asks = make_asks(report)
        started = time.monotonic()
        expected, _ = engine.run_way(Way("alone", alone(asks)))
        num_tokens = sum(len(output.token_ids) for output in expected.values())
        message = f"{len(asks)} requests, {num_tokens} tokens with their logprobs: the reference for all other ways"
        yield Verdict("one at a time", True, message, time.monotonic() - started)
        ways = [
            Way("all at once", together(asks)),
            Way("in batches of 2, 17 and 64, with others", in_batches(asks, report)),
            Way("in the other order, some steps apart", one_by_one(asks)),
            Way("with their prefixes cached", together(asks), keeps_prefixes=True, must="hit_tokens"),
        ]
        if not config.cache.enable_prefix_caching:
            ways.pop()
        yield from (_judge(engine, way, asks, expected) for way in ways)
    for setting in settings(asks, report):
        yield from _in_another(config, setting, asks, expected)


def _in_another(config: Config, setting: Setting, asks: list[Ask], expected: Outputs) -> Iterator[Verdict]:
    with _Engine(replace(config, **setting.options)) as engine:
        for way in setting.ways:
            yield _judge(engine, way, asks, expected)


def _judge(engine: _Engine, way: Way, asks: list[Ask], expected: Outputs) -> Verdict:
    started = time.monotonic()
    found, grown = engine.run_way(way)
    message = next(filter(None, (_difference(ask, found[ask.number], expected[ask.number]) for ask in asks)), "")
    if not message and way.must and not grown:
        return Verdict(way.name, False, f"this proves nothing: there were no {way.must}", time.monotonic() - started)
    count = "" if not way.must else f"{grown} {way.must.replace('hit_tokens', 'tokens from the prefix cache')}"
    return Verdict(way.name, not message, message or count, time.monotonic() - started)


def _difference(ask: Ask, found: Output, expected: Output) -> str:
    """Describe the first difference; "": there is none."""
    who = f"request {ask.number} ({ask.kind}, {len(ask.prompt)} prompt tokens)"
    for place, (token, other) in enumerate(zip(found.token_ids, expected.token_ids, strict=False)):
        mine, its = found.logprobs[place], expected.logprobs[place]
        if token != other:
            return f"{who}: token {place} is {token}, not {other}; its logprob {mine.logprobs[0]!r}, not {its.logprobs[0]!r}"
        if mine != its:
            return f"{who}: token {place} has the logprobs {mine.logprobs}, not {its.logprobs}"
    if len(found.token_ids) != len(expected.token_ids):
        return f"{who}: {len(found.token_ids)} tokens, not {len(expected.token_ids)}"
    return ""


# ── the report ──────────────────────────────────────────────────────────────────────────────────────


def run(config: Config, *, as_json: bool) -> int:
    """Print the report and return the exit code. 0: every way gave the same bytes; 1: some did not."""
    verdicts: list[Verdict] = []
    report: EngineReport | None = None
    show = _printer()
    started = time.monotonic()
    for found in examine(config):
        if isinstance(found, EngineReport):
            report = found
            if not as_json:
                print("\n".join(_headline(config, report)), flush=True)
            continue
        verdicts.append(found)
        if not as_json:
            show(found)
    assert report is not None
    is_same = all(verdict.is_same for verdict in verdicts)
    if as_json:
        print(json.dumps(_as_json(config, report, verdicts), ensure_ascii=False, indent=2))
    else:
        print(f"{_conclusion(config, report, verdicts)} ({time.monotonic() - started:.0f} s)")
    return 0 if is_same else EXIT_DIFFERS


def _headline(config: Config, report: EngineReport) -> list[str]:
    parts = ", ".join(f"{name} {value}" for name, value in report.fingerprint.items())
    lines = [f"octavo doctor --determinism {config.model.model}".rstrip()]
    lines += [f"   {report.device}; {report.system_fingerprint}: {parts}"]
    return lines + [f"   {note}" for note in report.notes if "determinis" in note]


def _conclusion(config: Config, report: EngineReport, verdicts: list[Verdict]) -> str:
    wrong = sum(not verdict.is_same for verdict in verdicts)
    if not wrong:
        return f"   the same bytes in all {len(verdicts)} ways"
    hint = (
        "; --deterministic makes them the same" if report.memory is not None and not config.model.deterministic else ""
    )
    return f"   {wrong} of {len(verdicts)} ways differ{hint}"


def _printer() -> Callable[[Verdict], None]:
    try:
        "✓✗".encode(sys.stdout.encoding or "ascii")
        marks = "✓", "✗"
    except UnicodeEncodeError:
        marks = "ok", "NO"

    def show(verdict: Verdict) -> None:
        mark = marks[0 if verdict.is_same else 1]
        print(f" {mark} {verdict.way:<40} {verdict.seconds:5.1f} s  {verdict.message}".rstrip(), flush=True)

    return show


def _as_json(config: Config, report: EngineReport, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "model": config.model.model or "the embedded model",
        "device": report.device,
        "deterministic_flag": config.model.deterministic,
        "system_fingerprint": report.system_fingerprint,
        "fingerprint": report.fingerprint,
        "same": all(verdict.is_same for verdict in verdicts),
        "ways": [
            {"way": v.way, "same": v.is_same, "message": v.message, "seconds": round(v.seconds, 2)} for v in verdicts
        ],
    }
