"""What adapters cost on a CPU: decoding with 8 and with 1 client, beside the base, in turn in one process."""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="empty: the embedded SmolLM2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from octavo import LLM, LoRARequest, SamplingParams

    common = {
        "dtype": options.dtype,
        "quantization": options.quantization,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 2**28,
        "speculative_config": {"method": "none"},
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as place, LLM(options.model, **common) as plain:  # noqa: SIM117
        with LLM(options.model, enable_lora=True, lora_memory=2**30, **common) as llm:
            shapes = shapes_of(llm)
            few = [write(Path(place) / f"qv{number}", shapes, ATTENTION, number) for number in range(8)]
            every = [write(Path(place) / f"all{number}", shapes, ALL, number) for number in range(8)]
            prompts = [[5 + number, *range(10, 40)] for number in range(8)]
            params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)

            def timed(engine: LLM, clients: int, adapters: list[Path]) -> Callable[[], float]:
                given = [LoRARequest(path.name, 1, str(path)) for path in adapters[:clients]] or None

                def once() -> float:
                    # Decoding alone: what a second answer of twice the length takes beyond the first.
                    seconds = []
                    for length in (1, options.tokens):
                        wanted = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                        started = time.perf_counter()
                        engine.generate(prompts[:clients], wanted, use_tqdm=False, lora_request=given)
                        seconds.append(time.perf_counter() - started)
                    return (seconds[1] - seconds[0]) / (options.tokens - 1)

                engine.generate(prompts[:clients], params, use_tqdm=False, lora_request=given)  # loads them
                return once

            cases: dict[str, tuple[Callable[[], float], Callable[[], float], float | None]] = {}
            for clients in (1, 8):
                base = timed(llm, clients, [])
                cases[f"c{clients} unused"] = (timed(plain, clients, []), base, None)
                for name, adapters, targets in (("q and v", few, ATTENTION), ("all seven", every, ALL)):
                    limit = 1 + clients * num_added(shapes, targets) * 4 / llm.report.weights_bytes
                    cases[f"c{clients} {name}"] = (base, timed(llm, clients, adapters), limit)
            ratios: dict[str, list[float]] = {name: [] for name in cases}
            times: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(options.rounds):
                for name, (before, after, _limit) in cases.items():
                    pairs = [(before(), after()) for _ in range(3)]
                    ratios[name].append(statistics.median(b / a for a, b in pairs))
                    times[name].append(statistics.median(b for _, b in pairs))
            print(
                f"{llm.report.device}, {llm.report.dtype}, weights {llm.report.weights_bytes / 2**20:.0f} MiB, adapters in float32 or bfloat16"
            )
            for name, found in ratios.items():
                limit = cases[name][2]
                bytes_limit = "" if limit is None else f"; by bytes in float32 at most {limit - 1:.1%} more to read"
                print(
                    f"{name}: {statistics.median(found) - 1:+.1%} a token ({1e3 * statistics.median(times[name]):.2f} ms){bytes_limit}"
                )
    return 0


def shapes_of(llm: Any) -> dict[str, tuple[int, ...]]:
    return {name: target.shape for name, target in llm._loop.executor._runner.adapters.targets.items()}


def num_added(shapes: dict[str, tuple[int, ...]], targets: tuple[str, ...]) -> int:
    """Numbers of one adapter."""
    return sum(RANK * sum(shape) for name, shape in shapes.items() if name.rsplit(".", 1)[-1] in targets)


def write(
    folder: Path, shapes: dict[str, tuple[int, ...]], targets: tuple[str, ...], seed: int, alpha: float = RANK
) -> Path:
    """A random adapter. With the default `alpha`, answers stay sane."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_features, in_features) in shapes.items():
        if name.rsplit(".", 1)[-1] in targets:
            down = torch.randn(RANK, in_features, generator=generator) * (0.1 / math.sqrt(in_features))
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(out_features, RANK, generator=generator) * 0.02
            )
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
