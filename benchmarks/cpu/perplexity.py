"""The accuracy that packed weights cost: the loss on a fixed text, of Octavo in each of its forms and of llama.cpp.
It reads one thing inside the engine: the hidden states of a whole prompt.

text.txt is chapter 54 of Moby-Dick (Herman Melville, 1851; public domain), cut into windows that are scored separately."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import peers
from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import exactly
from octavo import LLM, config
from octavo.errors import ConfigError
from octavo.text import load_text

WINDOW = 512
TEXT = Path(__file__).with_name("text.txt")
REFERENCE = "float32"
PACKED = "as in the file"
LLAMA = "llama.cpp, the same file"
INT8_MUST = 0.01  # relative perplexity above float32's, at most
PACKED_MUST = 0.005  # relative loss above llama.cpp's for the same file, at most
_KV_BYTES = 256 * 2**20
_ROWS_AT_ONCE = 64  # bounds the float64 logits, one vocabulary per row

VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    PACKED: {},
    "int8 KV pages": {"kv_cache_dtype": "int8"},
    "--quantization int8": {"quantization": "int8"},
    "--quantization int4": {"quantization": "int4"},
}


def run(given: peers.Setting, max_windows: int | None, results: Results) -> int:
    """Returns how many variants failed."""
    windows = cut(given.source.path)[:max_windows]
    num_scored = sum(len(window) - 1 for window in windows)
    losses: dict[str, float] = {}
    num_failed = 0
    for name, measure in _measures(given, windows).items():
        try:
            losses[name] = sum(measure()) / num_scored
        except peers.Skipped as reason:
            print(f"{name}: skipped, {reason}")
        except (ConfigError, RuntimeError) as error:
            print(f"{name}: failed, {error}")
            num_failed += 1
        else:
            print(f"{name}: loss {losses[name]:.4f}", flush=True)
        results.put("perplexity", {"windows": len(windows), "scored": num_scored, "losses": losses})
    if PACKED in losses and losses[PACKED] == losses.get(REFERENCE):
        print(f"{PACKED}: not one bit of the loss differs from {REFERENCE}: nothing packed was computed here")
    print(f"\n{num_scored:,} tokens of {len(windows)} windows of {len(windows[0])}\n{show(losses)}")
    return num_failed


def cut(model: Path) -> list[list[int]]:
    """Return the text's tokens in whole windows; each begins as a prompt of the model does."""
    text = load_text(model)
    first = text.encode("", add_special_tokens=True)
    ids = text.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    step = WINDOW - len(first)
    return [[*first, *ids[at : at + step]] for at in range(0, len(ids) - step + 1, step)]


def _measures(given: peers.Setting, windows: Sequence[list[int]]) -> dict[str, Callable[[], list[float]]]:
    """Name → function that returns the summed losses of the windows."""
    measures: dict[str, Callable[[], list[float]]] = {}
    for name, options in VARIANTS.items():
        measures[name] = lambda options=options: octavo_losses(given, options, windows)
    measures[LLAMA] = lambda: _llama_losses(given, "", windows)
    measures["llama.cpp, f32"] = lambda: _llama_losses(given, "f32", windows)
    return measures


def octavo_losses(given: peers.Setting, options: dict[str, Any], windows: Sequence[list[int]]) -> list[float]:
    if missing := _unknown(options):
        raise peers.Skipped(f"this Octavo has no {missing}")
    # Quantising while loading needs weights that are not packed yet.
    model = peers.folder_of(given) if "quantization" in options else given.source.path
    with (
        LLM(
            str(model),
            max_num_seqs=1,
            max_num_batched_tokens=WINDOW,
            kv_cache_memory_bytes=_KV_BYTES,
            enable_prefix_caching=False,
            enforce_eager=True,  # a step that runs in one call returns only its last logits
            **options,
        ) as llm,
        torch.inference_mode(),
    ):
        hidden = _Hidden(llm)
        return [hidden.loss(window) for window in windows]


def _unknown(options: dict[str, Any]) -> str:
    """Return the first option that the configuration lacks, or whose value is not among its choices."""
    for name, value in options.items():
        fields = [f for _, section in config.sections() for f in dataclasses.fields(section) if f.name == name]
        if not fields or (fields[0].metadata["choices"] and value not in fields[0].metadata["choices"]):
            return f"--{name.replace('_', '-')} {value}"
    return ""


class _Hidden:
    """Keeps the last hidden state of every token of a prompt; the engine itself passes only the last token's to the head."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._taken: list[torch.Tensor] = []
        self._model = llm._loop.executor._runner.model  # type: ignore[attr-defined]
        forward = self._model.forward

        def looked_at(batch: Any, before: torch.Tensor | None = None) -> torch.Tensor:
            hidden: torch.Tensor = forward(batch, before)
            self._taken.append(hidden.clone())  # later operations may overwrite it
            return hidden

        self._model.forward = looked_at

    def loss(self, window: Sequence[int]) -> float:
        """Return the sum of -log p over all tokens but the first."""
        self._taken.clear()
        (output,) = self._llm.generate([list(window)], exactly(1), use_tqdm=False)
        if sum(map(len, self._taken)) != len(window):
            raise RuntimeError("the engine computed a prompt without returning all of its hidden states")
        hidden = torch.cat(self._taken)  # [T, hidden]
        total = 0.0
        for at in range(0, len(window), _ROWS_AT_ONCE):
            logits = self._model.logits(hidden[at : at + _ROWS_AT_ONCE]).float()
            targets = torch.tensor(window[at + 1 : at + 1 + len(logits)])
            scores = logits[: len(targets)].double().log_softmax(-1)
            total -= float(scores.gather(1, targets[:, None]).sum())
        if int(logits[-1].argmax()) != output.outputs[0].token_ids[0]:
            raise RuntimeError("the recorded hidden states are not the ones the answer was sampled from")
        return total


def _llama_losses(given: peers.Setting, kind: str, windows: Sequence[list[int]]) -> list[float]:
    if not given.llama_python:
        raise peers.Skipped("llama-cpp-python is not installed (--llama-python)")
    if given.source.kind != "gguf":
        raise peers.Skipped(f"{given.source.path} is not a GGUF file")
    file = peers.llama_file(kind, given) if kind else given.source.path
    found: list[float] = peers.ask_llama(
        given.llama_python, "losses", str(file), given.threads, stdin=json.dumps(list(windows))
    )
    return found


def show(losses: dict[str, float]) -> str:
    rows = []
    for name, loss in losses.items():
        against = [losses.get(other) if other != name else None for other in (REFERENCE, LLAMA)]
        verdict = ""
        if name == "--quantization int8" and against[0] is not None:
            verdict = _verdict(math.exp(loss - against[0]) - 1, INT8_MUST, "perplexity above float32's")
        if name == PACKED and against[1] is not None:
            verdict = _verdict(loss / against[1] - 1, PACKED_MUST, "loss above llama.cpp's")
        changes = ["–" if other is None else f"{math.exp(loss - other) - 1:+.2%}" for other in against]
        rows.append([name, f"{loss:.4f}", f"{math.exp(loss):.3f}", *changes, verdict])
    titles = ("", "loss", "perplexity", "perplexity against float32", "against llama.cpp's", "must")
    return table(titles, rows)


def _verdict(change: float, most: float, what: str) -> str:
    return f"{what} ≤ {most:.1%}: {change:+.2%} {'✓' if change <= most else '✗'}"
