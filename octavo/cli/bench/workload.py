"""The workload of a benchmark: prompts and arrival times, which depend only on a seed."""

import random
from dataclasses import dataclass

from octavo.plan.trace import Trace

# Frequent English words: with a leading space each is one token in all common vocabularies, so words count as tokens.
_FREQUENT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about into "
    "than them can only other new some could time these two may then do first any my now such like our over man me even "
    "most made after also did many before must through back years where much your way well down should because each just "
    "those people how too little state good very make world still own see men work long get here between both life being "
    "under never day same another know while last might us great old year off come since against go came right used take three"
)
WORDS = _FREQUENT.split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts (texts or lists of token ids) and their arrival times: request i is sent `arrivals[i]` seconds after the start."""

    prompts: list[str | list[int]]
    arrivals: list[float]
    output_lens: list[int] | None = None  # tokens of each output; None: all as --output-len
    after: list[int] | None = (
        None  # a request that is sent `arrivals[i]` seconds after the end of this one; −1: of none
    )


def id_prompts(num: int, input_len: int, shared_len: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids. The lowest ids, which are often special tokens, are left out as far as the vocabulary allows."""
    rng = random.Random(seed)
    lowest = min(1000, vocab_size // 2)
    shared = [rng.randrange(lowest, vocab_size) for _ in range(shared_len)]
    return [shared + [rng.randrange(lowest, vocab_size) for _ in range(input_len)] for _ in range(num)]


def word_prompts(num: int, input_len: int, shared_len: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    shared = rng.choices(WORDS, k=shared_len)
    return [" ".join(shared + rng.choices(WORDS, k=input_len)) for _ in range(num)]


def poisson_arrivals(num: int, rate: float, seed: int) -> list[float]:
    """Arrival times with exponential gaps of mean 1 / rate, the first at 0; an infinite rate sends everything at once."""
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(num):
        arrivals.append(now)
        now += rng.expovariate(1.0) / rate
    return arrivals


def trace_workload(trace: Trace, vocab_size: int, seed: int) -> Workload:
    """Prompts of random token ids with a trace's lengths and shared prefixes. A session's prompt begins with the one before it; the ids of
    the output between them are not known to a client, so random ones stand for it."""
    lowest = min(1000, vocab_size // 2)
    blocks: dict[int, list[int]] = {}
    sessions: dict[int, tuple[int, list[int]]] = {}  # → (its last request, that one's prompt)
    prompts: list[str | list[int]] = []
    after: list[int] = []
    for number, request in enumerate(trace.requests):
        prompt: list[int] = []
        for block in request.prefix:
            if block not in blocks:
                dice = random.Random(f"{seed} block {block}")
                blocks[block] = [dice.randrange(lowest, vocab_size) for _ in range(trace.block_size)]
            prompt += blocks[block]
            if len(prompt) >= request.prompt_len:
                break
        previous, before = sessions.get(request.session, (-1, []))
        if request.session >= 0 and before:
            prompt = before
        prompt = prompt[: request.prompt_len]
        dice = random.Random(f"{seed} request {number}")
        prompt = prompt + [dice.randrange(lowest, vocab_size) for _ in range(request.prompt_len - len(prompt))]
        prompts.append(prompt)
        after.append(previous if request.after_previous else -1)
        if request.session >= 0:
            sessions[request.session] = (number, prompt)
    return Workload(
        prompts, [request.seconds for request in trace.requests], [request.output_len for request in trace.requests], after
    )  # fmt: skip
