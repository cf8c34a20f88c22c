"""Greedy references from transformers, and the rule by which Octavo's tokens are compared with them."""

import itertools
from dataclasses import dataclass

import torch

from octavo import LLM, SamplingParams
from octavo.messages.plans import Logprobs

EXCUSED_MARGIN = 0.02  # nat: two tokens this close are decided by the order of additions


@dataclass
class Reference:
    prompt: list[int]
    tokens: list[int]
    margins: list[float]  # between the two most probable tokens, at each step


@torch.inference_mode()
def greedy_references(model, prompts: list[list[int]], num_tokens: int, guesses=()) -> list[Reference]:
    """transformers' own arithmetic, its key-value cache included, every prompt alone: no padding, no masks.
    `guesses`, each as long as an answer, save time alone: one pass says how far a guess is what the model would say."""
    references = []
    for prompt, guess in itertools.zip_longest(prompts, guesses, fillvalue=[]):
        reference = Reference(prompt, [], [])
        past, ids = None, [*prompt, *guess]
        while len(reference.tokens) < num_tokens:
            output = model(torch.tensor([ids]), past_key_values=past, use_cache=not guess)
            past = output.past_key_values
            tops = output.logits[0, -1 - len(guess) :].log_softmax(-1).topk(2)
            for (first, _), (best, second) in zip(tops.indices.tolist(), tops.values.tolist(), strict=True):
                reference.tokens.append(first)
                reference.margins.append(best - second)
                if len(reference.tokens) == num_tokens or guess[len(reference.tokens) - 1 :][:1] != [first]:
                    break
            ids = [*prompt, *reference.tokens] if guess else [first]
            guess = []
        references.append(reference)
    return references


def assert_same(got: list[int], reference: Reference, what: str) -> bool:
    """True: equal to the last token. False: they part at a near tie, after which nothing can be compared."""
    for step, (ours, theirs) in enumerate(zip(got, reference.tokens, strict=True)):
        if ours != theirs:
            assert reference.margins[step] < EXCUSED_MARGIN, (
                f"{what}: token {step} is {ours}, transformers says {theirs} by {reference.margins[step]:.4f} nat"
            )
            return False
    return True


def check(llm: LLM, references: list[Reference], what: str, *, together: bool = True) -> int:
    """Run every reference's prompt, in one batch or one by one. Returns how many are equal to the last token."""
    params = SamplingParams(temperature=0, max_tokens=len(references[0].tokens), ignore_eos=True)
    prompts = [reference.prompt for reference in references]
    if together:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return sum(
        assert_same(output.outputs[0].token_ids, reference, f"{what}, prompt {number}")
        for number, (output, reference) in enumerate(zip(outputs, references, strict=True))
    )


def scores(llm: LLM, references: list[Reference]) -> list[list[Logprobs]]:
    """Of every token and of the likeliest, all prompts in one batch: equal only where the arithmetic is, or nearly so."""
    params = SamplingParams(temperature=0, max_tokens=len(references[0].tokens), ignore_eos=True, logprobs=3)
    outputs = llm.generate([reference.prompt for reference in references], params, use_tqdm=False)
    return [output.outputs[0].logprobs for output in outputs]
