"""Octavo beside llama.cpp's server with the same GGUF adapters, on a CPU: tokens per second with and without them, in turn in one run."""

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.adapters.speed import ALL, ATTENTION, RANK, write
from benchmarks.cpu.loads import MODEL_NAME
from benchmarks.cpu.servers import PORT, Running, Server, started
from octavo.errors import ConfigError

CLIENTS = 8
PROMPT_TOKENS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llama-server", default="", help="the program; empty: the one on the PATH")
    parser.add_argument("--model", default="", help="a GGUF file of a Llama; empty: the embedded SmolLM2")
    parser.add_argument(
        "--adapter", default="", help="a PEFT folder; empty: random ones of rank 16, on q and v and on all seven"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from octavo.weights.sources.source import resolve

    program = shutil.which(options.llama_server or "llama-server")
    if program is None:
        raise ConfigError(f"--llama-server {options.llama_server or '(empty)'}: there is no such program")
    source = resolve(options.model)
    if source.kind != "gguf":
        raise ConfigError(f"--model {source.path}: llama.cpp reads GGUF files only")
    with tempfile.TemporaryDirectory() as place:
        base = Base.of(source.path)
        files = adapter_files(base, options.adapter, Path(place))
        with started(_octavo(source.path, files)) as ours, started(_llama(program, source.path, files)) as theirs:
            sides = {"octavo": Side(ours, False, files), "llama.cpp": Side(theirs, True, files)}
            for side in sides.values():
                side.check()
            return measure(sides, cases(files), options)


def cases(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """What each client of a load asks for: the name of an adapter, or "" for the base."""
    found = {"c1 base": [""], f"c{CLIENTS} base": [""] * CLIENTS}
    for kind in dict.fromkeys(name.rsplit("-", 1)[0] for name in files):
        of_kind = [name for name in files if name.rsplit("-", 1)[0] == kind]
        found[f"c1 {kind}"] = of_kind[:1]
        found[f"c{CLIENTS} {kind}, one adapter"] = of_kind[:1] * CLIENTS
        if len(of_kind) == CLIENTS:
            found[f"c{CLIENTS} {kind}, {CLIENTS} adapters"] = of_kind
    return found


def measure(sides: Mapping[str, "Side"], loads: Mapping[str, list[str]], options: argparse.Namespace) -> int:
    rates: dict[tuple[str, str], list[float]] = {(load, side): [] for load in loads for side in sides}
    rng = random.Random(1)
    for number in range(options.rounds + 1):  # the first one pays for what is done once
        for load, adapters in loads.items():
            prompts = [[rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)] for _ in adapters]
            for name, side in sides.items():
                rate = side.rate(prompts, adapters, options.tokens if number else 4)
                if number:
                    rates[load, name].append(rate)
    print(
        f"tokens/s, {PROMPT_TOKENS} tokens in, {options.tokens} out, medians of {options.rounds}; of the base: in the same round"
    )
    for load in loads:
        base = f"{load.split()[0]} base"
        line = f"{load}:"
        for name in sides:
            of_base = statistics.median(a / b for a, b in zip(rates[load, name], rates[base, name], strict=True))
            line += f"  {name} {statistics.median(rates[load, name]):,.0f} ({of_base:.1%} of its base)"
        mine, other = (rates[load, name] for name in sides)
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        print(f"{line}  {ratio:.2f} ×")
    return 0


class Side:
    """One server, asked by llama.cpp's own route, which both have."""

    def __init__(self, server: Running, is_llama: bool, files: Mapping[str, Path]) -> None:
        self._host = urlsplit(server.url).netloc
        self._is_llama, self._names = is_llama, list(files)
        self._clients = ThreadPoolExecutor(CLIENTS)

    def rate(self, prompts: list[list[int]], adapters: list[str], num_tokens: int) -> float:
        """Tokens per second of all clients, from the first request to the last answer."""
        began = time.perf_counter()
        answers = list(self._clients.map(self._ask, prompts, adapters, [num_tokens] * len(prompts)))
        seconds = time.perf_counter() - began
        assert all(answer["tokens_predicted"] == num_tokens for answer in answers), "an answer ended early"
        return num_tokens * len(prompts) / seconds

    def check(self) -> None:
        """Each adapter must change what the model says: a server that ignores it would be fast."""
        prompt = list(range(100, 100 + PROMPT_TOKENS))
        plain = self._ask(prompt, "", 24)["content"]
        for name in self._names:
            if self._ask(prompt, name, 24)["content"] == plain:
                raise ConfigError(
                    f"{'llama.cpp' if self._is_llama else 'octavo'} answers the same with {name} as without"
                )

    def _ask(self, prompt: list[int], adapter: str, num_tokens: int) -> Any:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
        if self._is_llama:
            body["lora"] = [{"id": at, "scale": float(name == adapter)} for at, name in enumerate(self._names)]
        else:
            body["model"] = adapter or MODEL_NAME
        connection = http.client.HTTPConnection(self._host, timeout=600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ConfigError(f"{self._host} answered {response.status}: {text[:300].decode(errors='replace')}")
        return json.loads(text)


def _octavo(model: Path, files: Mapping[str, Path]) -> Server:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", PORT]
    command += ["--served-model-name", MODEL_NAME, "--max-model-len", "512"]
    command += ["--speculative-config", '{"method": "none"}']  # llama.cpp drafts nothing by default
    command += ["--enable-lora", "--lora-modules", *(f"{name}={file}" for name, file in files.items())]
    return Server("octavo", tuple(command), is_peer=False)


def _llama(program: str, model: Path, files: Mapping[str, Path]) -> Server:
    threads = str(len(os.sched_getaffinity(0)))
    command = [program, "--model", str(model), "--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", PORT]
    command += ["--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(CLIENTS), "--ctx-size", str(CLIENTS * 512)]
    command += ["--lora", ",".join(map(str, files.values())), "--lora-init-without-apply"]
    return Server("llama.cpp", tuple(command))


# ── GGUF adapters ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Base:
    """The matrices of a model's file."""

    head_size: int
    names: dict[str, str]  # of a module, as PEFT has it → of its tensor in GGUF files
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> Self:
        from octavo.gguf import GGUFFile
        from octavo.models import llama

        file = GGUFFile(path)
        if file.metadata.get("general.architecture") != "llama":
            raise ConfigError(f"--model {path}: only files of the llama architecture")
        names = {(llama.gguf_name(name) or "").removesuffix(".weight"): name for name in file.tensors}
        names = {module: name for module, name in names.items() if module.rsplit(".", 1)[-1] in ALL}
        shapes = {module: file.tensors[name].shape for module, name in names.items()}
        return cls(llama.spec(llama.gguf_config(file.metadata, file.tensors)).head_size, names, shapes)


def adapter_files(base: Base, given: str, place: Path) -> dict[str, Path]:
    """The adapters as GGUF files, by their names: a kind and a number."""
    folders = {}
    if given:
        folders[f"{Path(given).name}-0"] = Path(given)
    else:
        for kind, targets in (("qv", ATTENTION), ("all", ALL)):
            for number in range(CLIENTS):
                name = f"{kind}-{number}"
                folders[name] = write(place / name, base.shapes, targets, number, alpha=256 * RANK)
    return {name: write_gguf(folder, base, place / f"{name}.gguf") for name, folder in folders.items()}


def write_gguf(folder: Path, base: Base, file: Path) -> Path:
    """Write a PEFT folder as a GGUF adapter in float16, as llama.cpp's convert_lora_to_gguf.py does with `--outtype f16`."""
    import gguf
    import torch

    from octavo.layers.rope import interleave
    from octavo.weights.adapters.adapter_file import open_adapter

    adapter = open_adapter(folder)
    alphas = {pair.scale * pair.rank for pair in adapter.pairs.values()}
    if len(alphas) != 1:
        raise ConfigError(f"{folder} has several scales, and a GGUF file has one")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alphas.pop())
    for module in adapter.pairs:
        down, up = adapter.matrices(module)
        if module.rsplit(".", 1)[-1] in ("q_proj", "k_proj"):  # rows in the order of llama.cpp's rotary kernel
            up = interleave(up, base.head_size)
        for side, matrix in (("a", down), ("b", up)):
            writer.add_tensor(f"{base.names[module]}.lora_{side}", matrix.to(torch.float16).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
