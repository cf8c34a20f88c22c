"""Every code block of README.md and docs/ runs as it stands. Console blocks run in bash, and what they print must be what the page shows;
Python blocks of a page run one after the other, as a reader would try them.

A block that cannot run here has a comment before it, `<!-- needs: gpu -->` (or docker, cluster, network); those are counted.
`<!-- prints: PATTERN -->` says what a Python block must print. In shown output … stands for anything, and numbers for any numbers."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from octavo.weights.sources.default_model import SMOLLM2, fetch
from tests.adapters import weights_of, write_peft
from tests.doubles import VOCAB_SIZE, write_byte_tokenizer
from tests.engine.test_engine_embed import MEAN_POOLING, bert, write
from tests.registry import registry
from tests.worker.tiny import write_tiny_llama

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[1]
NEEDS = {"gpu", "docker", "cluster", "network"}
RUN = {"console", "python"}
CHECKED = {"json", "yaml"}
SHOWN = {"text", "nginx", "http", "ini", ""}  # output, files of other programs, drawings
MAX_SECONDS = 600  # for the blocks of a page, as a guard: a busy machine is slow
START_SECONDS = 180
HUB_MODEL = "bartowski/SmolLM2-135M-Instruct-GGUF"  # the embedded model's name at the hub


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    needs: str = ""
    prints: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_in(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, without the indent of a tab."""
    found: list[Block] = []
    inside: list[str] | None = None
    notes: dict[str, str] = {}
    indent, language, start = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"( *)```(\w*) *$", line)
        if inside is not None:
            if fence and not fence[2] and fence[1] == indent:
                found.append(Block(page, start, language, "\n".join(inside), **notes))
                inside, notes = None, {}
            else:
                inside.append(line.removeprefix(indent))
        elif fence:
            inside, indent, language, start = [], fence[1], fence[2], number
        elif note := re.fullmatch(r" *<!-- (needs|prints): (.*?) -->", line):
            notes[note[1]] = note[2]
        elif line.strip():
            assert not notes, f"{page}:{number}: a note must stand right before its block"
    assert inside is None, f"{page}: a block is not closed"
    return found


def pages() -> dict[str, list[Block]]:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    return {page: blocks for page, text in found.items() if (blocks := blocks_in(page, text))}


PAGES = pages()
BLOCKS = [block for blocks in PAGES.values() for block in blocks]


# ── console blocks ──────────────────────────────────────────────────────────────────────────────────


def commands_in(text: str) -> list[tuple[str, str]]:
    """(command, shown output) of a console block. A command goes on while a quote is open or a line ends with a backslash."""
    found: list[tuple[str, str]] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.startswith("$ "):
            assert found or not line.strip(), f"output before a command: {line}"
            if found:
                found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
            continue
        command = line[2:]
        while lines and (command.endswith("\\") or _has_open_quote(command)):
            command += "\n" + lines.pop(0)
        found.append((command, ""))
    return found


def _has_open_quote(command: str) -> bool:
    quote = ""
    for letter in re.sub(r"\\.", "", command, flags=re.DOTALL):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#":  # the rest is a comment
            break
    return bool(quote)


def matches(shown: str, printed: str) -> bool:
    """Whether the printed text has the shown one in it. White space does not count, … is anything, a number any number."""
    squeezed = re.sub(r"\s+", "", shown)
    pattern = ""
    for part in re.findall(r"…|[0-9a-f]{16,}|[0-9][0-9.,]*|[▁▂▃▄▅▆▇█]+|[^…0-9▁▂▃▄▅▆▇█]", squeezed):
        if part == "…":
            pattern += ".*?"
        elif re.fullmatch(r"[0-9a-f]{16,}", part):
            pattern += "[0-9a-f]{16,}"
        elif part[0].isdigit():
            pattern += r"\d[\d.,]*"
        elif part[0] in "▁▂▃▄▅▆▇█":
            pattern += "[▁▂▃▄▅▆▇█]*"
        else:
            pattern += re.escape(part)
    return re.search(pattern, re.sub(r"\s+", "", printed), re.DOTALL) is not None


