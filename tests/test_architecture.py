"""Rules of the code base: which room may import which, words that must not appear, what an import may load.
Every rule is also run on a planted fault, so that a rule that finds nothing is noticed."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"

# The rooms in tiers, lowest first: a module imports from lower tiers, and from its own room. The longest matching name counts.
# Rooms that grew several concerns are split into sub-rooms here, so that an upward import inside one is seen.
TIERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "0",
        ("errors", "config", "foreign_flags", "fresh", "key_settings", "limits", "spec", "stage", "gguf", "messages"),
    ),
    ("1a", ("ipc", "schedule", "cache", "text", "executor.base")),
    ("1b", ("observe", "sandbox", "routing", "kv_tier")),
    ("2", ("device", "parallel", "batch", "kernels", "quants")),
    ("3a", ("attention", "sampling", "weights.methods")),
    ("3b", ("layers",)),
    ("3c", ("models",)),
    ("3d", ("weights",)),
    ("4", ("worker",)),
    ("5", ("executor",)),
    ("6a", ("admission", "recording")),
    ("6b", ("client",)),
    ("6c", ("engine",)),
    ("6d", ("supervisor", "offline", "replay")),
    ("6e", ("plan", "cluster")),
    ("7", ("server.threads",)),
    ("7a", ("server.state", "server.schema")),
    ("7b", ("server.http", "server.generate")),
    ("7c", ("server.dialects", "server.batch")),
    ("7d", ("server.endpoints",)),
    ("7e", ("server",)),  # app, prepare, process, openapi, run_batch
    ("8", ("cli",)),
)
LEVELS = {room: level for level, (_, rooms) in enumerate(TIERS) for room in rooms}
NAMES = dict(enumerate(name for name, _ in TIERS))
# Rooms of one tier do not import each other, but for these corridors, each open in one direction.
CORRIDORS = {
    ("schedule", "cache"),
}
GROUND = {"errors", "config", "key_settings", "spec", "messages", "gguf"}  # what every room may import, tier 0 too
TORCH_ROOMS = {room for room, level in LEVELS.items() if NAMES[level][0] in "2345"}
NEVER_TORCH = set(LEVELS) - TORCH_ROOMS
# Parts of torch rooms that engine, server and cli may import without loading torch. Using them may load it: sources/ never
# does; checkpoint does as soon as it opens a GGUF file (its family file says how to read it) or a quantised folder, or
# yields tensors.
LIGHT = {
    "octavo.weights.sources",
    "octavo.weights.formats.checkpoint",
    "octavo.weights.adapters",
    "octavo.kernels.cpu.build",
}
HTTP = {"fastapi", "starlette", "pydantic", "uvicorn"}
GPU_FILES = {"octavo.device", "octavo.worker.graphs"}
SEAM = ("octavo.kernels.device_ops", "octavo.weights.methods.base", "octavo.weights.methods.registry")
PLAIN_ATTENTION = {"base", "choose", "reference", "torch_cpu", "__init__"}
PRINTING = (
    "octavo.cli",
    "octavo.supervisor.supervisor",
)

Rule = Callable[[str, ast.Module], Iterator[str]]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the real tree, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return found


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, cached: walking the trees takes most of the rules' time."""
    return tuple(ast.walk(tree))


@functools.cache
def room_of(module: str) -> str:
    """The longest name in TIERS that the module falls under; "" for the package itself."""
    inside = module.removeprefix("octavo").lstrip(".").removesuffix("__init__").rstrip(".")
    names = [name for name in LEVELS if inside == name or inside.startswith(name + ".")]
    return max(names, key=len, default="")


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the file, inside functions too."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base.startswith("octavo"))


