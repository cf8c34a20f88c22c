"""`octavo serve | chat | run | pull | list | rm | ps | complete | top | bench | run-batch | doctor | replay | plan |
help | completion`: parses the command line, runs the command, and turns
errors into one line and an exit code. torch, HTTP frameworks and the engine are imported only by the commands that need them:
`octavo --help` must be instant."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

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
from octavo.cli.models import add_models
from octavo.cli.planning.flags import add_plan
from octavo.cli.settings import unknown_variables, wants_json_lines
from octavo.errors import ConfigError, OctavoError
from octavo.foreign_flags import FOREIGN_COMMANDS, OF_OLLAMA_RUN, foreign_variables
from octavo.ipc.stderr import say

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    _accept_terminal()
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


def _accept_terminal() -> None:
    """Write a question mark for a character that the terminal's encoding does not have, and read what is not in it as U+FFFD. Both
    would end the command otherwise."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")


def _complain(error: OctavoError, code: int) -> int:
    say(f"error: {' '.join(error.message.split())}")
    return code


def build_parser() -> Parser:
    parser = Parser(prog="octavo", description="Serve, try and measure language models.")
    parser.add_argument("--version", action=_Version, help="print the version and details of the build, and exit")
    parser.foreign_commands = FOREIGN_COMMANDS
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(run=lambda _: _print_help(parser))
    _add_serve(commands)
    _add_chat(commands)
    _add_run(commands)
    add_models(commands)
    _add_complete(commands)
    _add_top(commands)
    _add_scale(commands)
    add_bench(commands)
    _add_run_batch(commands)
    _add_doctor(commands)
    _add_replay(commands)
    add_plan(commands)
    _add_help(commands, parser)
    _add_completion(commands, parser)
    return parser


