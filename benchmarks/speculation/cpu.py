"""What drafts gain on this machine: copy and edit work, chat, and JSON answers, by the number of requests at a time."""

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

from octavo import LLM, SamplingParams
from octavo.observe.metrics.engine_metrics import EngineMetrics

CODE = '''def parse_config(path):
    """Read a configuration file and return its settings as a dictionary."""
    settings = {}
    with open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if "=" not in line:
                raise ValueError(f"{path}:{number}: expected name = value, got {line!r}")
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings


def write_config(path, settings):
    """Write settings to a configuration file, one per line."""
    with open(path, "w") as file:
        for name, value in sorted(settings.items()):
            file.write(f"{name} = {value}\\n")
'''
MINUTES = """The meeting began at nine. Anna Berg reported that the new pump in the north hall runs at 82 percent of its rated power, and that two seals
were replaced on Monday. Tom Weiss said that the order for spare parts (number 4471, 18 seals and 6 bearings) was sent on 3 March and will
arrive within ten days. Maria Costa asked whether the south hall can stay open during the repair. It was decided that the south hall stays
open, that Tom Weiss informs the night shift by Thursday, and that the next meeting takes place on 17 March at nine in room 204."""
COPY = [
    f"Rewrite this code with type hints for all parameters and return values. Change nothing else. Answer with the code only.\n\n```python\n{CODE}```",
    f"Rename the variable `settings` to `options` in this code. Answer with the whole code and nothing else.\n\n```python\n{CODE}```",
    f"Copy every sentence of these minutes that names a person, word for word, one per line.\n\n{MINUTES}",
    f"Summarise these minutes in a list. Quote the sentences that you rely on in full.\n\n{MINUTES}",
]
CHAT = [
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What should I think about before I buy a used bicycle?",
    "Explain to a child why the sky is blue and the evening sky is red.",
    "Suggest a plan for three rainy days in Lisbon.",
]
TASKS = [
    "Write a Python function that parses an ISO 8601 date and time without any library, with a docstring and type hints.",
    "Write a Python class for a least recently used cache with get, put and a maximum size.",
    "Write a Python function that finds the shortest path in a weighted graph with Dijkstra's algorithm.",
    "Write a Python command line program with argparse that counts words, lines and characters of files.",
]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 30},
        "year_of_birth": {"type": "integer"},
        "is_employed": {"type": "boolean"},
        "contact_details": {
            "type": "object",
            "properties": {
                "email_address": {"type": "string", "maxLength": 30},
                "telephone_number": {"type": "string", "maxLength": 20},
            },
            "required": ["email_address", "telephone_number"],
            "additionalProperties": False,
        },
    },
    "required": ["full_name", "occupation", "year_of_birth", "is_employed", "contact_details"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}
JSON = [
    f"Invent three people who work in a {place}. Answer in JSON."
    for place in ("bakery", "library", "shipyard", "clinic")
]
OBJECT = [
    f"Invent a person who works in a {place}. Answer in JSON." for place in ("bakery", "library", "shipyard", "clinic")
]
# Asked again in each round with another NAME, as an agent does that tries once more: answers are much the same, and not in the prompt.
NAMES = ["parse", "load", "handle", "process", "compute", "run_task", "make", "find_all", "solve", "resolve"]
AGAIN = [
    *(task.replace("Write a Python", "Write a Python 3", 1) + " Call it `NAME`." for task in TASKS[:3]),
    f"Add a docstring and type hints to every function of this code, and rename `parse_config` to `NAME_config`. Answer with the code only.\n\n```python\n{CODE}```",
]
SIDES = {
    "none": '{"method": "none"}',
    "auto": "",
    "ngram": '{"method": "ngram"}',
    "suffix": '{"method": "suffix"}',
    "text": '{"method": "ngram", "grammar": false}',  # without what grammars force
    "recent": '{"method": "suffix", "suffix_decoding_max_cached_requests": 64}',
}


class Work(NamedTuple):
    prompts: list[str]
    params: SamplingParams


