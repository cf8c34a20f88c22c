"""Random requests, with speculation and without: every token, logprob and end must be the same."""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from octavo.config import Config, replace
from octavo.engine.build import Engine, start_engine
from octavo.engine.process import start_recorder
from octavo.executor.local import LocalExecutor
from octavo.ipc.launch import EngineLaunch
from octavo.messages import Abort, GenerateRequest, Logprobs, SamplingParams
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.recording.format import read
from octavo.replay.replay import Replay
from octavo.text import Text, load_text
from octavo.text.grammar.build import grammar_of
from octavo.text.stream import TextStream
from octavo.weights.sources.source import ModelSource, resolve
from tests.doubles import write_byte_tokenizer
from tests.worker.tiny import disturbed

DRAFTERS = {
    "ngram": '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}',
    "suffix": '{"method": "suffix", "num_speculative_tokens": 5, "adaptive": false}',
    "recent": '{"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_cached_requests": 20, "adaptive": false}',
    "auto": "",
}
DRAFT_MODEL = "draft_model"
BY_MODEL = (DRAFT_MODEL, "eagle3", "mtp")  # drafters that are added where there is something to draft with
RARELY_PREDICTED = (*BY_MODEL, "recent")  # drafters that others' predictions would leave little to do
OFF = '{"method": "none"}'
AGAIN_SHARE = 0.15  # of requests that are an earlier one once more
FORM_SHARE = 0.25  # of requests that have a grammar
NUM_AT_ONCE = 40  # requests that one engine is given; it ends with the last of them
DEATHS = 0.02  # of steps, after which an engine is killed
SMALL, SMALL_MTP = "small", "small-mtp"  # models that are made for the campaign
LEANING = 0.75  # of requests without a grammar, where a draft head has random weights
ON_GPU = {"page_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 512, "swap_space": 0.01}
"""Steps are captured for up to so many rows, and one engine takes seconds to start: it is given more requests."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "isRegistered": {"type": "boolean"},
    },
    "required": ["name", "age", "isRegistered"],
    "additionalProperties": False,
}


class Choice(msgspec.Struct):
    """What a client gets of one choice."""

    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    text: str = ""
    end: str = ""


@dataclass
class Seen:
    """What the campaign was about, so that it is known to have happened."""

    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    deaths: int = 0
    replayed_steps: int = 0
    captured_steps: int = 0  # kinds of steps, on a GPU
    different: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)  # drafter → choices that were compared
    others: dict[str, int] = field(default_factory=dict)  # drafter → choices with other tokens than without


def random_requests(seed: int, count: int, text: Text, vocab_size: int, max_len: int) -> list[GenerateRequest]:
    r, again = random.Random(seed), random.Random(f"{seed} again")
    grammars = [
        grammar_of({"json": SCHEMA}, text.vocabulary),
        grammar_of({"regex": "(yes|no|perhaps), (yes|no|perhaps)( and so on)*"}, text.vocabulary),
    ]
    stems = [[r.randrange(3, vocab_size) for _ in range(40)] for _ in range(3)]
    found = []
    for number in range(count):
        if found and again.random() < AGAIN_SHARE:
            found.append(msgspec.structs.replace(again.choice(found), id=f"r{seed}-{number}"))
            continue
        stem = r.choice(stems)
        start = r.randrange(30)
        prompt = stem[start : r.randrange(start + 1, 41)] * r.choice([1, 1, 2, 3])
        max_tokens = r.randrange(1, min(60, max_len - len(prompt)))
        is_form = r.random() < FORM_SHARE
        if is_form:  # near the limit, masks are not computed ahead
            max_tokens = min(300, max_len - len(prompt) - 1)
        params = SamplingParams(
            n=r.choice([1, 1, 1, 2, 3]),
            seed=r.randrange(2**40),
            temperature=r.choice([0.0, 0.0, 0.2, 0.7, 1.0, 1.5]),
            top_p=r.choice([1.0, 1.0, 0.9]),
            top_k=r.choice([0, 0, 20]),
            min_p=r.choice([0.0, 0.0, 0.05]),
            presence_penalty=r.choice([0.0, 0.0, 0.6]),
            frequency_penalty=r.choice([0.0, 0.0, 0.4]),
            repetition_penalty=r.choice([1.0, 1.0, 1.2]),
            logit_bias=r.choice([None, None, dict.fromkeys(stem[:5], 2.0)]),
            bad_word_ids=r.choice([(), (), (tuple(stem[:2]),)]),
            logprobs=r.choice([None, 0, 2]),
            max_tokens=max_tokens,
            min_tokens=r.choice([0, 0, max_tokens // 2]),
            stop=r.choice([(), (), ("e",), ("the", "a")]),
            ignore_eos=r.random() < 0.5,
            grammar=r.choice(grammars) if is_form else "",
        )
        # As admission does: an answer ends where its grammar ends, even with ignore_eos.
        ignores_eos = params.ignore_eos and not params.grammar
        stop_ids = [] if ignores_eos else [*text.eos_ids, *r.choice([(), (stem[7],)])]
        owner = again.choice([b"", b"key"])
        found.append(GenerateRequest(f"r{seed}-{number}", prompt, params, stop_ids, owner=owner))
    return found


def _leaning(requests: Sequence[GenerateRequest], tokens: Sequence[int], seed: int) -> list[GenerateRequest]:
    """Most of the requests want these few tokens, so that a head with random weights is right now and then."""
    r, bias = random.Random(seed), dict.fromkeys(tokens, 60.0)
    found = []
    for request in requests:
        params = request.params
        if r.random() < LEANING and not params.grammar:
            params = msgspec.structs.replace(params, logit_bias=bias)
        found.append(msgspec.structs.replace(request, params=params))
    return found


def _predict(request: GenerateRequest, tokens: list[int], r: random.Random, drafter: str) -> GenerateRequest:
    if r.random() < (
        0.8 if drafter in RARELY_PREDICTED else 0.3
    ):  # a request with a prediction is not drafted by a model
        return request
    wrong = r.choice([0.0, 0.02, 0.1, 0.3])
    prediction = tuple(token if r.random() >= wrong else r.choice(tokens) for token in tokens)
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, prediction_ids=prediction))


def _difference(plain: Choice, ours: Choice) -> str:
    """Where two answers part, and how each goes on from there."""
    pairs = zip(plain.tokens, ours.tokens, strict=False)
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(ours.tokens)))
    wrong = next((at for at, (a, b) in enumerate(zip(plain.logprobs, ours.logprobs, strict=False)) if a != b), None)
    parts = [f"{each.tokens[at : at + 5]} of {len(each.tokens)}, {each.end!r}" for each in (plain, ours)]
    return f"at token {at}: {' | '.join(parts)}; first other logprobs: {wrong}; texts equal: {plain.text == ours.text}"


class Campaign:
    """Runs requests through engines. `folder`: where they are recorded."""

    def __init__(
        self,
        source: ModelSource,
        options: dict[str, Any],
        folder: Path,
        draft_model: str = "",
        eagle3: str = "",
        has_mtp: bool = False,
    ) -> None:
        """`draft_model`, `eagle3`: what the drafters of these names draft with. `has_mtp`: the model has layers for multi-token prediction."""
        self.source, self.folder = source, folder
        self.drafters = dict(DRAFTERS)
        common = {"num_speculative_tokens": 5, "adaptive": False}
        for method, model in ((DRAFT_MODEL, draft_model), ("eagle3", eagle3)):
            if model:
                self.drafters[method] = json.dumps({"method": method, "model": model, **common})
        if has_mtp:
            self.drafters["mtp"] = json.dumps({"method": "mtp", **common})
        self.options = {
            "page_size": 4,
            "kv_cache_memory_bytes": 3 * 2**18,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        }
        self.options |= {"max_model_len": 512, "swap_space": 0.001, **options}
        self.options |= {"grammar_step_seconds": 60.0}  # a process that is stopped for minutes is no difference
        self.deaths, self.counts = DEATHS, False
        self.leaning: list[
            int
        ] = []  # the few tokens that most requests want; empty: all are as likely as the model says
        self.text = load_text(source.path, tokenizer="")
        self.vocab_size = self.text.vocabulary.size
        self.seen = Seen()

    def check(self, seed: int, count: int, drafters: Sequence[str], is_mortal: bool = True) -> Seen:
        """Compare one set of requests without speculation and with each drafter."""
        requests = random_requests(seed, count, self.text, self.vocab_size, self.options["max_model_len"])
        if self.leaning:
            requests = _leaning(requests, self.leaning, seed)
        plain = self._run(OFF, requests, random.Random(seed), is_mortal=False)
        for name in [*(["none"] if self.counts else []), *drafters]:
            r = random.Random(f"{seed} {name}")
            # A random model copies little: what it will say is predicted, with mistakes.
            predicted = [_predict(request, plain[request.id, 0].tokens, r, name) for request in requests]
            ours = self._run(self.drafters.get(name, OFF), predicted, r, is_mortal=is_mortal)
            for key, choice in plain.items():
                self.seen.tokens += len(choice.tokens)
                self.seen.answers[name] = self.seen.answers.get(name, 0) + 1
                self.seen.others[name] = self.seen.others.get(name, 0) + (ours[key].tokens != choice.tokens)
                if ours[key] != choice and not self.counts:
                    self.seen.different.append(f"{name} {key}: {_difference(choice, ours[key])}")
        self.seen.requests += count
        return self.seen

    def _run(
        self, speculative: str, requests: Sequence[GenerateRequest], r: random.Random, is_mortal: bool
    ) -> dict[tuple[str, int], Choice]:
        engine, folder = self._start(speculative, r.random() < 0.5)
        choices = {(request.id, index): Choice() for request in requests for index in range(request.params.n)}
        streams: dict[tuple[str, int], TextStream] = {}
        for request in requests:
            for index in range(request.params.n):
                streams[request.id, index] = self.text.stream(request.params, request.prompt_ids)
        waiting, open_ones = list(requests), []
        while waiting or open_ones:
            while waiting and (r.random() < 0.3 or not open_ones):
                open_ones.append(waiting.pop(0))
                engine.loop.add(open_ones[-1])
            for delta in engine.loop.step():
                key = (delta.request_id, delta.index)
                choice, stream = choices[key], streams[key]
                if choice.end:
                    continue
                piece = stream.push(delta.token_ids, delta.finish)
                num_new = piece.num_tokens - len(choice.tokens)
                choice.tokens += delta.token_ids[:num_new]
                choice.logprobs += delta.logprobs[:num_new]
                choice.text += piece.text
                if piece.finish_reason is not None:
                    choice.end = f"{piece.finish_reason} {piece.stop_reason}"
                if stream.stopped:
                    engine.loop.abort(Abort(delta.request_id, delta.index, "stop"))
            open_ones = [
                request
                for request in open_ones
                if any(not choices[request.id, index].end for index in range(request.params.n))
            ]
            # Not while a grammar is compiled: an engine that is closed in the same process would leave its process behind.
            is_compiling = bool(engine.loop.scheduler.awaiting_grammar)
            if is_mortal and open_ones and not is_compiling and r.random() < self.deaths:
                self._end(engine, folder)
                self.seen.deaths += 1
                engine, folder = self._start(speculative, r.random() < 0.5)
                for request in open_ones:
                    own = [choices[request.id, index] for index in range(request.params.n)]
                    begun = [None if choice.end else list(choice.tokens) for choice in own]
                    engine.loop.add(msgspec.structs.replace(request, begun=begun))
        self._end(engine, folder)
        return choices

    def _start(self, speculative: str, with_tokens: bool) -> tuple[Engine, Path]:
        config = replace(Config(), record_tokens=with_tokens, speculative_config=speculative, **self.options)
        engine = start_engine(config, self.source, "m")
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        launch = EngineLaunch(config, str(self.source.path), self.source.kind, "m", "m", "", record_to=str(folder))
        engine.loop.record(start_recorder(launch, engine))
        return engine, folder

    def _end(self, engine: Engine, folder: Path) -> None:
        """Close the engine, and make its plans again from what it has recorded."""
        executor = engine.loop.executor
        if isinstance(executor, LocalExecutor) and executor._runner is not None and executor._runner.graphs is not None:
            self.seen.captured_steps += executor._runner.graphs.num_captured
        engine.loop.close()
        self.seen.preemptions += engine.loop.scheduler.num_preemptions
        metrics = next(each for each in engine.loop.observers if isinstance(each, EngineMetrics))
        self.seen.drafted += metrics.draft_tokens
        self.seen.accepted += metrics.accepted_tokens
        replay = Replay(read(folder))
        for _ in replay.follow():
            pass
        self.seen.replayed_steps += replay.num_steps
        if replay.num_same != replay.num_steps:
            self.seen.different.append(f"a replay differs at step {replay.num_same} ({folder})")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help=f"a file or folder; {SMALL}: a random model with a draft model and a head; {SMALL_MTP}: one with a layer for mtp",
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafters", default="", help="all, if it is empty")
    parser.add_argument("--draft-model", default="", help="for the drafter draft_model")
    parser.add_argument("--eagle3", default="", help="head for the drafter eagle3")
    parser.add_argument("--mtp", action="store_true", help="the model has layers for the drafter mtp")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="on a GPU")
    parser.add_argument("--tensor-parallel-size", "-tp", default=1, type=int, help="ranks, each a process")
    parser.add_argument(
        "--kv-cache-memory-bytes",
        default=0,
        type=int,
        help="small, so that requests are preempted (default: 0.75 MiB, with --model small 2 MiB)",
    )
    parser.add_argument("--device", default="auto", help="cuda: more rows, and more requests for each engine")
    parser.add_argument("--at-once", default=0, type=int, help="requests that one engine is given")
    parser.add_argument(
        "--count",
        action="store_true",
        help="count answers with other tokens, also those of a second run without drafts, for engines whose bits depend on the batch",
    )
    parser.add_argument(
        "--seconds", default=0.0, type=float, help="after which no further requests are begun; 0: any time"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    is_gpu = options.device.startswith("cuda")
    given = {"dtype": options.dtype, "deterministic": options.deterministic, "device": options.device}
    given |= {"tensor_parallel_size": options.tensor_parallel_size}
    is_made = options.model in (SMALL, SMALL_MTP)
    given["kv_cache_memory_bytes"] = options.kv_cache_memory_bytes or (2**21 if is_made else 3 * 2**18)
    if is_gpu:
        given |= ON_GPU
    is_slow = is_gpu or options.tensor_parallel_size > 1  # a start takes seconds
    at_once = options.at_once or (250 if is_slow else NUM_AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        draft_model, eagle3, leaning = options.draft_model, options.eagle3, list[int]()
        names = options.drafters.split(",") if options.drafters else []
        has_mtp, has_head = options.mtp, not names or "eagle3" in names
        if options.model == SMALL:
            source = write_small_model(Path(folder) / "model")
            draft_model = draft_model or str(disturbed(source, Path(folder) / "draft", 0.01))
            if has_head and not eagle3:
                eagle3, leaning = write_small_head(source, Path(folder) / "eagle3")
        elif options.model == SMALL_MTP:
            source, leaning = write_small_mtp(Path(folder) / "model")
            has_mtp = True
        else:
            source = resolve(options.model)
        campaign = Campaign(source, given, Path(folder), draft_model, eagle3, has_mtp)
        campaign.leaning = leaning
        campaign.counts = options.count
        if is_slow:
            campaign.deaths = DEATHS * NUM_AT_ONCE / at_once / 6
        if is_gpu:  # where auto drafts nothing
            del campaign.drafters["auto"]
        drafters = names or list(campaign.drafters)
        started, seen = time.monotonic(), campaign.seen
        for number in range(-(-options.requests // at_once)):
            if 0 < options.seconds < time.monotonic() - started:
                break
            campaign.check(options.seed + number, at_once, drafters)
            if is_slow or seen.different or number % 10 == 9:
                print(f"{seen.requests} requests, {time.monotonic() - started:.0f} s", flush=True)
            if seen.different:
                break
    for what in seen.different[:5]:
        print("different:", what[:2000])
    if options.count:
        for name, count in seen.answers.items():
            what = "a second run without drafts" if name == "none" else name
            print(f"{what}: {seen.others[name]} of {count} answers have other tokens ({seen.others[name] / count:.1%})")
    print(
        f"{seen.requests} requests × {', '.join(drafters)}: {seen.tokens} tokens compared, {seen.drafted} drafted, {seen.accepted} accepted, "
        f"{seen.preemptions} preemptions, {seen.deaths} engines killed, {seen.replayed_steps} steps replayed, {seen.captured_steps} kinds of "
        f"steps captured; {len(seen.different)} differences; {time.monotonic() - started:.0f} s"
    )
    return bool(seen.different)


def write_small_head(target: ModelSource, folder: Path) -> tuple[str, list[int]]:
    """An EAGLE-3 head with random weights, of a size that a GPU's kernels are made for. → it, and two tokens that it has."""
    from tests.draft_heads import few_tokens_of, write_eagle3  # imported here: it needs transformers

    head = write_eagle3(folder, target.path, tapped=[0, 1, 2], head_size=64, inner=512)
    return str(head), few_tokens_of(head)


def write_small_mtp(folder: Path) -> tuple[ModelSource, list[int]]:
    """A random DeepSeek-V3 with a layer for mtp, and two tokens."""
    from tests.draft_heads import GPU_MTP_SIZES, write_mtp  # imported here: it needs transformers

    source = write_mtp(folder, sizes=GPU_MTP_SIZES)
    write_byte_tokenizer(folder)
    return source, [7, 100]


def write_small_model(folder: Path) -> ModelSource:
    """A random Llama of the least size that a GPU's kernels are made for, with a tokenizer of bytes. Its logits differ clearly."""
    hidden, inner, heads, kv_heads, layers, vocab_size = 256, 512, 4, 2, 2, 258
    generator = torch.Generator().manual_seed(0)

    def random_tensor(rows: int, width: int, scale: float = 1.5) -> torch.Tensor:
        return (torch.randn(rows, width, generator=generator) * scale / width**0.5).bfloat16()

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": random_tensor(vocab_size, hidden, hidden**0.5),
        "model.norm.weight": norm,
        "lm_head.weight": random_tensor(vocab_size, hidden, 3.0),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, rows, width in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // heads * kv_heads, hidden),
            ("self_attn.v_proj", hidden // heads * kv_heads, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{name}.{part}.weight"] = random_tensor(rows, width)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = norm.clone()
    tensors["model.norm.weight"] = norm.clone()
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab_size, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder)
    return resolve(str(folder))