def shows_failure(shown: str) -> bool:
    return re.search(r"^octavo: error:|^ ✗ ", shown, re.MULTILINE) is not None


# `octavo serve` returns as soon as the server is ready, or with its status if it ends before; the server ends with the block.
PROLOGUE = r"""
trap 'for __server in $__servers; do kill -TERM $__server; wait $__server || echo "the server ended with $?"; done' EXIT
__servers=
octavo() {
    if [ "$1" != serve ]; then "$DOCS_PYTHON" -m octavo "$@" </dev/null; return; fi
    local log; log=$(mktemp)
    "$DOCS_PYTHON" -m octavo "$@" >"$log" 2>&1 & local pid=$!
    while kill -0 $pid 2>/dev/null && ! grep -q 'ready after' "$log"; do sleep 0.05; done
    cat "$log"
    if grep -q 'ready after' "$log"; then __servers="$__servers $pid"; return 0; fi
    wait $pid
}
python() { "$DOCS_PYTHON" "$@"; }
"""
MARK = "\x01"


@dataclass(frozen=True, slots=True)
class Place:
    """Where blocks run: a folder, the main server's port, and what stands for names that every reader has to replace."""

    folder: Path
    port: int
    replaced: dict[str, str]
    hub: str = ""
    printed: dict[str, str] = field(default_factory=dict)  # of a command that was a whole block

    def filled(self, text: str, port: int) -> str:
        for name, value in self.replaced.items():
            text = text.replace(name, value)
        return re.sub(r"(127\.0\.0\.1:|localhost:|--port )(8000|11434)\b", rf"\g<1>{port}", text)

    def environment(self, port: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        return kept | {
            "PYTHONPATH": str(ROOT),
            "DOCS_PYTHON": sys.executable,
            "OCTAVO_CACHE": self.replaced["~/.cache/octavo"],
            "OCTAVO_PORT": str(port),
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def run_console(block: Block, place: Place) -> list[str]:
    """Run a block's commands in one shell. Returns what was wrong."""
    commands = commands_in(block.text)
    has_server = any(command.startswith("octavo serve") for command, _ in commands)
    port = free_port() if has_server else place.port
    lines = [PROLOGUE]
    for command, _ in commands:
        lines += [place.filled(command, port), f"__status=$?; printf '\\n{MARK}%s\\n' $__status; (exit $__status)"]
    environment = place.environment(port if has_server else free_port()) | (
        {"OCTAVO_MODEL": place.replaced["path/to/folder"]} if has_server else {}
    )
    if HUB_MODEL in block.text:
        environment |= {"HF_ENDPOINT": place.hub}
    if len(commands) == 1 and (command := lines[1]) in place.printed:  # `octavo doctor MODEL` is on two pages
        return _compared(block, commands, place.printed[command])
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=place.folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=MAX_SECONDS, start_new_session=True,
    )  # fmt: skip
    if len(commands) == 1:
        place.printed[lines[1]] = done.stdout
    return _compared(block, commands, done.stdout)


def _compared(block: Block, commands: list[tuple[str, str]], output: str) -> list[str]:
    parts = re.split(rf"\n{MARK}(\d+)\n", output)
    wrong = []
    if len(parts) != 2 * len(commands) + 1:
        return [f"{block.place}: the shell ended early:\n{output}"]
    for number, (command, shown) in enumerate(commands):
        printed, status = parts[2 * number], int(parts[2 * number + 1])
        if (status != 0) != shows_failure(shown):
            wrong.append(f"{block.place}: `{command}` ended with {status}:\n{printed}")
        if shown.strip() and not matches(shown, printed):
            wrong.append(f"{block.place}: `{command}` printed\n{printed}\nand not\n{shown}")
    if "the server ended with" in parts[-1]:
        wrong.append(f"{block.place}: {parts[-1]}")
    return wrong


# ── Python blocks ───────────────────────────────────────────────────────────────────────────────────


def run_python(jobs: list[tuple[str, list[Block]]], place: Place) -> list[str]:
    """Run the blocks of pages in one process: the blocks of a page share their names, and pages share what is imported."""
    sent = [[(block.place, place.filled(block.text, place.port)) for block in blocks] for _, blocks in jobs]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_python_blocks.py"))], input=json.dumps(sent), cwd=place.folder, text=True,
        env=place.environment(place.port) | {"OPENAI_API_KEY": "none"}, capture_output=True, timeout=MAX_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = {result["place"]: result for result in json.loads(done.stdout.splitlines()[-1])}
    wrong = []
    for block in (block for _, blocks in jobs for block in blocks):
        result = results[block.place]
        if result["error"]:
            wrong.append(f"{block.place}: {result['error']}")
        elif "print(" in block.text and not result["printed"].strip():
            wrong.append(f"{block.place} printed nothing")
        elif block.prints and not re.search(block.prints, result["printed"]):
            wrong.append(f"{block.place} printed {result['printed']!r}, which does not match {block.prints!r}")
    return wrong


# ── the tests ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """The URL of a hub that has the embedded model under its name there."""
    with registry() as opened:
        opened.repositories[HUB_MODEL] = {"SmolLM2-135M-Instruct-Q4_1.gguf": fetch().read_bytes()}
        yield opened.url


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, hub: str) -> Iterator[Place]:
    """A folder with what the pages take for granted, and a server with the embedded model."""
    folder = tmp_path_factory.mktemp("documents")
    cache = folder / "cache"
    cache.mkdir()
    embedded = cache / SMOLLM2.file_name
    embedded.symlink_to(fetch())
    (folder / ".venv").symlink_to(sys.prefix)
    write_tiny_llama(folder / "tiny", vocab_size=VOCAB_SIZE)
    write_byte_tokenizer(folder / "tiny")
    for seed, name in enumerate(("sql", "tone")):
        write_peft(folder / "adapters" / name, weights_of(folder / "tiny"), rank=4, seed=seed)
    shutil.copytree(folder / "tiny", folder / "broken")
    config = json.loads((folder / "broken" / "config.json").read_text())
    (folder / "broken" / "config.json").write_text(json.dumps({**config, "model_type": "foo"}))
    write(bert(), folder / "encoder", MEAN_POOLING)
    (folder / "etc").mkdir()
    (folder / "etc" / "keys").write_text("sk-one\n")
    replaced = {
        "path/to/all-MiniLM-L6-v2": str(folder / "encoder"),
        "path/to/unsupported": str(folder / "broken"),
        "path/to/folder": str(folder / "tiny"),
        "path/to/adapters": str(folder / "adapters"),
        "/etc/octavo": str(folder / "etc"),
        "~/.cache/octavo": str(cache),
        " MODEL": f" {embedded}",
    }
    here = Place(folder, free_port(), replaced, hub)
    log = folder / "server.log"
    environment = here.environment(here.port) | {"OCTAVO_FILES_FOLDER": str(folder / "files")}
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "ready after" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield here
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()


