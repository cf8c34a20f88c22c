"""`octavo serve | chat | complete | top | bench | run-batch | doctor | replay`: parses the command line, runs the command, and turns
errors into one line and an exit code. torch, HTTP frameworks and the engine are imported only by the commands that need them:
`octavo --help` must be instant."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from octavo import __version__
from octavo.cli.bench.flags import add_bench
from octavo.cli.flags import (
    OF_REQUESTS,
    OFFLINE,
    Parser,
    add_config_flags,
    config_from,
    count,
    number,
    options_from,
    whole,
)
from octavo.errors import ConfigError, OctavoError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _complain(error, EXIT_USAGE)
    except OctavoError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Redirect stdout, so that the interpreter's last flush does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _complain(error: OctavoError, code: int) -> int:
    sys.stderr.write(f"octavo: error: {' '.join(error.message.split())}\n")
    return code


def build_parser() -> Parser:
    parser = Parser(prog="octavo", description="Serve, try and measure language models.")
    parser.add_argument(
        "--version", action="version", version=f"octavo {__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(run=lambda _: _print_help(parser))
    _add_serve(commands)
    _add_chat(commands)
    _add_complete(commands)
    _add_top(commands)
    add_bench(commands)
    _add_run_batch(commands)
    _add_doctor(commands)
    _add_replay(commands)
    return parser


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


# ── serve ───────────────────────────────────────────────────────────────────────────────────────────


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serve a model over HTTP with OpenAI's API. Without MODEL: the embedded SmolLM2-135M-Instruct.",
    )
    add_config_flags(parser)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    from octavo.supervisor.supervisor import serve

    return serve(config)


# ── chat, complete ──────────────────────────────────────────────────────────────────────────────────


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model, in this process or at --url. Ctrl-C stops an answer, Ctrl-D leaves.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    _add_talk_flags(parser, max_tokens="longest answer (default: until the model ends it)")
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_chat)


def _add_complete(commands: Any) -> None:
    parser = commands.add_parser(
        "complete",
        help="continue a text; the completion goes to stdout as it comes",
        description="Continue PROMPT with a model, in this process or at --url, and print what comes, nothing else.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    _add_talk_flags(parser, max_tokens="longest completion (default: 256)")
    add_config_flags(parser, OFFLINE, positional=False)
    parser.set_defaults(run=_complete)


def _add_talk_flags(parser: Parser, *, max_tokens: str) -> None:
    where = parser.add_argument_group("server")
    where.add_argument("--url", metavar="URL", help="an OpenAI-compatible server, http://127.0.0.1:8000 for example")
    where.add_argument("--api-key", metavar="KEY", help="its key; also OCTAVO_API_KEY")
    how = parser.add_argument_group("sampling")
    how.add_argument("--temperature", type=number, metavar="X", help="0: always the likeliest token")
    how.add_argument("--top-p", type=number, metavar="X", help="sample from the likeliest tokens that sum to X")
    how.add_argument("--top-k", type=whole, metavar="N", help="sample from the N likeliest tokens")
    how.add_argument(
        "--min-p", type=number, metavar="X", help="drop tokens below X times the likeliest one's probability"
    )
    how.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    how.add_argument("--max-tokens", type=count, metavar="N", help=max_tokens)


def _open_model(arguments: argparse.Namespace, otherwise: dict[str, Any]) -> Any:
    """Open a model in this process or at --url. Sampling flags override `otherwise`."""
    from octavo.cli import chat

    options = options_from(arguments)
    named = {name: getattr(arguments, name) for name in chat.SAMPLING if getattr(arguments, name) is not None}
    sampling = otherwise | named
    if arguments.url is None:
        if arguments.api_key is not None:
            raise ConfigError("--api-key is for a server: give its --url as well")
        return chat.LocalModel(options, sampling)
    model, seed = options.pop("model", ""), options.pop("seed", None)
    if options:
        raise ConfigError(
            f"--{sorted(options)[0].replace('_', '-')} has no effect on the server at --url: leave it out"
        )
    key = arguments.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    return chat.RemoteModel(arguments.url, model, key, sampling | ({} if seed is None else {"seed": seed}))


def _chat(arguments: argparse.Namespace) -> int:
    from octavo.cli.chat import converse

    model = _open_model(arguments, {})
    model.check_chat()
    return converse(model, arguments.system)


def _complete(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise ConfigError("the prompt is empty: give a text to continue")
    for piece in _open_model(arguments, {"max_tokens": 256}).complete(prompt):
        print(piece, end="", flush=True)
    if sys.stdout.isatty():
        print()
    return 0


# ── top ─────────────────────────────────────────────────────────────────────────────────────────────


def _add_top(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server: rows, queue, pages, what requests wait for",
        description="Watch a running Octavo server in the terminal until Ctrl-C.",
    )
    parser.add_argument(
        "--url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="its key; also OCTAVO_API_KEY")
    parser.add_argument("--once", action="store_true", help="print one look and exit")
    parser.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    from octavo.cli import top

    key = arguments.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    return top.run(arguments.url, key, once=arguments.once)


# ── run-batch ───────────────────────────────────────────────────────────────────────────────────────


def _add_run_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests, without a server",
        description="Answer every request of IN, OpenAI's batch format, one JSON object in a line, into OUT, one in a line too. What "
        "OUT holds already is not asked again: after a break, the same command goes on. Exit code 3: some answers are errors.",
    )
    for name, text in (("input", "file of requests"), ("output", "file of answers; made, or gone on with")):
        parser.add_argument(name, metavar=name.upper(), nargs="?", default=None, help=text)
        parser.add_argument(
            f"-{name[0]}", f"--{name}-file", metavar="FILE", default=None, help=f"the same as {name.upper()}"
        )
    parser.add_argument(
        "--max-concurrency", type=count, metavar="N", help="requests under way at once (default: 2 for each row)"
    )
    add_config_flags(parser, OFFLINE, also=OF_REQUESTS, positional=False)
    parser.set_defaults(run=_run_batch)


def _run_batch(arguments: argparse.Namespace) -> int:
    paths = []
    for name in ("input", "output"):
        given = [path for path in (getattr(arguments, name), getattr(arguments, f"{name}_file")) if path is not None]
        if len(given) != 1:
            raise ConfigError(f"give {name.upper()} once: octavo run-batch INPUT OUTPUT, or -i INPUT -o OUTPUT")
        paths += given
    if arguments.max_concurrency == 0:
        raise ConfigError("--max-concurrency must be at least 1, got 0")
    config = config_from(arguments, {})
    from octavo.server.run_batch import run_batch

    return run_batch(config, paths[0], paths[1], arguments.max_concurrency)


# ── doctor ──────────────────────────────────────────────────────────────────────────────────────────


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether a model would serve, and what memory it would take",
        description="Check a model's files, configuration, tensors, tokenizer, chat template, stop tokens and memory by the code "
        "that serves it. Exit code 2: it would not serve, and the reason.",
    )
    parser.add_argument("--deep", action="store_true", help="read every weight too, and look for NaN and infinity")
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="run the model instead: does the same request give the same bytes in every batch, order, chunking, engine? Exit code 1: no",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, {})
    if arguments.determinism:
        if arguments.deep:
            raise ConfigError("--deep and --determinism are two examinations: give one of them")
        from octavo.cli.doctor import determinism

        return determinism.run(config, as_json=arguments.json)
    from octavo.cli.doctor import model

    return model.run(config, deep=arguments.deep, as_json=arguments.json)


# ── replay ──────────────────────────────────────────────────────────────────────────────────────────


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="make a recorded server's plans again, and see what other settings would have changed",
        description="Make the plans of a recording again, step by step, and say whether they are the same. FILE is what the log names "
        "when an engine ended, or a running server's live-… folder. Exit code 1: something differs.",
    )
    parser.add_argument("file", metavar="FILE", help="a recording")
    parser.add_argument(
        "--model",
        nargs="?",
        const="",
        metavar="MODEL",
        help="compute the tokens too, by the recorded model or by MODEL",
    )
    parser.add_argument("--steps", metavar="A:B", help="show these steps in words")
    parser.add_argument("--request", metavar="ID", help="show what happened to one request")
    parser.add_argument(
        "--what-if",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="what would have changed with another max_num_seqs, max_num_batched_tokens, num_pages, num_host_pages, "
        "enable_prefix_caching or scheduling_policy; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from octavo.cli import replay

    return replay.run(
        arguments.file,
        model=arguments.model,
        steps=arguments.steps,
        request=arguments.request,
        what_if=arguments.what_if,
        as_json=arguments.json,
    )


if __name__ == "__main__":
    sys.exit(main())
