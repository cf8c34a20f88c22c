"""What drafts gain and cost on a GPU, with random weights and an acceptance by a made-up rule (made_up.py)."""

import argparse
import gc
import json
import random
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import MODELS, NO_DRAFTS
from benchmarks.speculation.made_up import ToldSpeculation, often_wrong, repeating
from octavo import LLM, SamplingParams
from octavo.messages.speculation import SpeculationSettings
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule.drafts.base import Speculation
from octavo.schedule.results import Committed
from octavo.worker.rows import NO_CHANGES

PARTS = ("verify", "one", "many", "nothing", "model")
NUM_DRAFTED = 5
ACCEPTANCE = 0.8
ACCEPTANCES = (0.0, 0.5, 0.9)
PROMPT_LEN = 128
BURST = 12  # replays without waiting: fewer than the input slots of captured steps

MUST_GAIN, MUST_BUSY, MUST_VERIFY, MUST_IDLE, MUST_NOTHING = 2.6, 0.99, 1.15, 0.03, 0.005


class Run(NamedTuple):
    tokens: list[list[int]]
    seconds: float
    drafted: int
    accepted: int
    steps: int
    capturing: float  # seconds of them in which steps were captured

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def step_seconds(self) -> float:
        return (self.seconds - self.capturing) / self.steps


