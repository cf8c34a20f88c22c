"""`octavo bench serve`: drives any OpenAI-compatible server and reports what its clients would feel.
Knows nothing of Octavo's own server: the same requests and the same clock for every server it is pointed at."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.bench import report
from octavo.bench.http_stream import Client, HTTPFailure, Target
from octavo.bench.workload import Workload, id_prompts, poisson_arrivals, word_prompts
from octavo.errors import ConfigError, EngineUnavailable, RequestFailed


class _Text(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct, gc=False):
    """The parts of a streamed chunk that are measured; decoding nothing else keeps the client cheap."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Record:
    """One request, in seconds of time.perf_counter()."""

    started: float
    first: float = 0.0  # first text
    ended: float = 0.0  # last choice, or the failure
    gaps: list[float] = field(default_factory=list)  # between one text and the next
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """None where no text came."""
        return self.first - self.started if self.first else None

    @property
    def latency(self) -> float | None:
        """None for a failed request: the time until it failed is not how long an answer takes."""
        return None if self.error else self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        return (self.ended - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


# ── sending ─────────────────────────────────────────────────────────────────────────────────────────


class Sender:
    """Sends one prompt and times its answer."""

    def __init__(self, client: Client, arguments: argparse.Namespace, model: str) -> None:
        self._client = client
        self._chat = arguments.endpoint == "chat"
        self._path = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._timeout: float = arguments.timeout
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": arguments.output_len,
            "temperature": arguments.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if arguments.ignore_eos else {})

    async def send(self, prompt: str | list[int]) -> Record:
        prompt_field = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        body = json.dumps(self._fields | prompt_field).encode()
        record = Record(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._receive(body, record)
        except HTTPFailure as failure:
            record.error = _describe(failure)
        except TimeoutError:
            record.error = f"no end within {self._timeout:g} s"
        except (OSError, msgspec.MsgspecError) as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.error:
            record.ended = time.perf_counter()
        return record

    async def _receive(self, body: bytes, record: Record) -> None:
        latest, num_texts, done = 0.0, 0, False
        async for data in self._client.post_events(self._path, body):
            now = time.perf_counter()
            if data == b"[DONE]":
                done = True
                continue
            chunk = self._decode(data)
            if chunk.error is not None:
                record.error = _message(json.dumps({"error": chunk.error}))
                return
            if chunk.usage is not None:
                record.has_usage = True
                record.prompt_tokens = chunk.usage.prompt_tokens
                record.output_tokens = chunk.usage.completion_tokens or 0
            for choice in chunk.choices:
                delta = choice.delta
                if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)):
                    num_texts += 1
                    if latest:
                        record.gaps.append(now - latest)
                    latest = now
                    record.first = record.first or now
                if choice.finish_reason or latest == now:
                    record.ended = now
        if not record.ended:
            record.error = "the stream ended without an answer"
            return
        if not done:
            record.error = "the stream ended without [DONE]"
        record.first = record.first or record.ended  # an answer without text: its end is all there is
        if not record.has_usage:
            record.output_tokens = num_texts


def _describe(failure: HTTPFailure) -> str:
    return f"HTTP {failure.status}: {_message(str(failure))}" if failure.status else str(failure)


def _message(text: str) -> str:
    """OpenAI's error message out of a body, or the body."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300]


async def drive(sender: Sender, load: Workload, max_concurrency: int | None, progress: Any) -> list[Record]:
    """Every request at its time, at most `max_concurrency` open at once; the records in order of arrival."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def one(prompt: str | list[int]) -> Record:
        async with gate or nullcontext():
            record = await sender.send(prompt)
        progress.update(1)
        return record

    start, tasks = time.perf_counter(), []
    for prompt, arrival in zip(load.prompts, load.arrivals, strict=True):
        wait = start + arrival - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(prompt)))
    return list(await asyncio.gather(*tasks))


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────


def is_good(record: Record, levels: dict[str, float]) -> bool:
    """Whether a request met every service level, given in milliseconds."""
    took = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return not record.error and all((took[name] or 0.0) * 1000 <= limit for name, limit in levels.items())