WORKS = {
    "copy": Work(COPY, SamplingParams(temperature=0.0, max_tokens=256)),
    "chat": Work(CHAT, SamplingParams(temperature=0.7, seed=1, max_tokens=192)),
    "code": Work(TASKS, SamplingParams(temperature=0.0, max_tokens=256)),
    "again": Work(AGAIN, SamplingParams(temperature=0.0, max_tokens=256)),
    "json": Work(JSON, SamplingParams(temperature=0.0, max_tokens=1024, structured_outputs={"json": PEOPLE})),
    "object": Work(OBJECT, SamplingParams(temperature=0.0, max_tokens=512, structured_outputs={"json": PERSON})),
}


class Run(NamedTuple):
    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float
    drafted: int
    accepted: int
    steps: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--works", default="copy,chat,code,json", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--draft-model", default="", help="for the side draft_model")
    parser.add_argument("--most", type=int, default=8, help="num_speculative_tokens of the side draft_model")
    parser.add_argument("--sides", default="none,auto", help="the first is what the others are compared with")
    parser.add_argument("--json", default="", help="file to write all runs to")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    sides = options.sides.split(",")
    by_model = {"method": "draft_model", "model": options.draft_model, "num_speculative_tokens": options.most}
    configs = SIDES | {"draft_model": json.dumps(by_model)}
    llms = {
        side: LLM(options.model, speculative_config=configs[side], max_model_len=2048, max_num_seqs=32)
        for side in sides
    }
    runs: dict[tuple[str, int, str], list[Run]] = defaultdict(list)
    for round_ in range(-1, options.rounds):  # the first is not counted: costs are learned in it, and prompts computed
        for work in options.works.split(","):
            for clients in map(int, options.clients.split(",")):
                for side in sides if round_ % 2 else reversed(sides):
                    done = _run(llms[side], WORKS[work], clients, NAMES[round_ % len(NAMES)])
                    if round_ >= 0:
                        runs[work, clients, side].append(done)
                last = [runs[work, clients, side][-1].tokens for side in sides if runs[work, clients, side]]
                assert all(tokens == last[0] for tokens in last), f"{work}: speculation has changed a token"
    _print(runs, sides)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                [
                    {"work": key[0], "clients": key[1], "side": key[2], **one._asdict()}
                    for key, some in runs.items()
                    for one in some
                ],
                file,
            )
    return 0


def _run(llm: LLM, work: Work, clients: int, name: str) -> Run:
    """As many requests at a time as there are clients, four in turn where there is one. `name`: in place of NAME in prompts."""
    asked = [prompt.replace("NAME", name) for prompt in work.prompts]
    prompts = [asked[at % len(asked)] for at in range(max(clients, len(asked)))]
    batches = [prompts[at : at + clients] for at in range(0, len(prompts), clients)]
    loop = llm._loop
    metrics = next(each for each in loop.observers if isinstance(each, EngineMetrics))
    before = (metrics.draft_tokens, metrics.accepted_tokens, loop.scheduler.num_steps)
    started, cpu = time.perf_counter(), time.process_time()
    outputs = [
        output
        for batch in batches
        for output in llm.chat([[{"role": "user", "content": prompt}] for prompt in batch], work.params, use_tqdm=False)
    ]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    after = (metrics.draft_tokens, metrics.accepted_tokens, loop.scheduler.num_steps)
    numbers = [late - early for late, early in zip(after, before, strict=True)]
    return Run([output.outputs[0].token_ids for output in outputs], seconds, cpu_seconds, *numbers)


def _print(runs: dict[tuple[str, int, str], list[Run]], sides: list[str]) -> None:
    print(
        f"{'work':5} {'clients':>7} {'side':7} {'tokens/s':>9} {'ratio':>6} {'lowest':>7} {'by CPU':>7} {'accepted':>9} {'drafted':>8} {'tokens/step':>12}"
    )
    for (work, clients, side), some in runs.items():
        base = runs[work, clients, sides[0]]
        rate = statistics.median(sum(map(len, one.tokens)) / one.seconds for one in some)
        ratios = [before.seconds / one.seconds for before, one in zip(base, some, strict=True)]
        by_cpu = statistics.median(before.cpu_seconds / one.cpu_seconds for before, one in zip(base, some, strict=True))
        drafted, accepted = some[-1].drafted, some[-1].accepted
        print(
            f"{work:5} {clients:7} {side:7} {rate:9.1f} {statistics.median(ratios):6.2f} {min(ratios):7.2f} {by_cpu:7.2f} "
            f"{accepted:9} {drafted:8} {sum(map(len, some[-1].tokens)) / max(1, some[-1].steps):12.2f}"
        )
