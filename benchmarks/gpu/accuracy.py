"""What fp8 weights and fp8 KV pages do to the next token's distribution, teacher-forced, against the same engine without them.
It reads one thing inside the engine: the logits of every sampled position.

Each window of tokens is cut at several places. A cut is computed twice: up to the cut by prefill, and one token further
with everything before it found in the prefix cache, which is one token against stored pages: a decode."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import exactly
from octavo import LLM, config
from octavo.errors import ConfigError

CUTS = (64, 128, 192, 256)  # multiples of every usual page size
WINDOW = CUTS[-1] + 2
KV_BYTES = 2 * 2**30  # enough for the windows; several engines of this size leave room for the weights

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},  # how far bf16 itself is from float32, as a scale for the others
    "fp8 weights": {"quantization": "fp8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "fp8 weights and KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def run(options: dict[str, Any], num_windows: int, text_file: str, cuts: Sequence[int], results: Results) -> int:
    """Returns how many variants failed."""
    known = {name for section, _ in config.sections() for name in config.field_names(section)}
    options = {"kv_cache_memory_bytes": KV_BYTES, "dtype": "bfloat16"} | options
    if "enforce_eager" in known:  # a replayed graph does not call the hook that reads its logits
        options["enforce_eager"] = True
    windows: list[list[int]] = []
    reference, targets = _distributions(options, windows, num_windows, text_file, cuts)
    figures: dict[str, Any] = {}
    num_failed = 0
    for name, changes in VARIANTS.items():
        if missing := set(changes) - known:
            print(f"{name}: left out, this Octavo has no option {sorted(missing)[0]}")
            continue
        if options | changes == options:
            continue  # the reference itself
        try:
            logits, _ = _distributions(options | changes, windows, num_windows, text_file, cuts)
        except (ConfigError, RuntimeError) as error:
            print(f"{name}: failed, {error}")
            num_failed += 1
            continue
        if torch.equal(logits, reference):
            # An option without effect must not be reported as perfectly accurate.
            print(f"{name}: failed, not one logit differs: the option has no effect here")
            num_failed += 1
            continue
        figures[name] = compare(reference, logits, targets)
        results.put("accuracy", figures)
    rows = [[name, *_cells(figure)] for name, figure in figures.items()]
    print(
        f"\nagainst {options['dtype']}, {len(targets)} next tokens of {len(windows)} windows, half prefilled, half decoded"
    )
    print(table(("", "KL mean", "KL p99", "KL max", "same first choice", "NLL change"), rows))
    return num_failed


def compare(reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Both [N, V] logits in float32, targets [N]. KL is of the other from the reference, in nats."""
    divergences, changes, num_same = [], [], 0
    for at in range(0, len(targets), 32):  # a few rows at a time: a vocabulary of float64 is wide
        p, q = (logits[at : at + 32].double().log_softmax(-1) for logits in (reference, other))
        wanted = targets[at : at + 32]
        divergences.append((p.exp() * (p - q)).sum(-1))
        num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
        changes.append((p - q).gather(1, wanted[:, None]).squeeze(1))
    divergence = torch.cat(divergences)
    return {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "kl_max": float(divergence.max()),
        "same_first_choice": num_same / len(targets),
        "nll_change": float(torch.cat(changes).mean()),
    }


def _cells(figure: dict[str, float]) -> list[str]:
    divergences = [f"{figure[name]:.2e}" for name in ("kl_mean", "kl_p99", "kl_max")]
    return [*divergences, f"{figure['same_first_choice']:.1%}", f"{figure['nll_change']:+.4f}"]


def _distributions(
    options: dict[str, Any], windows: list[list[int]], num_windows: int, text_file: str, cuts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [N, V] of every cut of every window, and the tokens [N] that follow in the text. Fills `windows` if empty."""
    with LLM(**options) as llm:
        if not windows:
            windows += _windows(llm, num_windows, text_file)
        seen = _Logits(llm)
        rows, targets = [], []
        for cut in cuts:
            for end in (cut, cut + 1):
                outputs = llm.generate([window[:end] for window in windows], exactly(1), use_tqdm=False)
                if any(output.num_cached_tokens < end - 1 for output in outputs if end > cut):
                    raise RuntimeError("not a decode: prefix caching and a page size that divides 64 are needed")
                logits = seen.take()
                chosen = [output.outputs[0].token_ids[0] for output in outputs]
                _check(logits, chosen)
                rows.append(logits)
                targets += [window[end] for window in windows]
        del seen
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return torch.cat(rows), torch.tensor(targets)


def _windows(llm: LLM, num: int, text_file: str) -> list[list[int]]:
    if text_file:
        with open(text_file, encoding="utf-8") as file:
            ids = llm.text.encode(file.read(num * WINDOW * 16), add_special_tokens=False)
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][:num]
        if not windows:
            raise ConfigError(
                f"--text {text_file} has {len(ids)} tokens and a window takes {WINDOW}: give a longer one"
            )
        return windows
    generator = torch.Generator().manual_seed(0)
    lowest = min(1000, llm.report.vocab_size // 2)
    drawn = torch.randint(lowest, llm.report.vocab_size, (num, WINDOW), generator=generator)
    return [row.tolist() for row in drawn]


class _Logits:
    """Keeps the logits that the model's head returns, in the order of the sampled rows, which is that of the prompts."""

    def __init__(self, llm: LLM) -> None:
        self._taken: list[torch.Tensor] = []
        model = llm._loop.executor._runner.model  # type: ignore[attr-defined]
        head: Callable[..., torch.Tensor] = model.logits

        def looked_at(*arguments: Any, **named: Any) -> torch.Tensor:
            logits = head(*arguments, **named)
            self._taken.append(logits.detach().float().cpu())  # sampling may change the tensor afterwards
            return logits

        model.logits = looked_at

    def take(self) -> torch.Tensor:
        taken, self._taken = self._taken, []
        if not taken:
            raise RuntimeError("the engine sampled without asking the model for logits: run it without graphs")
        return torch.cat(taken)


def _check(logits: torch.Tensor, chosen: Sequence[int]) -> None:
    """Check that rows belong to their prompts: greedy sampling chose each row's largest logit."""
    if len(logits) != len(chosen):
        raise RuntimeError(f"{len(logits)} rows of logits were recorded for {len(chosen)} prompts")
    largest = logits.max(-1).values
    picked = logits.gather(1, torch.tensor(chosen)[:, None]).squeeze(1)
    if not torch.equal(largest, picked):
        raise RuntimeError("the recorded logits are not the ones the tokens were sampled from")
