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
    OFFLINE,
    REQUEST_KNOBS,
    Parser,
    add_config_flags,
    add_settings_file,
    config_from,
    count,
    integer,
    number,
    options_from,
)
from octavo.cli.settings import unknown_variables, wants_json_lines
from octavo.errors import ConfigError, OctavoError
from octavo.ipc.stderr import say

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    try:
        if wants_json_lines(sys.argv[1:] if argv is None else argv, os.environ):
            # Before anything can be written: notes and errors about the flags are lines of the log, too.
            import logging

            from octavo.observe import logs

            logs.install(logging.WARNING, "json")
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
    say(f"error: {' '.join(error.message.split())}")
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
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API. Without MODEL: the embedded SmolLM2-135M-Instruct.",
    )
    add_settings_file(parser)
    add_config_flags(parser)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    for name in unknown_variables(os.environ):
        sys.stderr.write(f"octavo: the environment variable {name} is not known and has no effect\n")
    from octavo.supervisor.supervisor import serve

    return serve(config)


# ── chat, complete ──────────────────────────────────────────────────────────────────────────────────


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model in the terminal",
        description="Chat with a model that this process loads, or with one at --url. Ctrl-C stops an answer, Ctrl-D quits.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    _add_talk_flags(parser, max_tokens="most tokens of an answer (default: until the model stops)")
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_chat)


def _add_complete(commands: Any) -> None:
    parser = commands.add_parser(
        "complete",
        help="complete a prompt and stream the completion to stdout",
        description="Complete PROMPT with a model that this process loads, or with one at --url. Only the completion goes to stdout.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to complete; - reads it from stdin")
    _add_talk_flags(parser, max_tokens="most tokens of the completion (default: 256)")
    add_config_flags(parser, OFFLINE, positional=False)
    parser.set_defaults(run=_complete)


def _add_talk_flags(parser: Parser, *, max_tokens: str) -> None:
    where = parser.add_argument_group("server")
    where.add_argument(
        "--url", metavar="URL", help="use this OpenAI-compatible server, for example http://127.0.0.1:8000"
    )
    where.add_argument("--api-key", metavar="KEY", help="the server's API key; environment: OCTAVO_API_KEY")
    how = parser.add_argument_group("sampling")
    how.add_argument("--temperature", type=number, metavar="X", help="sampling temperature; 0: greedy")
    how.add_argument(
        "--top-p",
        type=number,
        metavar="X",
        help="sample from the smallest set of most likely tokens whose probabilities sum to X",
    )
    how.add_argument("--top-k", type=integer, metavar="N", help="sample from the N most likely tokens")
    how.add_argument(
        "--min-p",
        type=number,
        metavar="X",
        help="drop tokens that are less likely than X times the most likely token",
    )
    how.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text; may be given several times")
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
        help="watch a running server: rows, queue, KV pages, and what requests wait for",
        description="Watch a running Octavo server in the terminal. q or Ctrl-C quits.",
    )
    parser.add_argument(
        "--url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key; environment: OCTAVO_API_KEY")
    parser.add_argument("--once", action="store_true", help="print the current state once and exit")
    parser.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    from octavo.cli import top

    key = arguments.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    return top.run(arguments.url, key, once=arguments.once)


# ── run-batch ───────────────────────────────────────────────────────────────────────────────────────


def _add_run_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="run a file of requests, without a server",
        description="Run every request in INPUT and write the responses to OUTPUT. Both files are in OpenAI's batch format, one JSON "
        "object per line. Requests whose response is already in OUTPUT are skipped, so the same command continues an interrupted "
        "run. Exit code 3: some responses are errors.",
    )
    for name, text in (
        ("input", "file of requests"),
        ("output", "file of responses; it is created, or continued if it exists"),
    ):
        parser.add_argument(name, metavar=name.upper(), nargs="?", default=None, help=text)
        parser.add_argument(
            f"-{name[0]}", f"--{name}-file", metavar="FILE", default=None, help=f"the same as {name.upper()}"
        )
    parser.add_argument(
        "--max-concurrency", type=count, metavar="N", help="most requests in flight (default: 2 per row)"
    )
    add_config_flags(parser, OFFLINE, also=REQUEST_KNOBS, positional=False)
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
        help="check whether a model can be served, and how much memory it needs",
        description="Check a model's files, configuration, tensors, tokenizer, chat template, stop tokens and memory with the code "
        "that serves it. Exit code 2: it cannot be served; the reason is printed.",
    )
    parser.add_argument("--deep", action="store_true", help="also read every weight and look for NaN and infinity")
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="instead, run the model and check that the same request gives the same bytes in every batch, order, chunking and "
        "engine. Exit code 1: it does not",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, {})
    if arguments.determinism:
        if arguments.deep:
            raise ConfigError("--deep and --determinism are different checks: give only one of them")
        from octavo.cli.doctor import determinism

        return determinism.run(config, as_json=arguments.json)
    from octavo.cli.doctor import model

    return model.run(config, deep=arguments.deep, as_json=arguments.json)


# ── replay ──────────────────────────────────────────────────────────────────────────────────────────


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="replay the schedule of a recording, and show what other settings would have changed",
        description="Replay the schedule of a recording step by step and check that the plans are the same. FILE is the recording "
        "that the log names when an engine has crashed, or the live-… folder of a running server. Exit code 1: something differs.",
    )
    parser.add_argument("file", metavar="FILE", help="recording to replay")
    parser.add_argument(
        "--model",
        nargs="?",
        const="",
        metavar="MODEL",
        help="also recompute the tokens, with the recorded model or with MODEL",
    )
    parser.add_argument("--steps", metavar="A:B", help="describe the steps A to B")
    parser.add_argument("--request", metavar="ID", help="describe what happened to one request")
    parser.add_argument(
        "--what-if",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="estimate what would have changed with another max_num_seqs, max_num_batched_tokens, num_pages, num_host_pages, "
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
