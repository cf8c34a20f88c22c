"""What adapters cost on a GPU: decoding with 64 rows of an 8B model with random weights, beside the base, in turn in one process; many
registered adapters with a budget for a tenth of them; and what loading one adds to other requests' tokens. The last two on a CPU, too
(many), with the shape of SmolLM2 135M."""

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY |= {"head_dim": 16, "vocab_size": 500, "max_position_embeddings": 512}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
RANK = 16


def add_cpu_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=600, help="of the Zipf traffic")
    _add_zipf_options(parser)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--parts", default="stall,zipf", help="which to run")
    parser.add_argument(
        "--folder", default="", help="where adapters are written, 3.7 MB each; empty: a temporary folder"
    )
    parser.add_argument("--result", default="", help="a JSON file for the figures")
    parser.set_defaults(run=run, tiny=False, cpu=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000, help="of the Zipf traffic")
    _add_zipf_options(parser)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--parts", default="speed,stall,zipf", help="which to run")
    parser.add_argument(
        "--folder", default="", help="where adapters are written, 27 MB each; empty: a temporary folder"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU: tries the script, measures nothing")
    parser.add_argument("--result", default="", help="a JSON file for the figures")
    parser.set_defaults(run=run, cpu=False)


def _add_zipf_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--files",
        type=int,
        default=50,
        help="of weights of the registered adapters, which differ in their scale, too; 0: one for each",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=170,
        help="no further round of the Zipf traffic begins when it would end later; 0: all rounds",
    )


