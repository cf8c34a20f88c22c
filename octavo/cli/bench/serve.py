"""`octavo bench serve`: sends load to any OpenAI-compatible server and reports the latency and throughput that clients see. It
treats Octavo's own server like any other."""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.cli.bench import clients, report
from octavo.cli.bench.http_stream import Client, HTTPFailure
from octavo.cli.bench.sending import RequestResult, Sender, client_for, describe, loop_factory
from octavo.cli.bench.workload import Workload, id_prompts, poisson_arrivals, trace_workload, word_prompts
from octavo.cli.planning.traces import load_trace
from octavo.errors import ConfigError, EngineUnavailable, RequestFailed

# ── judging ─────────────────────────────────────────────────────────────────────────────────────────


def is_good(result: RequestResult, levels: dict[str, float]) -> bool:
    """Whether a request met every service level, given in milliseconds."""
    took = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
    return not result.error and all((took[name] or 0.0) * 1000 <= limit for name, limit in levels.items())


def judge(results: list[RequestResult], levels: dict[str, float]) -> dict[str, Any]:
    """Compute the figures of a run. Rates are over the time from the first request to the end of the last, including failed
    ones: a server that lets requests time out must not look faster for it."""
    good = [r for r in results if not r.error]
    seconds = max(r.ended for r in results) - min(r.started for r in results)
    rate = (lambda amount: round(amount / seconds, 3)) if seconds > 0 else (lambda amount: 0.0)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    return {
        "num_requests": len(results),
        "num_errors": len(results) - len(good),
        "errors": dict(Counter(r.error for r in results if r.error).most_common()),
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "token_counts_from": "usage" if all(r.has_usage for r in good) else "chunks",
        "requests_per_second": rate(len(good)),
        "output_tokens_per_second": rate(output),
        "total_tokens_per_second": rate(prompt + output),
        "goodput_requests_per_second": rate(sum(is_good(r, levels) for r in results)) if levels else None,
        "goodput_levels_ms": levels,
        "ttft_ms": report.spread([r.ttft for r in good if r.ttft is not None]),
        "tpot_ms": report.spread([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": report.spread([gap for r in good for gap in r.gaps]),
        # Below 1: several tokens came in one event, by the server's choice or because it fell behind.
        "texts_per_token": round(sum(len(r.gaps) + 1 for r in good) / output, 3) if output else None,
        "e2el_ms": report.spread([r.latency for r in good if r.latency is not None]),
    }


def show(figures: dict[str, Any]) -> str:
    """Format the figures for the terminal."""
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


def vllm_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures by the names that `vllm bench serve --save-result` has for them, for scripts that read its files."""
    named: dict[str, Any] = {
        "duration": figures["seconds"],
        "completed": figures["num_requests"] - figures["num_errors"],
        "failed": figures["num_errors"],
        "total_input_tokens": figures["prompt_tokens"],
        "total_output_tokens": figures["output_tokens"],
        "request_throughput": figures["requests_per_second"],
        "request_goodput": figures["goodput_requests_per_second"],
        "output_throughput": figures["output_tokens_per_second"],
        "total_token_throughput": figures["total_tokens_per_second"],
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        if spread := figures[f"{name}_ms"]:
            named |= {f"{kind}_{name}_ms": spread[kind] for kind in ("mean", "p50", "p90", "p99")}
            named[f"median_{name}_ms"] = spread["p50"]
    return named


# ── the command ─────────────────────────────────────────────────────────────────────────────────────


def run(arguments: argparse.Namespace) -> int:
    if arguments.save_result:
        arguments.result = _file_to_save(arguments)
    report.check_writable(arguments.result)
    if arguments.prompt_kind == "ids" and arguments.endpoint == "chat":
        raise ConfigError("--prompt-kind ids needs --endpoint completions: a chat message is text")
    load = _load(arguments)
    prompts = load.prompts
    num_streams = min(len(prompts), arguments.max_concurrency or len(prompts))
    num_clients = clients.num_processes(arguments.client_processes, num_streams)
    if load.after is not None and max(load.after) >= 0:
        num_clients = 1  # a session's requests wait for each other
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        model = runner.run(warm_up(arguments))
    with _progress(len(prompts)) as progress:
        run_result = clients.send_all(arguments, model, load, progress.update, num_clients)
    results = run_result.results
    figures = judge(results, dict(arguments.goodput)) | {
        "client_processes": len(run_result.cpu_seconds),
        "client_cpu_seconds": round(sum(run_result.cpu_seconds), 3),
        "client_busiest": round(run_result.busiest, 3),
    }
    print(f"{model} at {arguments.base_url} ({arguments.endpoint})\n\n{show(figures)}")
    print("\n".join(report.show_figures({"client": clients.show_share(run_result)})))
    requests = [
        {"ttft": r.ttft, "latency": r.latency, "prompt_tokens": r.prompt_tokens, "output_tokens": r.output_tokens}
        | {"started": r.started - results[0].started, "error": r.error}
        for r in results
    ]
    settings = {name: value for name, value in vars(arguments).items() if name not in ("run", "api_key")}
    settings["request_rate"] = None if arguments.request_rate == float("inf") else arguments.request_rate
    named = vllm_figures(figures) if arguments.save_result else {}
    named |= {name: value for name, value in arguments.metadata if name not in named}
    result = {"model": model, "settings": settings, "figures": figures, "requests": requests}
    report.write(arguments.result, named | result)
    return 1 if figures["num_errors"] else 0


def _file_to_save(arguments: argparse.Namespace) -> str:
    """The file of --save-result. Raises ConfigError."""
    folder = Path(arguments.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir {folder} cannot be made: {error.strerror}") from None
    model = str(arguments.model or "model").rsplit("/", 1)[-1]
    streams = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
    label = arguments.label or arguments.endpoint
    made = f"{label}-{arguments.request_rate}qps{streams}-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return str(folder / (arguments.result_filename or made))


async def warm_up(arguments: argparse.Namespace) -> str:
    """Send the warm-up requests and return the model's name."""
    client = client_for(arguments)
    try:
        model = arguments.model or await _first_model(client, arguments.base_url)
        sender = Sender(client, arguments, model)
        for prompt in _prompts(arguments, arguments.num_warmups, 0, arguments.seed + 1):
            trial = await sender.send(prompt)
            if trial.error:
                raise RequestFailed(f"the first request to {arguments.base_url} failed: {trial.error}")
        return str(model)
    finally:
        await client.close()


def _load(arguments: argparse.Namespace) -> Workload:
    if arguments.trace is None:
        prompts = _prompts(arguments, arguments.num_prompts, arguments.shared_prefix_len, arguments.seed)
        return Workload(prompts, poisson_arrivals(len(prompts), arguments.request_rate, arguments.seed))
    if arguments.request_rate != float("inf"):
        raise ConfigError("--request-rate has no effect with --trace, which has its own times: leave it out")
    if arguments.endpoint == "chat":
        raise ConfigError("--trace needs --endpoint completions: its prompts are token ids")
    arguments.ignore_eos = True  # outputs are as long as in the trace
    trace = load_trace(arguments.trace).limited(arguments.num_prompts)
    return trace_workload(trace, arguments.vocab_size, arguments.seed)


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
        raise RequestFailed(f"{url}/v1/models: {describe(failure)}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise RequestFailed(f"{url}/v1/models lists no model: name one with --model") from None


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", file=sys.stderr, disable=not sys.stderr.isatty())