def judge(records: list[Record], levels: dict[str, float]) -> dict[str, Any]:
    """The figures of a run. Rates are over the time from the first request to the last end, be it an answer's
    or a failure's: a server that lets requests time out must not look faster for it."""
    good = [r for r in records if not r.error]
    seconds = max(r.ended for r in records) - min(r.started for r in records)
    rate = (lambda amount: round(amount / seconds, 3)) if seconds > 0 else (lambda amount: 0.0)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    return {
        "num_requests": len(records),
        "num_errors": len(records) - len(good),
        "errors": dict(Counter(r.error for r in records if r.error).most_common()),
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "token_counts_from": "usage" if all(r.has_usage for r in good) else "chunks",
        "requests_per_second": rate(len(good)),
        "output_tokens_per_second": rate(output),
        "total_tokens_per_second": rate(prompt + output),
        "goodput_requests_per_second": rate(sum(is_good(r, levels) for r in records)) if levels else None,
        "goodput_levels_ms": levels,
        "ttft_ms": report.spread([r.ttft for r in good if r.ttft is not None]),
        "tpot_ms": report.spread([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": report.spread([gap for r in good for gap in r.gaps]),
        "e2el_ms": report.spread([r.latency for r in good if r.latency is not None]),
    }


def show(figures: dict[str, Any]) -> str:
    """The figures as people read them."""
    source = "" if figures["token_counts_from"] == "usage" else " (counted in chunks: the server sent no usage)"
    lines = {
        "requests": f"{figures['num_requests'] - figures['num_errors']} answered, {figures['num_errors']} failed, "
        f"in {figures['seconds']:.2f} s",
        "tokens": f"{figures['prompt_tokens']} in, {figures['output_tokens']} out{source}",
        "requests/s": f"{figures['requests_per_second']:.2f}",
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "total tokens/s": f"{figures['total_tokens_per_second']:.1f}",
    }
    if figures["goodput_levels_ms"]:
        levels = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in figures["goodput_levels_ms"].items())
        lines["goodput requests/s"] = f"{figures['goodput_requests_per_second']:.2f} ({levels})"
    names = {"TTFT": "ttft_ms", "time per output token": "tpot_ms", "inter-token": "itl_ms", "end to end": "e2el_ms"}
    table = report.show_spreads({name: figures[key] for name, key in names.items()})
    errors = [f"{count} × {text}" for text, count in list(figures["errors"].items())[:5]]
    return "\n".join([*report.show_figures(lines), "", *table, *(["", "errors:", *errors] if errors else [])])


# ── the command ─────────────────────────────────────────────────────────────────────────────────────


def run(arguments: argparse.Namespace) -> int:
    report.check_writable(arguments.result)
    if arguments.prompt_kind == "ids" and arguments.endpoint == "chat":
        raise ConfigError("--prompt-kind ids needs --endpoint completions: a chat message is text")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        model, records = runner.run(_measure(arguments))
    figures = judge(records, dict(arguments.goodput))
    print(f"{model} at {arguments.base_url} ({arguments.endpoint})\n\n{show(figures)}")
    requests = [
        {"ttft": r.ttft, "latency": r.latency, "prompt_tokens": r.prompt_tokens, "output_tokens": r.output_tokens}
        | {"started": r.started - records[0].started, "error": r.error}
        for r in records
    ]
    settings = {name: value for name, value in vars(arguments).items() if name not in ("run", "api_key")}
    settings["request_rate"] = None if arguments.request_rate == float("inf") else arguments.request_rate
    report.write(arguments.result, {"model": model, "settings": settings, "figures": figures, "requests": requests})
    return 1 if figures["num_errors"] else 0


def _loop_factory() -> Any:
    """The faster loop where there is one, so that the client takes less of a machine it shares with the server."""
    try:
        import uvloop

        return uvloop.new_event_loop
    except ImportError:
        return None


async def _measure(arguments: argparse.Namespace) -> tuple[str, list[Record]]:
    key = arguments.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    client = Client(Target.parse(arguments.base_url), key)
    try:
        model = arguments.model or await _first_model(client, arguments.base_url)
        sender = Sender(client, arguments, model)
        for prompt in _prompts(arguments, arguments.num_warmups, 0, arguments.seed + 1):
            trial = await sender.send(prompt)
            if trial.error:
                raise RequestFailed(f"the first request to {arguments.base_url} failed: {trial.error}")
        prompts = _prompts(arguments, arguments.num_prompts, arguments.shared_prefix_len, arguments.seed)
        load = Workload(prompts, poisson_arrivals(len(prompts), arguments.request_rate, arguments.seed))
        with _progress(len(prompts)) as progress:
            return model, await drive(sender, load, arguments.max_concurrency, progress)
    finally:
        await client.close()


def _prompts(arguments: argparse.Namespace, num: int, shared_len: int, seed: int) -> list[str | list[int]]:
    if arguments.prompt_kind == "ids":
        return [*id_prompts(num, arguments.input_len, shared_len, arguments.vocab_size, seed)]
    return [*word_prompts(num, arguments.input_len, shared_len, seed)]


async def _first_model(client: Client, url: str) -> str:
    try:
        models = json.loads(await client.get("/v1/models"))["data"]
        return str(models[0]["id"])
    except OSError as error:
        raise EngineUnavailable(f"cannot reach {url}: {error}; is the server running?") from None
    except HTTPFailure as failure:
        raise RequestFailed(f"{url}/v1/models: {_describe(failure)}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise RequestFailed(f"{url}/v1/models lists no model: name one with --model") from None


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", file=sys.stderr, disable=not sys.stderr.isatty())