class Bench:
    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self.options, self.place = options, place
        self.is_small = options.tiny or options.cpu
        self.shape: dict[str, Any] = LLAMA_8B | (TINY if options.tiny else SMOLLM2 if options.cpu else {})
        self.model = place / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(self.shape))
        self.figures: dict[str, Any] = {}

    def engine(self, **more: Any) -> Any:
        from octavo import LLM

        common: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "auto" if self.options.cpu else "bfloat16",
            "device": "cpu" if self.is_small else "cuda",
            "quantization": self.options.quantization,
            "max_model_len": 512,
            "max_num_seqs": self.options.rows,
            "kv_cache_memory_bytes": 2**27 if self.is_small else 2**33,
            "speculative_config": {"method": "none"},
            "enable_prefix_caching": False,
        }
        return LLM(str(self.model), **(common | more))

    def shapes(self, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Out and in features by the name of the module."""
        hidden, inner, head = (self.shape[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
        q, kv = self.shape["num_attention_heads"] * head, self.shape["num_key_value_heads"] * head
        sizes = dict(
            zip(
                ALL,
                [
                    (q, hidden),
                    (kv, hidden),
                    (kv, hidden),
                    (hidden, q),
                    (inner, hidden),
                    (inner, hidden),
                    (hidden, inner),
                ],
                strict=True,
            )
        )
        layers = range(self.shape["num_hidden_layers"])
        return {f"model.layers.{layer}.{name}": sizes[name] for layer in layers for name in targets}

    def num_bytes(self, targets: tuple[str, ...], rank: int = RANK) -> int:
        """Of one adapter, in 16 bits."""
        return sum(2 * rank * sum(shape) for shape in self.shapes(targets).values())

    def adapters(
        self, name: str, count: int, targets: tuple[str, ...], rank: int = RANK, num_files: int = 0
    ) -> list[Any]:
        """Random ones. They differ in one matrix: that is enough to be different adapters. `num_files`: with weights of their own; others have a link to
        one of these files and another scale, so they are other adapters, too: each is read, hashed and held by itself. 0: all."""
        import torch
        from safetensors.torch import save_file

        from octavo import LoRARequest

        generator = torch.Generator().manual_seed(len(name))
        tensors = {}
        for module, (out_features, in_features) in self.shapes(targets).items():
            for side, size in (("A", (rank, in_features)), ("B", (out_features, rank))):
                numbers = torch.randn(size, generator=generator) * 0.01
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = numbers.to(torch.bfloat16)
        first = next(iter(tensors))
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": [one.rsplit(".")[-1] for one in targets],
        }
        found = []
        for number in range(count):
            folder = self.place / f"{name}{number}"
            folder.mkdir(parents=True)
            weights = "adapter_model.safetensors"
            (folder / "adapter_config.json").write_text(
                json.dumps(config | {"lora_alpha": rank * (1 + number / count)})
            )
            if num_files and number >= num_files:
                (folder / weights).hardlink_to(self.place / f"{name}{number % num_files}" / weights)
            else:
                tensors[first] = torch.randn(tensors[first].shape, generator=generator).to(torch.bfloat16) * 0.01
                save_file(tensors, folder / weights)
            found.append(LoRARequest(folder.name, 1, str(folder)))
        return found

    def say(self, text: str, **figures: Any) -> None:
        print(text, flush=True)
        self.figures |= figures


def params(length: int) -> Any:
    from octavo import SamplingParams

    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────


def speed(bench: Bench) -> None:
    """Tokens per second of all rows, with adapters and without, in turn."""
    options, rows = bench.options, bench.options.rows
    every = bench.adapters("all", 8, ALL)
    different = bench.adapters("qkvo", rows, ATTENTION)
    room = 2 * (8 * bench.num_bytes(ALL) + rows * bench.num_bytes(ATTENTION)) + 2**22
    prompts = [[5 + number, *range(10, 40)] for number in range(rows)]
    with bench.engine() as plain, bench.engine(enable_lora=True, lora_memory=room, max_lora_rank=RANK) as llm:

        def seconds(engine: Any, adapters: list[Any] | None) -> float:
            """Of a step that decodes: what a longer answer takes beyond a short one."""
            times = []
            for length in (8, options.tokens):
                started = time.perf_counter()
                engine.generate(prompts, params(length), use_tqdm=False, lora_request=adapters)
                times.append(time.perf_counter() - started)
            return (times[1] - times[0]) / (options.tokens - 8)

        eight = [every[number % 8] for number in range(rows)]
        cases: dict[str, tuple[Any, list[Any] | None, int]] = {
            "flag on, unused": (llm, None, 0),
            "8 adapters on all matrices": (llm, eight, 8 * bench.num_bytes(ALL)),
            f"{rows} adapters on q, k, v and o": (llm, different, rows * bench.num_bytes(ATTENTION)),
        }
        for engine, adapters in [(plain, None), *((engine, adapters) for engine, adapters, _ in cases.values())]:
            seconds(engine, adapters)  # loads, compiles and captures
        bench.say(f"{llm.report.device}: {rows} rows, weights {llm.report.weights_bytes / 2**30:.2f} GiB, rank {RANK}")
        for name, (engine, adapters, added) in cases.items():
            pairs = [(seconds(plain, None), seconds(engine, adapters)) for _ in range(options.rounds)]
            ratio = statistics.median(base / mine for base, mine in pairs)
            step = statistics.median(base for base, _ in pairs)
            limit = plain.report.weights_bytes / (plain.report.weights_bytes + added)
            mine = statistics.median(mine for _, mine in pairs)
            bench.say(
                f"{name}: {ratio:.1%} of the base's tokens/s ({1e3 * step:.3f} → {1e3 * mine:.3f} ms a step); by the bytes that are read "
                f"beside the weights, at most {limit:.1%}",
                **{name: {"ratio": ratio, "pairs": pairs, "limit": limit}},
            )


# ── loading beside other requests ───────────────────────────────────────────────────────────────────


def stall(bench: Bench) -> None:
    """What loading an adapter of about 40 MB adds to the time between two tokens of requests that run."""
    rank = 176 if bench.options.cpu else 24
    new = bench.adapters("new", 6, ATTENTION, rank)
    rows = min(32, bench.options.rows)
    room = 20 * bench.num_bytes(ATTENTION, rank) + 2**22
    with bench.engine(enable_lora=True, lora_memory=room, max_lora_rank=256) as llm:
        prompts = [[5 + number, *range(10, 40)] for number in range(rows)]
        llm.generate(prompts, params(40), use_tqdm=False)
        llm.generate(prompts[:1], params(4), use_tqdm=False, lora_request=new[0])
        quiet, busy = [], []
        for adapter in new[1:]:
            gaps = list(_gaps(llm, prompts, adapter))
            quiet += [gap for gap, is_loading in gaps if not is_loading]
            busy += [gap for gap, is_loading in gaps if is_loading]
    usual, worst_usual = statistics.median(quiet), max(quiet)
    bench.say(
        f"loading {bench.num_bytes(ATTENTION, rank) / 1e6:.0f} MB beside {rows} rows: between tokens {1e3 * usual:.2f} ms (at most "
        f"{1e3 * worst_usual:.2f}) without, {1e3 * statistics.median(busy):.2f} ms (at most {1e3 * max(busy):.2f}) while it loads, which "
        f"adds at most {1e3 * (max(busy) - usual):.2f} ms; {len(busy)} steps beside {len(new) - 1} loads",
        stall={"quiet": usual, "worst_quiet": worst_usual, "busy": statistics.median(busy), "worst_busy": max(busy)},
    )


def _gaps(llm: Any, prompts: list[list[int]], adapter: Any) -> Iterator[tuple[float, bool]]:
    """Seconds between steps of requests without an adapter, and whether one was being loaded meanwhile."""
    from octavo.offline.prompts import read_prompt

    traffic, box = llm._loop.adapters, []
    requests = [llm._requests.request(read_prompt(prompt), params(300), 0) for prompt in prompts]
    (wanted,) = llm._adapted([llm._requests.request(read_prompt(prompts[0]), params(1), 0)], adapter)
    for request in requests:
        llm._submit(request, box)
    state = {"is_loading": False}
    num_ended, num_steps, before = 0, 0, 0.0
    while num_ended < len(requests):
        if num_steps == 30:
            state["is_loading"] = True
            traffic.load(wanted.adapter, lambda why: state.update(is_loading=False, why=why))
        was_loading = state["is_loading"]
        num_ended += sum(delta.finish is not None for delta in llm._next(box))
        now = time.perf_counter()
        if num_steps > 10:
            yield now - before, was_loading
        before, num_steps = now, num_steps + 1
    assert not state.get("why"), state


# ── many registered ─────────────────────────────────────────────────────────────────────────────────


def zipf(bench: Bench) -> None:
    """Zipf traffic with s = 1 over all registered adapters, with a budget for a tenth of them, beside one for all."""
    options, began = bench.options, time.perf_counter()
    registered = bench.adapters("registered", options.registered, ATTENTION, num_files=options.files)
    num_files = min(len(registered), options.files or len(registered))
    bench.say(
        f"{len(registered)} adapters of {bench.num_bytes(ATTENTION) / 1e6:.1f} MB, with {num_files} files of weights, and a scale for each, "
        f"written in {time.perf_counter() - began:.1f} s"
    )
    rng = random.Random(1)
    weights = [1 / (number + 1) for number in range(len(registered))]
    chosen = rng.choices(registered, weights, k=options.requests)
    prompts = [[rng.randrange(100, 400) for _ in range(24)] for _ in chosen]
    one = bench.num_bytes(ATTENTION) * 21 // 20 + 2**13
    budgets = {"all": len(registered) * one + 2**22, "a tenth": max(1, len(registered) // 10) * one}
    if not options.tiny:
        budgets["a tenth"] += 2**20
    engine: Callable[[int], Any] = lambda room: bench.engine(enable_lora=True, lora_memory=room, max_lora_rank=RANK)  # noqa: E731
    with engine(budgets["all"]) as resident, engine(budgets["a tenth"]) as limited:
        bench.say(f"both engines are ready {time.perf_counter() - began:.1f} s after the beginning")
        started = time.perf_counter()
        resident.generate([[7, 8, 9]] * len(registered), params(1), use_tqdm=False, lora_request=registered)
        bench.say(
            f"all-resident: {_loads(_stats(resident), {})} in {time.perf_counter() - started:.1f} s",
            loads_of_all=_stats(resident),
        )

        def rate(llm: Any, length: int = 64) -> float:
            started = time.perf_counter()
            llm.generate(prompts, params(length), use_tqdm=False, lora_request=chosen)
            return length * len(prompts) / (time.perf_counter() - started)

        for llm in (resident, limited):
            rate(llm, 8)
        bench.say(f"a budget for {max(1, len(registered) // 10)}, cold: {_loads(_stats(limited), {})}")
        before, pairs, seconds = _stats(limited), list[tuple[float, float]](), 0.0
        while len(pairs) < options.rounds:
            started = time.perf_counter()
            if pairs and options.seconds and started - began + seconds > options.seconds:
                break
            pairs.append((rate(resident), rate(limited)))
            seconds = time.perf_counter() - started
        after = _stats(limited)
    ratio = statistics.median(mine / base for base, mine in pairs)
    bench.say(
        f"Zipf traffic over {len(registered)}, a budget for {max(1, len(registered) // 10)}: {ratio:.1%} of all-resident "
        f"({statistics.median(base for base, _ in pairs):,.0f} → {statistics.median(mine for _, mine in pairs):,.0f} tokens/s, {len(pairs)} "
        f"rounds of {len(prompts)} requests); {_loads(after, before)}; all in {time.perf_counter() - began:.0f} s",
        zipf={"ratio": ratio, "pairs": pairs, "before": before, "after": after},
    )


def _stats(llm: Any) -> dict[str, float]:
    return dataclasses.asdict(llm._loop.adapters.stats)


def _loads(after: dict[str, float], before: dict[str, float]) -> str:
    """What was loaded meanwhile, in words."""
    found = {name: value - before.get(name, 0) for name, value in after.items()}
    assert not found["failures"], found
    return (
        f"{found['loads']:.0f} loads of {1e3 * found['load_seconds'] / max(1, found['loads']):.1f} ms with their wait for earlier ones, "
        f"{found['dropped']:.0f} evicted; {found['waits']:.0f} requests were held "
        f"{1e3 * found['wait_seconds'] / max(1, found['waits']):.1f} ms on average"
    )


PARTS = {"speed": speed, "stall": stall, "zipf": zipf}


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=options.folder or None) as place:
        bench = Bench(options, Path(place))
        for part in options.parts.split(","):
            PARTS[part](bench)
    if options.result:
        Path(options.result).write_text(json.dumps(bench.figures, indent=1))
    return 0