class Steps(StepObserver):
    """When steps ended, and their tokens."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.sizes: list[int] = []

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self.ended.append(times.now)
        self.sizes.append(committed.num_tokens)

    def between(self, size: int) -> float:
        """The median time from one step's end to the next one's, where both have so many tokens."""
        gaps = [
            later - earlier
            for earlier, later, before, now in zip(self.ended, self.ended[1:], self.sizes, self.sizes[1:], strict=False)
            if before == now == size
        ]
        return statistics.median(gaps) if gaps else float("nan")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b", help="of benchmarks/models, or a folder")
    parser.add_argument("--draft-model", default="qwen3-0.6b", help="shape of the draft model; empty: none")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--pairs", type=int, default=10, help="of runs where nothing can be drafted")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no further part is begun")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--result", default="", help="file to write all figures to")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    results = Results(options.result or None)
    print(
        "Random weights: acceptance is by a made-up rule of this benchmark. Layers are scaled down so that the model repeats its last token; "
        "each position of an answer is drafted right with the probability that is given, and otherwise wrong.",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, repeating():
        subject = Subject(options, Path(folder))
    print(f"start: {time.perf_counter() - began:.1f} s; {subject.llm.report.device}", flush=True)
    failed = 0
    for part in options.parts.split(","):
        if time.perf_counter() - began > options.seconds:
            print(f"{part}: left out, because {options.seconds:.0f} s are over")
            continue
        started = time.perf_counter()
        try:
            results.put(part, getattr(subject, part)())
        except Exception:
            failed += 1
            traceback.print_exc()
        print(f"({part}: {time.perf_counter() - started:.1f} s)", flush=True)
    print()
    print(table(("what", "measured", "must"), [[line.what, line.measured, line.must] for line in subject.lines]))
    print(f"{subject.num_same} of {subject.num_compared} answers with drafts are equal to those without")
    return failed


class Line(NamedTuple):
    what: str
    measured: str
    must: str = ""


def _mark(is_met: bool, must: str) -> str:
    return f"{must} {'✓' if is_met else '✗'}"


class Subject:
    """One engine with a draft model beside it, for all parts: where it is not asked for, it is taken out."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        path = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
        config = NO_DRAFTS
        if options.draft_model:
            model = _of_one_vocabulary(options.draft_model, path, folder)
            config = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": NUM_DRAFTED})
        self.llm = LLM(
            str(path),
            load_format="dummy",
            speculative_config=config,
            device=options.device,
            deterministic=options.deterministic,
            max_model_len=2 * (PROMPT_LEN + options.tokens),
            max_num_seqs=2 * options.rows,
        )
        self.loop = self.llm._loop
        self.scheduler = self.loop.scheduler
        self.runner = self.loop.executor._runner
        self.metrics = next(each for each in self.loop.observers if isinstance(each, EngineMetrics))
        self.draft, self.by_model = self.runner.draft, self.scheduler.speculation
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.lines: list[Line] = []
        self.num_same = self.num_compared = 0
        self.runner.draft = None
        # As the engine process does before its first step.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)

    # ── runs ──

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        """Each ends in another token, which the model will repeat."""
        rng, size = random.Random(seed), min(30_000, self.llm.report.vocab_size)
        return [[rng.randrange(size // 2, size) for _ in range(PROMPT_LEN)] for _ in range(count)]

    def generate(self, prompts: Sequence[list[int]], speculation: Speculation | None, num_tokens: int = 0) -> Run:
        """Answers with what decides about drafts; None: there are none."""
        self.scheduler.speculation = speculation
        graphs, metrics = self.runner.graphs, self.metrics
        before = (metrics.draft_tokens, metrics.accepted_tokens, self.scheduler.num_steps)
        captured = getattr(graphs, "seconds_capturing", 0.0)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens or self.options.tokens, ignore_eos=True)
        gc.collect()  # between two runs: a collection of everything takes 0.1 s
        started = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        seconds = time.perf_counter() - started
        after = (metrics.draft_tokens, metrics.accepted_tokens, self.scheduler.num_steps)
        tokens = [output.outputs[0].token_ids for output in outputs]
        captured = getattr(graphs, "seconds_capturing", 0.0) - captured
        done = Run(tokens, seconds, *(late - early for early, late in zip(before, after, strict=True)), captured)
        for prompt, answer in zip(prompts, tokens, strict=True):
            known = self.known.setdefault(tuple(prompt), [*prompt, *answer])
            if speculation is not None:
                self.num_compared += 1
                self.num_same += known[len(prompt) :][: len(answer)] == answer
        return done

    def told(self, chance: float, most: int = 8, is_adaptive: bool = True, has_drafts: bool = True) -> Speculation:
        """N-gram drafts by the rule."""
        settings = SpeculationSettings("ngram", most, is_adaptive=is_adaptive)
        return ToldSpeculation(settings, lambda prompt: self.known[tuple(prompt)] if has_drafts else None, chance)

    @contextmanager
    def steps(self) -> Iterator[Steps]:
        steps = Steps()
        self.loop.observers.add(steps)
        yield steps
        self.loop.observers.remove(steps)

    def replay_seconds(self, graphs: Any, num_tokens: int, context: int) -> float:
        """Return the seconds of a captured step for the last tokens of one row, without the engine: the median over bursts of replays. Its pages hold
        no request, so what it writes there is never read."""
        rows, lens = [0] * num_tokens, range(context - num_tokens + 1, context + 1)
        self.llm.reset_prefix_cache()

        def burst() -> float:
            self.runner.device.synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                for _ in range(BURST):
                    graphs.run(rows, lens, NO_CHANGES, 0, is_greedy=True)
            self.runner.device.synchronize()
            return (time.perf_counter() - started) / BURST

        burst()
        return statistics.median(burst() for _ in range(5))

    @property
    def context(self) -> int:
        return PROMPT_LEN + self.options.tokens // 2

    # ── parts ──

    def verify(self) -> dict[str, Any]:
        """What a step costs that verifies k drafted tokens of one row."""
        [prompt] = self.prompts(1)
        plain = self.generate([prompt], None)
        found: dict[str, Any] = {}
        first_replay = first_step = 0.0
        for most in range(NUM_DRAFTED + 1):
            size = most + 1
            with self.steps() as steps:
                speculation = self.told(0.0, most, is_adaptive=False) if most else None
                self.generate([prompt], speculation, min(64, self.options.tokens))
            replay = self.replay_seconds(self.runner.graphs, size, self.context) if self.runner.graphs else 0.0
            step = steps.between(size)
            first_replay, first_step = first_replay or replay, first_step or step
            found[str(most)] = {"replay_ms": replay * 1e3, "step_ms": step * 1e3}
            ratio = replay / first_replay if first_replay else step / first_step
            self.lines.append(
                Line(
                    f"one row, {most} drafted: graph alone | step through the engine",
                    f"{replay * 1e3:.3f} ms, {ratio:.3f} × | {step * 1e3:.3f} ms, {step / first_step:.3f} ×",
                    _mark(ratio <= MUST_VERIFY, f"≤ {MUST_VERIFY} ×") if most else "",
                )
            )
        found["plain_tokens_per_s"] = plain.num_tokens / plain.seconds
        return found

    def one(self) -> dict[str, Any]:
        """Tokens per second of one stream, with drafts and without, in turn."""
        prompts = self.prompts(self.options.rounds + 1)
        sides: dict[str, Callable[[], Speculation | None]] = {
            "none": lambda: None,
            f"k = {NUM_DRAFTED}": lambda: self.told(ACCEPTANCE, NUM_DRAFTED, is_adaptive=False),
            "by cost": lambda: self.told(ACCEPTANCE),
        }
        runs = self._in_turn(sides, [[prompt] for prompt in prompts])
        found = self._rates(runs, f"one stream, acceptance {ACCEPTANCE}", MUST_GAIN)
        with self.steps() as steps:
            drafted = self.generate([prompts[0]], self.told(ACCEPTANCE, NUM_DRAFTED, is_adaptive=False))
        step = steps.between(NUM_DRAFTED + 1)
        if self.runner.graphs is not None:
            replay = self.replay_seconds(self.runner.graphs, NUM_DRAFTED + 1, self.context)
            idle = 1 - replay / step
            found |= {"step_ms": step * 1e3, "replay_ms": replay * 1e3, "idle": idle}
            self.lines.append(
                Line(
                    f"one row, k = {NUM_DRAFTED}: GPU idle (step {step * 1e3:.3f} ms, its graph {replay * 1e3:.3f} ms)",
                    f"{idle:.1%}",
                    _mark(idle <= MUST_IDLE, f"≤ {MUST_IDLE:.0%}"),
                )
            )
        found["tokens_per_step"] = drafted.num_tokens / drafted.steps
        return found

    def many(self) -> dict[str, Any]:
        """Many rows, with the automatic length: the costs that it goes by are those measured in the runs before."""
        prompts = self.prompts(self.options.rows)
        sides: dict[str, Callable[[], Speculation | None]] = {"none": lambda: None}
        for chance in ACCEPTANCES:
            sides[f"acceptance {chance}"] = lambda chance=chance: self.told(chance)  # type: ignore[misc]
        runs = self._in_turn(sides, [prompts] * (self.options.rounds + 1), self.options.tokens // 2)
        found = self._rates(runs, f"{self.options.rows} rows, length by cost", MUST_BUSY)
        found["costs"] = str(self.scheduler.costs)
        print(self.scheduler.costs, flush=True)
        return found

    def nothing(self) -> dict[str, Any]:
        """What a server pays that may draft where nothing can be drafted: steps of both in turn."""
        found: dict[str, Any] = {}
        for num_rows in (1, min(32, self.options.rows)):
            prompts = self.prompts(num_rows, seed=7)
            times: dict[str, list[float]] = {"none": [], "ngram": []}
            for number in range(2 * (self.options.pairs + 1)):
                side = ("none", "ngram")[(number + number // 2) % 2]
                speculation = self.told(0.0, has_drafts=False) if side == "ngram" else None
                run = self.generate(prompts, speculation, self.options.tokens // 2)
                assert speculation is None or not run.drafted
                times[side].append(run.step_seconds)
            ratios = [ours / plain - 1 for plain, ours in zip(times["none"][1:], times["ngram"][1:], strict=True)]
            cost, spread = statistics.median(ratios), _interval(ratios)
            found[str(num_rows)] = {"cost": cost, "interval": spread, "step_ms": statistics.median(times["none"]) * 1e3}
            self.lines.append(
                Line(
                    f"{num_rows} rows, nothing to draft: cost of a step, median and 95 % interval of the mean of {len(ratios)} pairs",
                    f"{cost:+.2%} ({spread[0]:+.2%} … {spread[1]:+.2%})",
                    _mark(cost <= MUST_NOTHING, f"≤ {MUST_NOTHING:.1%}"),
                )
            )
        return found

    def model(self) -> dict[str, Any]:
        """A draft model, whose tokens are made wrong as often as the rule says."""
        if self.draft is None:
            return {}
        assert self.by_model is not None
        prompts = self.prompts(self.options.rounds + 1, seed=3)
        settings = msgspec.structs.replace(self.by_model.settings, is_adaptive=False)  # type: ignore[attr-defined]
        fixed = type(self.by_model)(settings)  # type: ignore[call-arg]
        end = often_wrong(self.draft, ACCEPTANCE, 2 * (PROMPT_LEN + self.options.tokens))
        self.runner.draft = self.draft
        try:
            sides: dict[str, Callable[[], Speculation | None]] = {
                "none": lambda: None,
                f"k = {NUM_DRAFTED}": lambda: fixed,
                "by cost": lambda: self.by_model,
            }
            runs = self._in_turn(sides, [[prompt] for prompt in prompts])
            found = self._rates(runs, f"one stream, draft model, acceptance {ACCEPTANCE}", 0.0)
            with self.steps() as steps:
                run = self.generate([prompts[0]], fixed)
            step = steps.between(NUM_DRAFTED + 1)
            if self.runner.graphs is not None:
                verify = self.replay_seconds(self.runner.graphs, NUM_DRAFTED + 1, self.context)
                one = self.replay_seconds(self.draft.graphs, 1, self.context)
                two = self.replay_seconds(self.draft.graphs, 2, self.context)
                # Of the first pass of a draft some have two tokens: where the draft before was right to its end.
                passes = NUM_DRAFTED * one + (two - one) * ACCEPTANCE**NUM_DRAFTED
                overhead = step - verify - passes
                per_token = overhead * run.steps / run.num_tokens
                found |= {
                    "step_ms": step * 1e3,
                    "verify_ms": verify * 1e3,
                    "pass_ms": one * 1e3,
                    "pass_2_ms": two * 1e3,
                }
                found |= {"overhead_ms": overhead * 1e3, "overhead_per_token_ms": per_token * 1e3}
                self.lines.append(
                    Line(
                        f"draft model, k = {NUM_DRAFTED}: a step {step * 1e3:.3f} ms = verifying {verify * 1e3:.3f} + {NUM_DRAFTED} passes of "
                        f"{one * 1e3:.3f} ({two * 1e3:.3f} with two tokens) + the engine's {overhead * 1e3:.3f}",
                        f"{per_token * 1e6:.0f} µs per token, {overhead / step:.1%} idle",
                    )
                )
            return found
        finally:
            end()
            self.runner.draft = None

    # ── figures ──

    def _in_turn(
        self,
        sides: dict[str, Callable[[], Speculation | None]],
        loads: Sequence[Sequence[list[int]]],
        num_tokens: int = 0,
    ) -> dict[str, list[Run]]:
        """Each load with each side, the order reversed from one to the next. The first is not counted: prompts are computed, steps captured
        and costs learned in it. Of the others prompts are computed beforehand."""
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for number, load in enumerate(loads):
            self.generate(load, None, num_tokens)
            names = list(sides) if number % 2 else list(reversed(sides))
            for side in names:
                done = self.generate(load, sides[side](), num_tokens)
                if number:
                    runs[side].append(done)
        return runs

    def _rates(self, runs: dict[str, list[Run]], what: str, must: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        base = runs["none"]
        for side, some in runs.items():
            rate = statistics.median(one.num_tokens / one.seconds for one in some)
            ratios = [plain.seconds / one.seconds for plain, one in zip(base, some, strict=True)]
            ratio = statistics.median(ratios)
            drafted, accepted = sum(one.drafted for one in some), sum(one.accepted for one in some)
            found[side] = {"rate": rate, "ratios": ratios, "runs": [one._replace(tokens=[])._asdict() for one in some]}
            per_step = some[-1].num_tokens / some[-1].steps / len(some[-1].tokens)
            about = f", {per_step:.2f} tokens a step and row, {accepted} of {drafted} accepted"
            captured = sum(one.capturing for one in some)
            about += f", {captured:.2f} s capturing" if captured > 0.005 else ""
            is_fixed = side.startswith(("k =", "acceptance"))
            self.lines.append(
                Line(
                    f"{what}: {side}",
                    f"{rate:,.0f} tokens/s"
                    if side == "none"
                    else f"{rate:,.0f} tokens/s, {ratio:.3f} × (lowest {min(ratios):.3f}){about}",
                    _mark(ratio >= must, f"≥ {must} ×") if must and is_fixed else "",
                )
            )
        return found


def _interval(values: Sequence[float]) -> tuple[float, float]:
    mean, half = statistics.fmean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def _of_one_vocabulary(name: str, target: Path, folder: Path) -> Path:
    """The shape of a draft model, with the vocabulary of the model that it drafts for."""
    source = MODELS / name if (MODELS / name).is_dir() else Path(name)
    config = json.loads((source / "config.json").read_text())
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    copy = folder / f"{source.name}-vocabulary-{size}"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    for file in source.glob("*token*"):
        shutil.copy(file, copy)
    return copy
