"""`octavo completion SHELL`, run by the real shells (zsh and fish where they are installed), and `octavo help`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.cli.command_tree import command_tree
from octavo.cli.completion import script
from octavo.cli.main import build_parser
from octavo.cli.topics import EXIT_CODES, TOPICS

TREE = command_tree(build_parser())
DOCS = Path(__file__).parents[2] / "docs"


def bash(line: str, folder: Path) -> set[str]:
    """What the bash function offers for a line that ends at the cursor."""
    # As readline splits words: = is a word of its own.
    words = [word for word in re.split(r"\s+|(=)", line) if word]
    if line.endswith((" ", "=")):
        words.append("")
    listed = " ".join(f"'{word}'" for word in words)
    run = f"{script('bash', TREE)}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _octavo\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-u", "-c", run], cwd=folder, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("octavo ser", {"serve"}),
        ("octavo bench ", {"latency", "throughput", "serve"}),
        ("octavo bench serve --good", {"--goodput"}),
        ("octavo serve --max-model-l", {"--max-model-len"}),
        ("octavo serve --device ", {"auto", "cpu", "cuda"}),
        ("octavo serve --device=c", {"cpu", "cuda"}),
        ("octavo serve --port 1 --kv-cache-dtype f", {"fp8", "float16", "float32"}),
        ("octavo serve --port ", set()),
        ("octavo serve --config my", {"my-model.yaml"}),
        ("octavo completion ", {"bash", "zsh", "fish"}),
        ("octavo top --on", {"--once"}),
        ("octavo --v", {"--version"}),
    ],
)
def test_bash_completes_commands_flags_and_values(line: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "my-model.yaml").touch()
    assert bash(line, tmp_path) == offered


def test_every_flag_of_every_command_is_offered(tmp_path: Path) -> None:
    for command in TREE.walk():
        names = {name for option in command.options for name in option.names}
        assert names and bash(" ".join(("octavo", *command.path, "-")), tmp_path) == names


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_commands_flags_and_values(tmp_path: Path) -> None:
    (tmp_path / "octavo.fish").write_text(script("fish", TREE))

    def fish(line: str) -> set[str]:
        run = f"source octavo.fish; complete -C '{line}'"
        command = ["fish", "--no-config", "-c", run]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    assert fish("octavo ser") == {"serve"}
    assert fish("octavo bench serve --goodp") == {"--goodput"}
    assert fish("octavo serve --device ") == {"auto", "cpu", "cuda"}
    assert "--port" not in fish("octavo top --")


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_accepts_the_script_and_every_spec(tmp_path: Path) -> None:
    (tmp_path / "_octavo").write_text(script("zsh", TREE))
    # _arguments runs only inside a completion; comparguments parses its specs, so a stand-in collects them.
    run = (
        'typeset -A opt_args; seen=(); _arguments() { shift; seen+=("$@"); state=; }; compdef() { : }; '
        "source ./_octavo; for each in ${(k)functions[(I)_octavo*]}; do $each; done; print -l -- $seen"
    )
    done = subprocess.run(["zsh", "-f", "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    names = {name for command in TREE.walk() for option in command.options for name in option.names}
    assert {re.split(r"[=\[]", line)[0] for line in done.stdout.splitlines() if line.startswith("-")} == names


def run_help(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["help", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_help_shows_commands_and_topics(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_help(capsys)
    assert code == 0 and all(name in out for name in ("serve", *TOPICS))
    assert "usage: octavo bench serve" in run_help(capsys, "bench", "serve")[1]
    assert "OCTAVO_CACHE: the cache folder" in run_help(capsys, "environment")[1]
    assert "OCTAVO_MAX_MODEL_LEN" in run_help(capsys, "environment")[1]
    assert run_help(capsys, "sevre") == (2, "", "octavo: error: no help for 'sevre'; did you mean serve?\n")
    assert run_help(capsys, "serve", "x") == (2, "", "octavo: error: no help for 'serve x'\n")
    assert run_help(capsys, "--man", "serve")[0] == 2


def test_the_page_of_exit_codes_has_the_same_table() -> None:
    page = (DOCS / "operate" / "exit-codes.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if line[:1] == "|"]
    assert rows[2:] == list(EXIT_CODES)


def test_the_manual_page_has_every_flag_and_no_accidental_request(capsys: pytest.CaptureFixture[str]) -> None:
    _, page, _ = run_help(capsys, "--man")
    plain = page.replace("\\-", "-")
    assert all(
        f"\\fB{name}\\fR" in plain
        for command in TREE.walk()
        for option in command.options
        for name in option.names
        if command.path and not command.commands
    )
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".SS", ".TP", ".PP", ".br"}
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, timeout=20
        )
        assert (done.returncode, done.stderr) == (0, "") and "the reader of its output is gone" in done.stdout
