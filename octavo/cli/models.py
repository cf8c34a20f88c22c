"""`octavo pull | list | rm | ps | run`: models by name. What needs more than the standard library is imported when a command runs."""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.ipc.stderr import say

if TYPE_CHECKING:
    from octavo.supervisor.runtime_dir import ServerRecord

NAME = "owner/name, owner/name-GGUF:Q4_K_M, or the same with hf.co/ before it"
POLL_SECONDS = 0.1
STOP_SECONDS = 40.0  # a server gives running requests 30
OLLAMA_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""What `octavo run` asks for where neither its flags nor the model say anything, as `ollama run` does."""


def add_models(commands: Any) -> None:
    pull = commands.add_parser(
        "pull",
        help="download a model from the hub",
        description="Download a model from the hub at HF_ENDPOINT into models/ of the cache folder (OCTAVO_CACHE). A download that "
        "breaks off continues with the next pull; every large file is compared with the hub's SHA-256.",
    )
    pull.add_argument("name", metavar="NAME", help=NAME)
    pull.add_argument("--revision", metavar="REV", default="", help="branch, tag or commit (default: main)")
    pull.set_defaults(run=_pull)

    listing = commands.add_parser(
        "list", help="list the models that were pulled", description="List the models that were pulled, by name."
    )
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    listing.set_defaults(run=_list)

    remove = commands.add_parser(
        "rm", help="delete models that were pulled", description="Delete models that were pulled."
    )
    remove.add_argument("names", metavar="NAME", nargs="+", help=NAME)
    remove.set_defaults(run=_rm)

    running = commands.add_parser(
        "ps",
        help="list the servers that run on this machine",
        description="List the servers of this user that run on this machine, with their models and addresses.",
    )
    running.add_argument("--json", action="store_true", help="print them as JSON")
    running.set_defaults(run=_ps)


def _pull(arguments: argparse.Namespace) -> int:
    from octavo.weights.sources.names import require_name
    from octavo.weights.sources.progress import ProgressLine, size_text
    from octavo.weights.sources.pull import pull

    progress = ProgressLine()
    try:
        model = pull(require_name(arguments.name), progress, revision=arguments.revision)
    finally:
        progress.close()
    print(f"{model.name} ({size_text(model.num_bytes)}) is in {model.folder}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from octavo.weights.sources.progress import size_text
    from octavo.weights.sources.store import Store

    models = Store().models()
    if arguments.json:
        entries = [
            {"name": one.name, "bytes": one.num_bytes, "path": str(one.path), "pulled": one.manifest.pulled}
            for one in models
        ]
        print(json.dumps(entries, indent=1))
        return 0
    if not models:
        say("no model was pulled yet: octavo pull NAME")
        return 0
    rows = [(one.name, size_text(one.num_bytes), _ago(one.manifest.pulled)) for one in models]
    _print_table(("NAME", "SIZE", "PULLED"), rows)
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    from octavo.weights.sources.names import require_name
    from octavo.weights.sources.store import Store

    store = Store()
    found = []
    for name in arguments.names:
        model = store.find(require_name(name))
        if model is None:
            raise ConfigError(f"no model {name} was pulled: octavo list shows those that were")
        if (server := find_server(model.name, with_inner=True)) is not None:
            raise ConfigError(f"{model.name} is served at {server.url} (process {server.pid}): stop that server first")
        found.append(model)
    for model in found:
        store.remove(model)
        print(f"removed {model.name}")
    return 0


def _ps(arguments: argparse.Namespace) -> int:
    from octavo.supervisor.runtime_dir import running_servers

    servers = running_servers()
    if arguments.json:
        entries = [{"model": one.model, "url": one.url, "pid": one.pid, "started": one.started} for one in servers]
        print(json.dumps(entries, indent=1))
        return 0
    if not servers:
        say("no server runs here: octavo serve MODEL, or octavo run MODEL")
        return 0
    rows = [(one.model, one.url, str(one.pid), _ago(one.started)) for one in servers]
    _print_table(("MODEL", "URL", "PID", "STARTED"), rows)
    return 0


# ── octavo run ──────────────────────────────────────────────────────────────────────────────────────


def find_server(model: str, *, with_inner: bool = False) -> "ServerRecord | None":
    """A running server of this model. `with_inner`: also one behind a gateway."""
    from octavo.supervisor.runtime_dir import running_servers
    from octavo.weights.sources.names import read_name

    def same(name: str) -> str:
        return str(read_name(name) or name).lower()

    return next(
        (server for server in running_servers(with_inner=with_inner) if same(server.model) == same(model)), None
    )


class StartedServer:
    """A server that `octavo run` starts for one conversation, or `octavo plan` to measure it, on any free port."""

    def __init__(self, model: str, flags: Sequence[str] = (), *, outlives_us: bool = False) -> None:
        """`outlives_us`: it stays when this process ends without stop(). Otherwise it stops, also if this process is killed, or its
        terminal is closed."""
        from octavo.ipc.subprocesses import signal_at_parents_end
        from octavo.supervisor.runtime_dir import running_servers

        say(f"starting a server for {model or 'the embedded model'}")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed by stop()
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *([model] if model else []), *flags, "--port", "0"]
        # In a session of its own: Ctrl-C stops an answer, not the server.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=None if outlives_us else functools.partial(signal_at_parents_end, signal.SIGTERM),
        )
        try:
            while True:
                found = [server for server in running_servers() if server.pid == self._process.pid]
                if found:
                    self.record = found[0]
                    return
                if self._process.poll() is not None:
                    raise ConfigError(self._last_words())
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        """Why the server did not start: its last line with an error, else its last line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        reason = (errors or lines or ["it printed nothing"])[-1]
        return reason if errors else f"the server did not start: {reason[:500]}"


def pull_if_missing(model: str) -> str:
    """Fetch a model of the hub that is not here, and return the name to serve. A path stays as it is."""
    from octavo.weights.sources.source import resolve

    return resolve(model).name if model and not os.path.exists(os.path.expanduser(model)) else model


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
