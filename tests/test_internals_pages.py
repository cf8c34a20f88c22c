"""The pages about the source name files, classes and functions that exist."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from octavo.cli.topics import ENVIRONMENT, OF_MAKE, OF_OTHERS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs/internals").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
BASES = (ROOT / "octavo", ROOT)  # paths are given from either

_QUOTED = re.compile(r"`([^`\n]+)`|\*\*([\w/{},.]+)\*\*")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w{},*./-]+(?:\.(?:py|cpp|h|md|js|toml|json|sh)|/)$")
_NAME = re.compile(
    r"\w+(?:\.\w+)+$|[A-Z]\w*[a-z]\w*$|[A-Z][A-Z_]{2,}$|_\w+$|[a-z]+(?:_[a-z0-9]+)+$"
)  # no single small words

FOREIGN = {"config.json", "model_type", "build/site/", "dist/", "num_x", "x_len", "manylinux_2_29"}
"""Of checkpoints, built, or patterns of names."""
OF_OTHER_SERVERS = {"llm.llm_engine", "get_metrics", "GuidedDecodingParams"}
VARIABLES_OF_OTHER_SERVERS = ("VLLM_", "OLLAMA_", "LLAMA_ARG_")
VARIABLES = {name for names in (*ENVIRONMENT.values(), OF_OTHERS, OF_MAKE) for name in names}


def spans(page: Path) -> list[str]:
    """What a page quotes or, in internals/, sets in bold; outside of code blocks."""
    is_internal = page.parent.name == "internals"
    found = _QUOTED.findall(_FENCED.sub("", page.read_text()))
    return [quoted or bold for quoted, bold in found if quoted or is_internal]


class Definitions(ast.NodeVisitor):
    """All names that files define, and the members of each class, module and folder."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        self._inside: list[set[str]] = [self.names]

    def read(self, path: Path) -> None:
        self._define(path.stem)
        self.members.setdefault(path.parent.name, set()).add(path.stem)
        self.members.setdefault(path.parent.parent.name, set()).add(path.parent.name)
        self._inside.append(self.members.setdefault(path.stem, set()))
        self.visit(ast.parse(path.read_text()))
        self._inside.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node.name)
        self.bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        self._inside.append(self.members.setdefault(node.name, set()))
        self.generic_visit(node)
        self._inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.attr)
        self.generic_visit(node)

    def _define(self, name: str) -> None:
        for names in self._inside:
            names.add(name)

    def has(self, owner: str, name: str) -> bool:
        """Whether a class or one of its bases, a module or a folder has this member."""
        return name in self.members.get(owner, ()) or any(self.has(base, name) for base in self.bases.get(owner, ()))


@cache
def definitions() -> Definitions:
    found = Definitions()
    for path in [
        *(ROOT / "octavo").rglob("*.py"),
        *(ROOT / "scripts").glob("*.py"),
        ROOT / "tests/test_architecture.py",
    ]:
        found.read(path)
    return found


def problem_with_path(text: str) -> str | None:
    """Braces and stars are expanded as a shell does. A name without folders may stand anywhere: its table or sentence says where."""
    for path in expanded(text):
        pattern = path.rstrip("/")
        patterns = (pattern,) if "/" in pattern else (pattern, f"**/{pattern}")
        if not any(next(base.glob(each), None) for base in BASES for each in patterns):
            return f"{path} does not exist"
    return None


def expanded(text: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def problem_with_name(text: str) -> str | None:
    known = definitions()
    *owners, name = text.split(".")
    if owners and owners[-1] in known.members:
        return None if known.has(owners[-1], name) else f"{owners[-1]} has no {name}"
    return None if name in known.names and not owners else f"{text} is not defined"


def problem_with(span: str) -> str | None:
    if " /" in span:  # a route
        return None
    text = re.split(r"[ (]", span)[0]
    text = text.partition("<")[0]  # octavo/models/<model_type>.py: the folder
    if any(mark in text for mark in "…=:") or text in FOREIGN | VARIABLES | OF_OTHER_SERVERS:
        return None
    if text.startswith((".", "-", "/", *VARIABLES_OF_OTHER_SERVERS)):
        return None
    if _PATH.match(text):
        return problem_with_path(text)
    return problem_with_name(text) if _NAME.match(text) else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    problems = {span: problem for span in spans(page) if (problem := problem_with(span)) is not None}
    assert not problems


@pytest.mark.parametrize(
    "span",
    [
        "engine/looop.py",
        "`octavo/nowhere/",
        "schedule/{scheduler,seats}.py",
        "kernels/cpu/produkt*.cpp",
        "StepObservatory",
        "StepObserver.planed",
        "Scheduler.plan_all()",
        "plan_lod(settings, entries, small) -> LoadPlan",
        "loop.stepp",
        "octavo/famillies/<model_type>.py",
        "_plan_runing",
        "Observer",
    ],
)
def test_a_name_that_does_not_exist_is_found(span: str) -> None:
    assert problem_with(span.strip("`")) is not None


_SIZES = re.compile(
    r"about ([\d,]+) lines of Python\. (?:The|Its) spine is (\d+) files and ([\d,]+) lines", re.IGNORECASE
)


@pytest.mark.parametrize("name", ["README.md", "docs/internals/map.md"])
def test_the_sizes_that_a_page_gives_are_true_within_a_tenth(name: str) -> None:
    found = _SIZES.search((ROOT / name).read_text())
    assert found, f"{name} no longer gives the sizes of the source and of its spine"
    total, num_files, spine = (int(number.replace(",", "")) for number in found.groups())
    tip = (ROOT / "docs/internals/map.md").read_text().partition("## ")[0].partition("```")[0]
    files = [
        path
        for quoted in re.findall(r"`([^`\n]+\.py)`", tip)
        for path in expanded(quoted)
        if path != "tests/test_architecture.py"
    ]
    assert len(files) == num_files
    assert num_lines(ROOT / "octavo" / file for file in files) == pytest.approx(spine, rel=0.1)
    assert num_lines((ROOT / "octavo").rglob("*.py")) == pytest.approx(total, rel=0.1)


def num_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)