class _Version(argparse.Action):
    """Prints the version and exits. argparse's own action would need the details for every command."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from octavo.cli.version import version_lines

        print("\n".join(version_lines()))
        parser.exit()


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


# ── serve ───────────────────────────────────────────────────────────────────────────────────────────


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model, or several on one port, over an OpenAI-compatible HTTP API. Without MODEL: the embedded "
        "SmolLM2-135M-Instruct.",
    )
    add_settings_file(parser)
    add_config_flags(parser, takes_several=True)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    for name, close in unknown_variables(os.environ).items():
        hint = f"; did you mean {close}?" if close else ""
        say(f"the environment variable {name} is not known and has no effect{hint}")
    for note in foreign_variables(os.environ, ("VLLM_API_KEY",)):
        say(note)
    if config.models.are_several:
        from octavo.server.gateway.serve import serve_models

        return serve_models(config)
    if config.models.load_on_demand:
        raise ConfigError("--load-on-demand is for several models: name them with --models, or leave it out")
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
    _add_sampling_flags(parser, max_tokens)


def _add_sampling_flags(parser: Parser, max_tokens: str) -> None:
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
    from octavo.cli.conversation import converse

    model = _open_model(arguments, {})
    model.check_chat()
    return converse(model, arguments.system)


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="chat with a model, and serve it first if it is not served",
        description="Chat with MODEL: with the server of this machine that serves it, or with one that is started for the "
        "conversation and stopped after it. A model of the hub is pulled first. With PROMPT, print one answer.",
    )
    parser.takes_foreign_flags, parser.foreign_flags = True, OF_OLLAMA_RUN
    # It may be missing only so that the error can name what to do.
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a model's name, a folder or a .gguf file (required)")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the only question; - reads it from stdin")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument("--keep", action="store_true", help="leave the server running that was started here")
    _add_sampling_flags(parser, "most tokens of an answer (default: until the model stops)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo.cli import chat, models
    from octavo.cli.conversation import converse

    if not arguments.model:
        raise ConfigError("name a model: octavo run MODEL; octavo chat takes the embedded one where none is named")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give a question")
    sampling = {name: getattr(arguments, name) for name in chat.SAMPLING if getattr(arguments, name) is not None}
    key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    server, started = models.find_server(arguments.model), None
    if server is None:
        started = models.StartedServer(models.pull_if_missing(arguments.model), outlives_us=arguments.keep)
        server = started.record
    try:
        model = chat.RemoteModel(server.url, server.model, key, sampling)
        model.sample_by_default(models.OLLAMA_SAMPLING)
        return converse(model, arguments.system, prompt)
    finally:
        if started is not None and arguments.keep:
            say(f"the server stays at {server.url} (process {server.pid}): kill {server.pid} stops it")
        elif started is not None:
            started.stop()


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


# ── scale ───────────────────────────────────────────────────────────────────────────────────────────


def _add_scale(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="change the number of a server's replicas while it serves, or start them again one after the other",
        description="Have a running server serve with N replicas, and wait until it does. Replicas that are removed finish their requests "
        "first, or pass them on: nothing is lost. Exit code 1: it did not come to that; the message says why.",
    )
    parser.add_argument("replicas", metavar="N", nargs="?", type=count, help="how many replicas there should be")
    parser.add_argument(
        "--restart", action="store_true", help="start all replicas again, one after the other: for new weights"
    )
    parser.add_argument(
        "--url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="an admin key of the server; environment: OCTAVO_ADMIN_KEY")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=number, default=1800.0, help="how long to wait (default: 1800)"
    )
    parser.set_defaults(run=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from octavo.cli import scale
    from octavo.config import MAX_REPLICAS

    if arguments.replicas is None and not arguments.restart:
        raise ConfigError("give the number of replicas, or --restart")
    if arguments.replicas is not None and not 1 <= arguments.replicas <= MAX_REPLICAS:
        raise ConfigError(f"the number of replicas must be between 1 and {MAX_REPLICAS}, got {arguments.replicas}")
    keys = os.environ.get("OCTAVO_ADMIN_KEY", "") or os.environ.get("OCTAVO_API_KEY", "")
    key = arguments.api_key or keys.split(",")[0]
    return scale.run(arguments.url, key, arguments.replicas, arguments.restart, arguments.timeout)


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
        help="check whether this machine is ready, or whether a model can be served and how much memory it needs",
        description="Without MODEL: check this machine: Python, compiler, kernels, memory, file limits, port, disk, GPU. With MODEL: "
        "check its files, configuration, tensors, tokenizer, chat template, stop tokens and memory with the code that serves it; "
        "with --deep or a model's flags alone, those of the embedded model. Exit code 2: the machine is not ready, or the model "
        "cannot be served; the reason is printed.",
    )
    parser.add_argument("--deep", action="store_true", help="also read every weight and look for NaN and infinity")
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="instead, run the model and check that the same request gives the same bytes in every batch, order, chunking and "
        "engine. Exit code 1: it does not",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="PATH",
        help="also check whether this adapter, a PEFT folder or a GGUF file, fits the model; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_flags(parser, OFFLINE, also=_MACHINE_KNOBS)
    parser.set_defaults(run=_doctor)


# The address that the check of the machine tries, and the cluster that it looks at.
_MACHINE_KNOBS = ("host", "port", "ray_address")


def _doctor(arguments: argparse.Namespace) -> int:
    given = options_from(arguments).keys()
    others = given - {*_MACHINE_KNOBS, "device", "distributed_executor_backend"}
    if not (arguments.deep or arguments.determinism or arguments.adapter or others):
        from octavo.cli.doctor import machine

        return machine.run(config_from(arguments), as_json=arguments.json)
    for name in _MACHINE_KNOBS:
        if name in given:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for the check of the machine: give it without a model and its flags")
    config = config_from(arguments, {})
    if arguments.determinism:
        if arguments.deep:
            raise ConfigError("--deep and --determinism are different checks: give only one of them")
        from octavo.cli.doctor import determinism

        return determinism.run(config, as_json=arguments.json)
    from octavo.cli.doctor import model

    return model.run(config, deep=arguments.deep, as_json=arguments.json, adapters=arguments.adapter)


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


# ── help, completion ────────────────────────────────────────────────────────────────────────────────


def _add_help(commands: Any, whole: Parser) -> None:
    parser = commands.add_parser(
        "help",
        help="show the help of a command or a topic",
        description="Show the help of a command (help serve, help bench serve) or of a topic: environment, settings, values, "
        "exit-codes. Without TOPIC: a list of both.",
    )
    parser.add_argument("topic", metavar="TOPIC", nargs="*", help="command or topic")
    parser.add_argument("--man", action="store_true", help="print the manual page octavo(1), for man")
    parser.set_defaults(run=lambda arguments: _help(whole, arguments))


def _help(parser: Parser, arguments: argparse.Namespace) -> int:
    from octavo.cli.manual import help_text, manual_page

    if arguments.man and arguments.topic:
        raise ConfigError("--man prints the whole manual page: leave TOPIC out")
    print(manual_page(parser) if arguments.man else help_text(parser, arguments.topic), end="")
    return 0


def _add_completion(commands: Any, whole: Parser) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags in a shell",
        description="Print a script that completes commands, flags and their values. bash: source <(octavo completion bash). "
        "zsh: source <(octavo completion zsh), after compinit. fish: octavo completion fish | source.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    parser.set_defaults(run=lambda arguments: _completion(whole, arguments))


def _completion(parser: Parser, arguments: argparse.Namespace) -> int:
    from octavo.cli.command_tree import command_tree
    from octavo.cli.completion import script

    print(script(arguments.shell, command_tree(parser)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
