"""Prints the ten largest files and functions of octavo/, so that growth is seen early. It sets no limits: a reader judges."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "octavo"
LARGE_FILE, LARGE_FUNCTION = 400, 50


def measure(root: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(lines, name) of every file and of every function, largest first."""
    files, functions = [], []
    for path in sorted(root.rglob("*.py")):
        name, source = str(path.relative_to(root.parent)), path.read_text()
        files.append((len(source.splitlines()), name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(
                    ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.lineno} {node.name}")
                )
    return sorted(files, reverse=True), sorted(functions, reverse=True)


def main() -> None:
    files, functions = measure(ROOT)
    print(f"{len(files)} files, {sum(lines for lines, _ in files)} lines, {len(functions)} functions")
    for title, sizes, large in (("files", files, LARGE_FILE), ("functions", functions, LARGE_FUNCTION)):
        print(f"largest {title} ({sum(lines > large for lines, _ in sizes)} over {large} lines):")
        for lines, name in sizes[:10]:
            print(f"  {lines:5d}  {name}")


if __name__ == "__main__":
    main()
