"""Octavo's logprobs with adapters, in float32, against PEFT's, not merged."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 1e-4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of the base")
    parser.add_argument("--adapters", required=True, help="folder of PEFT folders")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.set_defaults(run=run)


Answers = list[tuple[list[int], list[dict[int, float]]]]  # tokens, and the logprobs of each and its neighbours


def run(options: argparse.Namespace) -> int:
    import msgspec
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from octavo import LLM, LoRARequest, SamplingParams
    from octavo.offline.prompts import read_prompt

    folders = sorted(path for path in Path(options.adapters).iterdir() if path.is_dir())
    adapters: list[LoRARequest | None] = [LoRARequest(path.name, 1, str(path)) for path in folders]
    adapters.append(None)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, logprobs=4)

    def engine(**more: Any) -> LLM:
        return LLM(options.model, enable_lora=True, dtype="float32", **({"max_model_len": 256} | more))

    rng = random.Random(1)
    with engine() as llm:
        size = llm.report.vocab_size
        prompts = [[rng.randrange(3, size) for _ in range(rng.randrange(8, 48))] for _ in range(options.prompts)]
        of_prompt = [adapters[number % len(adapters)] for number in range(options.prompts)]
        mixed = _answers(llm.generate(prompts, params, use_tqdm=False, lora_request=of_prompt))
        alone = [
            _answers(llm.generate([prompt], params, use_tqdm=False, lora_request=adapter))[0]
            for prompt, adapter in zip(prompts, of_prompt, strict=True)
        ]
    most = max(len(prompt) for prompt in prompts) + options.tokens
    # Room for the longest and little more: two that begin together cannot both end.
    few_pages = llm.report.page_bytes * (-(-most // llm.report.page_size) + 2)
    with engine(kv_cache_memory_bytes=few_pages, max_model_len=most, enable_prefix_caching=False) as llm:
        preempted = _answers(llm.generate(prompts, params, use_tqdm=False, lora_request=of_prompt))
        num_preemptions = llm._loop.scheduler.num_preemptions
    continued: list[list[int]] = []
    with engine() as llm:
        for prompt, adapter, (tokens, _) in zip(prompts, of_prompt, mixed, strict=True):
            (request,) = llm._adapted([llm._requests.request(read_prompt(prompt), params, 0)], adapter)
            box: list[Any] = []
            half = options.tokens // 2
            llm._submit(msgspec.structs.replace(request, begun=[tokens[:half]]), box)
            found = tokens[:half]
            while len(found) < options.tokens:
                found = found + [token for delta in llm._next(box) for token in delta.token_ids]
            continued.append(found)
    same = {
        "alone": alone == mixed,
        f"preempted ({num_preemptions} times)": preempted == mixed and num_preemptions > 0,
        "continued": continued == [tokens for tokens, _ in mixed],
    }
    worst = 0.0
    for adapter in adapters:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter.path).eval()
        for prompt, given, (tokens, scores) in zip(prompts, of_prompt, mixed, strict=True):
            if given is adapter:
                worst = max(worst, _difference(model, prompt, tokens, scores))
        print(f"{adapter.name if adapter else 'the base'}: largest difference so far {worst:.2e}")
    if not num_preemptions:
        print("no request was preempted: that part shows nothing; more --tokens need more pages")
    for what, is_same in same.items():
        print(f"{what}: {'the same bytes as mixed' if is_same else 'DIFFERS from mixed'}")
    print(f"largest difference from PEFT: {worst:.2e} (limit {LIMIT:.0e})")
    return 0 if worst <= LIMIT and all(same.values()) else 1


def _answers(outputs: Any) -> Answers:
    return [
        (
            output.outputs[0].token_ids,
            [{token: one.logprob for token, one in each.items()} for each in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def _difference(
    model: Callable[..., Any], prompt: list[int], tokens: list[int], scores: list[dict[int, float]]
) -> float:
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    return max(
        abs(score - float(expected[at, token])) for at, each in enumerate(scores) for token, score in each.items()
    )
