"""The flags of `octavo bench latency | throughput | serve`. The measuring modules are imported when their command runs."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from octavo.cli.flags import OFFLINE, Parser, add_config_flags, count, integer, number, one_of
from octavo.config import AUTO
from octavo.errors import ConfigError
from octavo.foreign_flags import ForeignFlag
from octavo.ipc.stderr import say

DEFAULT_URL = "http://127.0.0.1:8000"
SLO_NAMES = ("ttft", "tpot", "e2el")
APIS = {
    name: api
    for api, names in {
        "completions": ("/v1/completions", "vllm", "openai", "openai-comp", "sglang", "sglang-oai", "lmdeploy"),
        "chat": ("/v1/chat/completions", "openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat"),
    }.items()
    for name in (api, *names)
}
"""Our names of the two APIs, the routes, and what `vllm bench serve` calls backends."""


def _noted(note: str, *, takes_value: bool = True, values: str = "", why: str = "") -> ForeignFlag:
    return ForeignFlag("vLLM", note=note, why=why, takes_value=takes_value, harmless_values=frozenset(values.split()))


def _refused(why: str, *, takes_value: bool = True) -> ForeignFlag:
    return ForeignFlag("vLLM", why=why, takes_value=takes_value)


_NO_PLOT = "the file of --result has every request's times, to be plotted elsewhere"
_BY_TRACE = "--trace FILE replays arrivals and lengths of any shape"
OF_VLLM = {
    "--served-model-name": ForeignFlag("vLLM", ours="--model"),
    "--tokenizer": _noted("the server counts the tokens"),
    "--tokenizer-mode": _noted("the server counts the tokens"),
    "--trust-remote-code": _noted("no tokenizer is loaded: the server counts the tokens", takes_value=False),
    "--disable-tqdm": _noted("there is no progress bar", takes_value=False),
    "--percentile-metrics": _noted("all of them are printed"),
    "--metric-percentiles": _noted("p50, p90 and p99 are printed; --result FILE has every request"),
    "--ready-check-timeout-sec": _noted("a server that is not ready is an error"),
    "--save-detailed": _noted("--result FILE has every request", takes_value=False),
    "--burstiness": _noted("arrivals are Poisson", values="1 1.0", why=_BY_TRACE),
    "--random-range-ratio": _noted("lengths are exact", values="0 0.0", why=_BY_TRACE),
    "--dataset-path": _refused(_BY_TRACE),
    "--ramp-up-strategy": _refused(_BY_TRACE),
    "--ramp-up-start-rps": _refused(_BY_TRACE),
    "--ramp-up-end-rps": _refused(_BY_TRACE),
    "--append-result": _refused("--save-result writes one file for each run", takes_value=False),
    "--plot-timeline": _refused(_NO_PLOT, takes_value=False),
    "--timeline-itl-thresholds": _noted("there is no plot"),
    "--plot-dataset-stats": _refused(_NO_PLOT, takes_value=False),
    "--lora-modules": _refused("give the adapter's name as --model"),
    "--lora-assignment": _refused("give the adapter's name as --model"),
    "--use-beam-search": _refused("""give --extra-body '{"use_beam_search": true, "n": 4}'""", takes_value=False),
    "--logprobs": _refused("""give --extra-body '{"logprobs": 1}'"""),
    "--chat-template-kwargs": _refused("""give --extra-body '{"chat_template_kwargs": …}'"""),
    "--header": _refused("requests carry the key of --api-key and no other header"),
    "--insecure": _refused(
        "certificates are checked: SSL_CERT_FILE names one that you made yourself", takes_value=False
    ),
    "--request-id-prefix": _noted("the server names requests"),
    "--skip-tokenizer-init": _noted("no tokenizer is loaded: the server counts the tokens", takes_value=False),
    "--no-oversample": _noted("there are as many prompts as --num-prompts", takes_value=False),
    "--disable-shuffle": _noted("prompts are sent in the order in which they are drawn", takes_value=False),
    "--skip-chat-template": _noted("the server applies the template", takes_value=False),
    "--no-stream": _refused("requests are streamed: times of tokens need it", takes_value=False),
    "--self-timed": _refused(_BY_TRACE, takes_value=False),
    "--no-self-timed": _noted("arrivals follow --request-rate", takes_value=False),
    "--random-batch-size": _noted("each request has one prompt", values="1", why="each request has one prompt"),
    "--probe-request-rate": _noted(
        "there are no probes", values="0 0.0", why="run a second octavo bench serve beside it"
    ),
    "--profile": _refused("journeys (GET /v1/requests/ID) say where a request's time went", takes_value=False),
}
"""Flags of `vllm bench serve` that are not ours."""


SAMPLING: dict[str, Callable[[str], Any]] = {
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "frequency_penalty": number,
    "presence_penalty": number,
    "repetition_penalty": number,
}
"""Sampling parameters of requests beside the temperature."""


def add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure latency, throughput, or a running server")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", parser_class=Parser)
    parser.set_defaults(run=lambda _: _print_help(parser))
    _add_latency(kinds)
    _add_throughput(kinds)
    _add_serve(kinds)


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _runs(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        code: int = importlib.import_module(f"octavo.cli.bench.{module}").run(arguments)
        return code

    return run


def positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def above_zero(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _processes(text: str) -> int | str:
    return AUTO if text.strip().lower() == AUTO else positive(text)


def _api(text: str) -> str:
    if text not in APIS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither chat nor completions")
    return APIS[text]


def _dataset(text: str) -> str:
    if text != "random":
        raise argparse.ArgumentTypeError(f"{text!r} is not offered: prompts are random; {_BY_TRACE}")
    return text


def slo(text: str) -> tuple[str, float]:
    """Parse one service level in milliseconds: ttft:500."""
    name, _, limit = text.partition(":")
    if name not in SLO_NAMES or not limit:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a service level: give NAME:MILLISECONDS, NAME being {', '.join(SLO_NAMES)}"
        )
    return name, above_zero(limit)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add_lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    add = parser.add_argument
    add("--input-len", "--random-input-len", type=positive, default=input_len, metavar="N", help=f"tokens in each prompt (default: {input_len})")  # fmt: skip
    add("--output-len", "--random-output-len", type=positive, default=output_len, metavar="N", help=f"tokens to generate for each prompt (default: {output_len})")  # fmt: skip


def _add_result(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--result", "--output-json", metavar="FILE", help="also write all measurements to this JSON file"
    )


def _add_latency(kinds: Any) -> None:
    parser = kinds.add_parser(
        "latency",
        help="time to finish one batch",
        description="Measure the time from submitting one batch of equal requests to its last token. End-of-sequence is ignored.",
    )
    _add_lengths(parser, 32, 128)
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="requests in the batch (default: 8)"
    )
    parser.add_argument("--num-iters", type=positive, default=10, metavar="N", help="measured runs (default: 10)")
    parser.add_argument(
        "--num-iters-warmup", type=integer, default=1, metavar="N", help="runs before measuring (default: 1)"
    )
    _add_result(parser)
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_runs("latency"))


def _add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="tokens per second over many requests at once",
        description="Measure tokens per second when all requests are submitted at once. End-of-sequence is ignored.",
    )
    _add_lengths(parser, 128, 128)
    parser.add_argument("--num-prompts", type=positive, default=32, metavar="N", help="requests (default: 32)")
    parser.add_argument(
        "--shared-prefix", type=integer, default=0, metavar="N", help="tokens that all prompts share at their start, in addition to --input-len (default: 0)"
    )  # fmt: skip
    parser.add_argument(
        "--compare-sequential",
        action="store_true",
        help="also run the same requests one after another, and print the ratio",
    )
    _add_result(parser)
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_runs("throughput"))


def _add_serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure any OpenAI-compatible server",
        description="Send streamed requests to a server and report time to first token, time per output token, "
        "inter-token latency, throughput and goodput.",
    )
    add = parser.add_argument
    add("--base-url", metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    add("--model", metavar="NAME", help="model to ask for (default: the first one the server lists)")
    add("--host", metavar="HOST", help="the server's host, in place of --base-url")
    add("--port", type=integer, metavar="N", help="the server's port, in place of --base-url")
    add("--endpoint", type=_api, default="completions", metavar="{chat,completions}", help="which API, or its route (default: completions)")  # fmt: skip
    add("--backend", dest="endpoint", type=_api, default=argparse.SUPPRESS, metavar="NAME", help="the API by vLLM's names: openai-chat is chat; vllm and openai are completions")  # fmt: skip
    add(
        "--dataset-name",
        type=_dataset,
        default="random",
        metavar="random",
        help="prompts are random, or those of --trace",
    )
    add("--api-key", metavar="KEY", help="the server's API key; environment: OCTAVO_API_KEY")
    add("--num-prompts", type=positive, default=100, metavar="N", help="requests (default: 100)")
    add("--num-warmups", type=integer, default=1, metavar="N", help="requests before measuring (default: 1)")
    add("--request-rate", type=above_zero, default=float("inf"), metavar="X", help="requests per second, with Poisson arrivals (default: inf, all at once)")  # fmt: skip
    add("--trace", metavar="FILE", help="replay a trace (see octavo plan): its times, lengths and prefixes, up to --num-prompts requests; prompts are token ids")  # fmt: skip
    add("--max-concurrency", type=positive, metavar="N", help="most requests in flight (default: no limit)")
    add("--client-processes", type=_processes, default=AUTO, metavar="N", help="processes that send and receive; auto: by cores and streams (default: auto)")  # fmt: skip
    _add_lengths(parser, 128, 128)
    add("--shared-prefix-len", "--random-prefix-len", type=integer, default=0, metavar="N", help="tokens that all prompts share at their start, in addition to --input-len (default: 0)")  # fmt: skip
    add("--prompt-kind", type=one_of(("words", "ids")), default="words", metavar="{words,ids}", help="prompts of random words, about one token each, or of random token ids (default: words)")  # fmt: skip
    add(
        "--vocab-size",
        type=positive,
        default=30000,
        metavar="N",
        help="with --prompt-kind ids: token ids are below this (default: 30000)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="generate exactly --output-len tokens, even if the model would stop earlier",
    )
    add("--temperature", type=number, default=0.0, metavar="X", help="sampling temperature (default: 0)")
    for name, kind in SAMPLING.items():
        add(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar="X",
            help=f"{name} of every request (default: the server's)",
        )
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of every request")
    add("--goodput", type=slo, nargs="+", default=[], metavar="NAME:MS", help="service levels that a request must meet to count for goodput: ttft:500 tpot:50 e2el:10000")  # fmt: skip
    add("--timeout", type=above_zero, default=600.0, metavar="X", help="seconds after which a request counts as failed (default: 600)")  # fmt: skip
    add("--seed", type=integer, default=0, metavar="N", help="seed of prompts and arrivals (default: 0)")
    _add_result(parser)
    add("--save-result", action="store_true", help="write the measurements, as vLLM does, to a file whose name has the time; they have vLLM's names, too")  # fmt: skip
    add("--result-dir", metavar="FOLDER", help="folder of --save-result; made if it does not exist (default: this one)")
    add("--result-filename", metavar="FILE", help="name of the file of --save-result")
    add("--label", metavar="TEXT", help="beginning of the name of the file of --save-result (default: the API)")
    add("--metadata", type=_pair, nargs="*", default=[], metavar="NAME=VALUE", help="to be written into the file, too")
    parser.takes_foreign_flags, parser.foreign_flags = True, OF_VLLM
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.host is not None or arguments.port is not None:
        if arguments.base_url is not None:
            raise ConfigError("--base-url names host and port already: leave out --host and --port")
        host = arguments.host or "127.0.0.1"
        arguments.base_url = f"http://{f'[{host}]' if ':' in host else host}:{arguments.port or 8000}"
    arguments.base_url = arguments.base_url or DEFAULT_URL
    if arguments.save_result and arguments.result is not None:
        raise ConfigError("--result names the file already: leave out --save-result")
    if not arguments.save_result and (arguments.result_dir or arguments.result_filename):
        say("--result-dir and --result-filename have no effect without --save-result")
    return _runs("serve")(arguments)
