"""The generated pages of docs/: a stale page, an undescribed variable and a missing description are found."""

import re
import sys
from pathlib import Path

import pytest

from scripts import reference


def run(monkeypatch: pytest.MonkeyPatch, docs: Path, *flags: str) -> int:
    monkeypatch.setattr(reference, "DOCS", docs)
    monkeypatch.setattr(reference, "PAGES", {"reference/errors.md": reference.errors_page})
    monkeypatch.setattr(sys, "argv", ["reference", *flags])
    return reference.main()


def test_a_stale_page_is_named_with_the_command_that_renews_it(monkeypatch, tmp_path, capsys):
    page = tmp_path / "reference" / "errors.md"
    assert run(monkeypatch, tmp_path, "--check") == 1  # it is missing
    assert not page.exists()
    assert run(monkeypatch, tmp_path) == 0
    assert run(monkeypatch, tmp_path, "--check") == 0
    page.write_text(page.read_text().replace("invalid_value", "wrong_value"))
    capsys.readouterr()
    assert run(monkeypatch, tmp_path, "--check") == 1
    assert re.search(r"docs/reference/errors\.md is stale: run `python -m scripts\.reference`", capsys.readouterr().err)
    assert "wrong_value" in page.read_text()  # --check writes nothing


def test_a_variable_without_a_description_fails_the_page(monkeypatch):
    assert any("OCTAVO_CACHE" in line for line in reference.environment_page())
    others = {title: dict(names) for title, names in reference.ENVIRONMENT.items()}
    del others["Octavo's own"]["OCTAVO_CACHE"]
    monkeypatch.setattr(reference, "ENVIRONMENT", others)
    with pytest.raises(reference.Undescribed, match="OCTAVO_CACHE"):
        list(reference.environment_page())


def test_a_route_without_a_description_fails_the_page(monkeypatch):
    assert any("/v1/chat/completions" in line for line in reference.http_page())
    others = {title: dict(routes) for title, routes in reference.ROUTES.items()}
    del others["Generate"]["POST /tokenize"]
    others["Generate"]["GET /gone"] = "a route that is not there"
    monkeypatch.setattr(reference, "ROUTES", others)
    with pytest.raises(reference.Undescribed, match="GET /gone, POST /tokenize"):
        list(reference.http_page())


@pytest.mark.parametrize(
    "source, found",
    [
        ('import os\nos.environ.get("A_B")', {"A_B"}),
        ('import os\nos.environ["A_B"]', {"A_B"}),
        ('import os\nos.getenv("A_B", "")', {"A_B"}),
        ('import os\nif "A_B" not in os.environ: pass', {"A_B"}),
        ('environment.setdefault("A_B", "1")', {"A_B"}),
        ('table.get("A_B")', set()),
    ],
)
def test_reads_of_the_environment_are_found(tmp_path, source, found):
    (tmp_path / "module.py").write_text(source)
    assert reference._variables(tmp_path / "module.py") == found


def test_comments_of_fields_are_found_beside_and_above():
    source = 'class P:\n    a: int = 1  # one\n    # two\n    # lines\n    b: str = ""\n    c: bool\n'
    assert list(reference._struct_fields(source, "P")) == [
        ("a", "int", "1", "one"),
        ("b", "str", "''", "two lines"),
        ("c", "bool", "", ""),
    ]


def test_pipes_and_stars_stay_inside_their_cell():
    assert reference.cell("a | b\n*c*") == r"a \| b \*c\*"


def test_every_budget_is_in_the_table(monkeypatch):
    page = "\n".join(reference.budgets_page())
    assert "`--max-json-items`" in page and "entries of `logit_bias`" in page
    others = {title: dict(rows) for title, rows in reference.FIXED.items()}
    del others["Sampling"]["messages.params.MAX_BIASES"]
    monkeypatch.setattr(reference, "FIXED", others)
    with pytest.raises(reference.Undescribed, match=r"messages\.params\.MAX_BIASES"):
        list(reference.budgets_page())
    others["Sampling"]["messages.params.MAX_BIASES"] = ("x", "400")
    others["Sampling"]["messages.params.MAX_GONE"] = ("x", "400")
    with pytest.raises(reference.Undescribed, match=r"MAX_GONE, which is not there"):
        list(reference.budgets_page())