def inner_imports(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(imported module, its room) for imports of octavo's other rooms."""
    for name in imports(module, tree):
        if name.startswith("octavo."):
            room = room_of(name)
            if room and room != room_of(module):
                yield name, room


# ── the rules ───────────────────────────────────────────────────────────────────────────────────────


def levels(module: str, tree: ast.Module) -> Iterator[str]:
    here = room_of(module)
    if not here:
        return
    for name, room in inner_imports(module, tree):
        if LEVELS[room] > LEVELS[here]:
            yield f"level {NAMES[LEVELS[here]]} imports {name} of level {NAMES[LEVELS[room]]}"
        elif LEVELS[room] == LEVELS[here] and (here, room) not in CORRIDORS and room not in GROUND:
            yield f"{here} imports {name}: no corridor between these rooms"


def known_rooms(module: str, tree: ast.Module) -> Iterator[str]:
    if module not in ("octavo.__init__", "octavo.__main__") and not room_of(module):
        yield "lies in no room of the design"


def torch_free(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) not in NEVER_TORCH:
        return
    for name in imports(module, tree):
        if name.split(".")[0] == "torch":
            yield f"imports {name}"
    for name, room in inner_imports(module, tree):
        # `from octavo.weights import source` yields the package as well as the file: the file counts.
        light = any(
            name == allowed or allowed.startswith(name + ".") or name.startswith(allowed + ".") for allowed in LIGHT
        )
        if room in TORCH_ROOMS and not light:
            yield f"imports {name}, which may load torch"


def purity(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) in ("schedule", "cache", "routing"):
        for name in imports(module, tree):
            if name.split(".")[0] in ("torch", "asyncio", "time", "datetime", "random", "threading"):
                yield f"imports {name}: scheduling, page bookkeeping and routing are pure"
            if name.startswith("octavo.config"):
                yield "takes the config tree: constructors take integers"


def http_only_in_server(module: str, tree: ast.Module) -> Iterator[str]:
    if not module.startswith("octavo.server"):
        yield from (f"imports {name}" for name in imports(module, tree) if name.split(".")[0] in HTTP)


def no_transformers(module: str, tree: ast.Module) -> Iterator[str]:
    yield from (f"imports {name}" for name in imports(module, tree) if name.split(".")[0] == "transformers")


def says_page(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) in ("schedule", "cache"):
        yield from (f"says {name!r}: the word is page" for name in identifiers(tree) if "block" in name.lower())


def cuda_at_home(module: str, tree: ast.Module) -> Iterator[str]:
    room, name = room_of(module), module.rsplit(".", 1)[-1]
    if module in GPU_FILES or room == "kernels" or (room == "attention" and name not in PLAIN_ATTENTION):
        return
    for node in nodes(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                used = ["torch.cuda"]
            case ast.Import(names=aliases):
                used = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(base), names=aliases):
                used = [f"{base}.{alias.name}" for alias in aliases]
            case _:
                continue
        if any(f"{name}.".startswith("torch.cuda.") for name in used):
            yield f"line {node.lineno} uses torch.cuda"


def layers_ask_no_device(module: str, tree: ast.Module) -> Iterator[str]:
    """Layers and models ask for operations and for held weights; which kernels those are is picked elsewhere."""
    if room_of(module) not in ("layers", "models"):
        return
    for name in imports(module, tree):
        is_known = any(f"{name}.".startswith(f"{known}.") for known in SEAM)
        # `from octavo.kernels import device_ops` yields the package as well as the file: the file is what counts.
        is_package = any(known.startswith(f"{name}.") for known in SEAM)
        if name.startswith(("octavo.kernels", "octavo.weights")) and not is_known and not is_package:
            yield f"imports {name}, which is one way to compute"


def families() -> set[str]:
    return {path.stem for path in (PACKAGE / "models").glob("*.py")} - {"__init__"}


def families_at_home(module: str, tree: ast.Module) -> Iterator[str]:
    """Model families are named in their own file only. text/ may: tokenizer files use the same words as format names."""
    if room_of(module) in ("models", "text"):
        return
    words = {word for name in identifiers(tree) for word in name.lower().split("_")}
    for family in families() & (words | {text.lower() for text in strings(tree)}):
        yield f"names the model family {family!r}"


def endpoints_at_home(module: str, tree: ast.Module) -> Iterator[str]:
    """Routes are named only by their endpoint's file, by the gateway, which answers some for all models, and by the clients."""
    if module.startswith(("octavo.server.endpoints", "octavo.server.gateway", "octavo.cli.bench", "octavo.cli.chat")):
        return
    yield from (f"names the route {text!r}" for text in strings(tree) if text.startswith("/v1/"))


def introduces_itself(module: str, tree: ast.Module) -> Iterator[str]:
    if not tree.body and module.endswith("__init__"):
        return
    if not ast.get_docstring(tree):
        yield "needs a docstring that says what the file does"


def stdout_is_for_answers(module: str, tree: ast.Module) -> Iterator[str]:
    """A process's stdout is a channel where no person reads it, and a stray line breaks it. stderr is for people."""
    if module.startswith(PRINTING):
        return
    for node in nodes(tree):
        match node:
            case ast.Call(func=ast.Name(id="print"), keywords=keywords):
                if "sys.stderr" not in [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "file"]:
                    yield f"line {node.lineno} prints to stdout"


RULES: list[Rule] = [
    levels,
    known_rooms,
    torch_free,
    purity,
    http_only_in_server,
    no_transformers,
    says_page,
    cuda_at_home,
    layers_ask_no_device,
    families_at_home,
    endpoints_at_home,
    introduces_itself,
    stdout_is_for_answers,
]


def identifiers(tree: ast.Module) -> set[str]:
    found = set()
    for node in nodes(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def strings(tree: ast.Module) -> list[str]:
    """String constants that are not docstrings or strings standing alone."""
    alone = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in nodes(tree) if isinstance(node, ast.Constant) and id(node) not in alone]
    return [node.value for node in constants if isinstance(node.value, str)]


# ── the real tree ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    faults = [f"{module}: {fault}" for module, tree in modules().items() for fault in rule(module, tree)]
    assert not faults, "\n" + "\n".join(sorted(set(faults)))


PLANTED = [
    (levels, "octavo.schedule.scheduler", "from octavo.engine import loop"),
    (levels, "octavo.schedule.scheduler", "def f():\n    from octavo import worker"),
    (levels, "octavo.cache.pool", "from octavo.schedule.request import Request"),
    (levels, "octavo.attention.reference", "import octavo.layers.rope"),
    (levels, "octavo.attention.reference", "from ..layers import rope"),
    (levels, "octavo.text.stops", "from octavo.cache import pool"),
    (levels, "octavo.executor.base", "from octavo.executor.local import LocalExecutor"),
    (levels, "octavo.engine.loop", "from octavo.server import app"),
    (levels, "octavo.client.client", "from octavo.supervisor.watchdog import Watch"),
    (levels, "octavo.engine.process", "from octavo.supervisor import supervisor"),
    (levels, "octavo.client.client", "from octavo.engine.loop import EngineLoop"),
    (levels, "octavo.server.dialects.openai_responses.request", "from octavo.server.endpoints.chat import router"),
    (levels, "octavo.server.dialects.anthropic.blocks", "from octavo.server.batch import files"),
    (levels, "octavo.server.generate.chat", "from octavo.server.http import sse"),
    (levels, "octavo.server.endpoints.openapi", "from octavo.server.openapi import build_document"),
    (levels, "octavo.server.batch.runner", "from octavo.server.app import build_app"),
    (levels, "octavo.layers.linear", "from octavo.models import llama"),
    (levels, "octavo.weights.methods.torch", "from octavo.layers.linear import Linear"),
    (levels, "octavo.weights.methods.registry", "from octavo.weights.formats.checkpoint import Checkpoint"),
    (known_rooms, "octavo.helpers", ""),
    (torch_free, "octavo.engine.loop", "import torch"),
    (torch_free, "octavo.server.app", "def f():\n    from torch import nn"),
    (torch_free, "octavo.engine.loop", "from octavo.executor.local import LocalExecutor"),
    (torch_free, "octavo.cli.main", "from octavo.batch import Batch"),
    (purity, "octavo.schedule.policy", "import time"),
    (purity, "octavo.cache.pool", "from asyncio import Lock"),
    (purity, "octavo.routing.router", "import random"),
    (levels, "octavo.routing.router", "from octavo.client import client"),
    (levels, "octavo.cache.pool", "from octavo.routing import Router"),
    (purity, "octavo.schedule.scheduler", "from octavo.config import Config"),
    (http_only_in_server, "octavo.client.client", "from fastapi import Request"),
    (no_transformers, "octavo.text.tokenize.tokenizer", "def f():\n    from transformers import AutoTokenizer"),
    (says_page, "octavo.cache.pool", "def f(num_blocks): pass"),
    (says_page, "octavo.schedule.request", "self.block_table = 1"),
    (cuda_at_home, "octavo.worker.runner", "import torch\ntorch.cuda.synchronize()"),
    (cuda_at_home, "octavo.attention.reference", "import torch\ntorch.cuda.is_available()"),
    (cuda_at_home, "octavo.worker.runner", "from torch import cuda"),
    (cuda_at_home, "octavo.worker.runner", "def f():\n    from torch import nn, cuda as gpu"),
    (cuda_at_home, "octavo.worker.runner", "from torch.cuda import Stream"),
    (cuda_at_home, "octavo.worker.runner", "import torch.cuda"),
    (layers_ask_no_device, "octavo.layers.linear", "from octavo.kernels.cpu.native import Native"),
    (layers_ask_no_device, "octavo.layers.mlp", "def f():\n    import octavo.kernels.triton.device_ops"),
    (layers_ask_no_device, "octavo.models.llama", "from octavo.weights.methods import triton_fp8"),
    (families_at_home, "octavo.worker.runner", "if model_type == 'llama': pass"),
    (families_at_home, "octavo.layers.rope", "class GPT2: pass\ngpt2 = 1"),
    (endpoints_at_home, "octavo.server.app", "path = '/v1/completions'"),
    (introduces_itself, "octavo.engine.loop", ""),
    (stdout_is_for_answers, "octavo.worker.runner", "print('here')"),
    (stdout_is_for_answers, "octavo.engine.process", "import sys\nprint('here', file=sys.stdout)"),
]


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_rule_sees_a_planted_fault(rule: Rule, module: str, source: str) -> None:
    assert list(rule(module, ast.parse(source)))


ALLOWED = [
    (
        levels,
        "octavo.schedule.scheduler",
        "from octavo.cache.kv_cache import KVCache\nfrom octavo.messages import StepPlan",
    ),
    (levels, "octavo.models.llama", "from octavo.layers.norm import RMSNorm\nfrom octavo.batch import Batch"),
    (levels, "octavo.layers.linear", "from octavo.weights.methods.base import HeldWeight"),
    (layers_ask_no_device, "octavo.layers.norm", "from octavo.kernels import device_ops"),
    (layers_ask_no_device, "octavo.layers.linear", "from octavo.weights.methods.base import HeldWeight"),
    (levels, "octavo.server.endpoints.chat", "from octavo.server.dialects.openai_chat import output"),
    (levels, "octavo.server.run_batch", "from octavo.server.endpoints.batches import batch_routes"),
    (
        levels,
        "octavo.executor.local",
        "from octavo.executor.base import Executor\nfrom octavo.worker.runner import Runner",
    ),
    (
        torch_free,
        "octavo.offline.llm",
        "from octavo.weights.sources.source import resolve\nfrom octavo.executor.base import Executor",
    ),
    (torch_free, "octavo.offline.llm", "from octavo.weights.sources import source"),
    (endpoints_at_home, "octavo.server.endpoints.chat", "path = '/v1/chat/completions'"),
    (says_page, "octavo.cache.pool", "'''Others say block.'''\npage = 1"),
    (stdout_is_for_answers, "octavo.weights.sources.source", "import sys\nprint('fetching', file=sys.stderr)"),
    (families_at_home, "octavo.weights.formats.checkpoint", "hint = 'use llama-gguf-split'"),
    (cuda_at_home, "octavo.attention.flash", "import torch\ntorch.cuda.synchronize()"),
    (cuda_at_home, "octavo.device", "from torch import cuda"),
    (cuda_at_home, "octavo.worker.runner", "import torch\nfrom torch import nn"),
]


@pytest.mark.parametrize(("rule", "module", "source"), ALLOWED)
def test_rule_leaves_the_innocent_alone(rule: Rule, module: str, source: str) -> None:
    assert not list(rule(module, ast.parse(source)))


# ── what an import drags in ─────────────────────────────────────────────────────────────────────────

IMPORTER = """
import importlib, json, sys
dragged = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for heavy in json.loads(sys.argv[2]):
        if heavy in sys.modules:
            dragged.setdefault(heavy, name)
print(json.dumps(dragged))
"""


def dragged_in(names: list[str], heavy: set[str]) -> dict[str, str]:
    """Return the heavy packages that a fresh interpreter has loaded after importing the names, and the name that loaded each."""
    command = [sys.executable, "-c", IMPORTER, json.dumps(names), json.dumps(sorted(heavy))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def importable(*rooms: str) -> list[str]:
    return [name.removesuffix(".__init__") for name in modules() if room_of(name) in rooms]


def test_light_rooms_load_neither_torch_nor_transformers() -> None:
    rooms = [name for name in importable(*NEVER_TORCH) if name != "octavo.engine.__main__"]
    assert "octavo.cli.main" in rooms
    assert dragged_in(["octavo", *rooms, "octavo.weights.sources.source"], {"torch", "transformers"}) == {}


def test_the_engine_side_runs_without_the_http_stack() -> None:
    rooms = importable(*(room for room in NEVER_TORCH if not room.startswith(("server", "cli"))))
    assert dragged_in(["octavo", *rooms], HTTP | {"torch", "transformers"}) == {}


def test_the_command_line_starts_with_almost_nothing() -> None:
    """`octavo --help` needs argparse and the config alone."""
    assert (
        dragged_in(["octavo.cli.main"], {"torch", "numpy", "msgspec", "zmq", "asyncio", "tokenizers", "tqdm"} | HTTP)
        == {}
    )


def test_the_heavy_import_check_can_fail() -> None:
    assert dragged_in(["json"], {"json"}) == {"json": "json"}