def to_run(language: str) -> list[tuple[str, list[Block]]]:
    """The blocks that run, by page. One that is the same as an earlier one on another page, and complete in itself, runs once."""
    seen: set[str] = set()
    found = []
    for page, blocks in PAGES.items():
        chosen = []
        for block in blocks:
            is_complete = language == "console" or block.text.startswith(("from ", "import "))
            if block.language == language and not block.needs and not (is_complete and block.text in seen):
                chosen.append(block)
                seen.add(block.text)
        if chosen:
            found.append((page, chosen))
    return found


@pytest.fixture(scope="module")
def python_problems(place: Place) -> list[str]:
    """What was wrong with Python blocks. Console blocks may use files that those of their page have made."""
    return run_python(to_run("python"), place)


def test_python_blocks_run(python_problems: list[str]) -> None:
    assert sum(len(blocks) for _, blocks in to_run("python")) >= 10
    assert not python_problems, "\n\n".join(python_problems)


@pytest.mark.parametrize(
    ("page", "blocks"), to_run("console"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_console_blocks_print_what_the_page_shows(
    page: str, blocks: list[Block], place: Place, python_problems: list[str]
) -> None:
    wrong = [problem for block in blocks for problem in run_console(block, place)]
    assert not wrong, "\n\n".join(wrong)


def test_settings_files_are_read_and_json_is_json() -> None:
    from octavo.cli.flags import Parser, add_config_flags, add_settings_file
    from octavo.cli.settings import arguments_in

    for block in BLOCKS:
        if block.language == "json":
            json.loads(re.sub(r", …|…", "", block.text))
        elif block.language == "yaml":
            parser = Parser()
            add_settings_file(parser)
            add_config_flags(parser)
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(_temporary())
                (folder / "settings.yaml").write_text(block.text)
                parser.parse_args(arguments_in(str(folder / "settings.yaml")))


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_every_block_runs_or_says_what_it_needs() -> None:
    assert {block.needs for block in BLOCKS} - {""} <= NEEDS
    assert {block.language for block in BLOCKS} <= RUN | CHECKED | SHOWN
    counted = Counter(block.needs or "run" for block in BLOCKS if block.language in RUN)
    print(
        f"\ncode blocks: {counted['run']} run; not run: {', '.join(f'{counted[need]} {need}' for need in sorted(NEEDS))}"
    )
    # Tagging a block is a decision: more of them than here need one.
    assert sum(counted[need] for need in NEEDS) <= 15, counted
    assert counted["run"] >= 47, counted


def test_commands_of_the_benchmarks_name_modules_that_exist() -> None:
    """They take from minutes to hours, so that they are not run here."""
    named = set(
        re.findall(
            r"python -m ((?:benchmarks|scripts)[\w.]*)", "".join(p.read_text() for p in ROOT.glob("benchmarks/*.md"))
        )
    )
    assert len(named) > 5
    for module in named:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


# ── the machinery, on planted faults ────────────────────────────────────────────────────────────────


def fake_place(tmp_path: Path) -> Place:
    return Place(tmp_path, 1, {"~/.cache/octavo": str(tmp_path), "path/to/folder": "none"})


def console(text: str, tmp_path: Path) -> list[str]:
    return run_console(Block("page", 1, "console", text), fake_place(tmp_path))


def test_a_block_that_does_what_it_shows_passes(tmp_path: Path) -> None:
    assert console("$ echo 'a\nb' \\\n    c   # not 'd\na b c", tmp_path) == []
    assert (
        console(
            '$ echo \'{"time": 12.5, "id": "0123456789abcdef0"}\'\n{"time": 3, "id": "fedcba9876543210f", …', tmp_path
        )
        != []
    )
    assert console('$ echo \'{"time": 12.5, "more": 1}\'\n{"time": 3, …}', tmp_path) == []
    assert (
        console("$ octavo serve --max-model 4k\noctavo: error: unknown flag --max-model; …\n$ echo $?\n2", tmp_path)
        == []
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("$ false", "ended with 1"),
        ("$ true\nwords", "and not"),
        ("$ echo other\nwords", "and not"),
        ("$ exit 3", "ended early"),
        ("$ octavo serve --max-model 4k", "ended with 2"),
        ("$ true\noctavo: error: it is refused", "ended with 0"),
    ],
)
def test_a_block_that_does_not_is_found(text: str, why: str, tmp_path: Path) -> None:
    (problem,) = console(text, tmp_path)[:1]
    assert why in problem


def test_python_blocks_that_raise_or_print_nothing_are_found(tmp_path: Path) -> None:
    blocks = [
        Block("page", 1, "python", "x = 1\nprint(x)", prints="1"),
        Block("page", 2, "python", "print(x + 1)", prints="^3"),
        Block("page", 3, "python", "import nothing_like_this"),
        Block("page", 4, "python", "if x > 1: print(x)"),
    ]
    wrong = run_python([("page", blocks)], fake_place(tmp_path))
    assert [problem.split(" ")[0].rstrip(":") for problem in wrong] == ["page:2", "page:3", "page:4"]


def test_blocks_are_found_with_their_notes_and_without_the_indent_of_a_tab() -> None:
    text = '# T\n\n<!-- needs: gpu -->\n```console\n$ x\n```\n\n=== "a"\n\n    <!-- prints: y -->\n\n    ```python\n    if y:\n        z\n    ```\n'
    assert blocks_in("page", text) == [
        Block("page", 4, "console", "$ x", needs="gpu"),
        Block("page", 12, "python", "if y:\n    z", prints="y"),
    ]
