"""logit_bias, allowed_token_ids and bad_words: by torch, by the CPU's kernels and by the GPU's, against plain Python."""

import math

import msgspec
import numpy as np
import pytest
import torch

from octavo.messages import SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from tests.interpreter import mend
from tests.native import native

VOCAB = 50
PROMPT = [1, 2, 3]
OUTPUTS = [[], [7], [7, 7], [1, 8], [5, 6, 7, 8]]


def expected(logits: list[float], output: list[int], params: SamplingParams, bad: list[list[int]]) -> int:
    edited = dict(enumerate(logits))
    for token in edited:
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            edited[token] = -math.inf
        edited[token] += (params.logit_bias or {}).get(token, 0.0)
    for word in bad:
        *prefix, last = word
        if not prefix or output[-len(prefix) :] == prefix:
            edited[last] = -math.inf
    return max(edited, key=lambda token: (edited[token], -token))


def cases(rng: np.random.Generator) -> list[tuple[SamplingParams, list[list[int]]]]:
    words = [[4], [7, 4], [7, 7, 9], [8, 9], [2, 3, 9], [5, 6, 7, 8, 10]]
    return [
        (SamplingParams(temperature=0), []),
        (SamplingParams(temperature=0, logit_bias={3: 50.0, 9: -100.0}), []),
        (SamplingParams(temperature=0, allowed_token_ids=[11, 4, 11]), [[4]]),
        (SamplingParams(temperature=0), words),
        (SamplingParams(temperature=0, logit_bias={9: 30.0, 4: 20.0, 10: 10.0}), words),
        (
            SamplingParams(temperature=0, allowed_token_ids=rng.integers(0, VOCAB, 9).tolist(), logit_bias={4: -3.0}),
            words,
        ),
    ]


@pytest.mark.parametrize("way", ["torch", "native", "kernels"])
def test_every_way_makes_the_same_edits(way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    options, place = {}, torch.device("cpu")
    if way == "native":
        options["native"] = native()
    elif way == "kernels":
        pytest.importorskip("triton")
        mend(monkeypatch)
        options["by_kernels"], place = True, device
    for seed in range(12):
        rng = np.random.default_rng(seed)
        asked = cases(rng)
        state = SamplingState(8, VOCAB)
        tokens = torch.zeros(8, 20, dtype=torch.int32)
        rows = rng.permutation(8)[: len(asked)]
        outputs = []
        for row, (params, bad) in zip(rows.tolist(), asked, strict=True):
            state.enter(row, msgspec.structs.replace(params, bad_word_ids=tuple(map(tuple, bad))), 0, len(PROMPT), [])
            outputs.append(OUTPUTS[int(rng.integers(len(OUTPUTS)))])
            held = [*PROMPT, *outputs[-1]]
            tokens[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
        lens = np.array([len(PROMPT) + len(output) for output in outputs])
        logits = torch.from_numpy(rng.normal(0, 3, (len(asked), VOCAB)).astype(np.float32))
        logits[:, [4, 9, 10]] += 8
        want = [
            expected(row.tolist(), output, params, bad)
            for row, output, (params, bad) in zip(logits, outputs, asked, strict=True)
        ]
        assert sample(logits.to(place, copy=True), tokens.to(place), state, rows, lens, **options).tolist() == want, (
            f"seed {seed}"
        )


def test_a_row_that_left_takes_its_edits_along() -> None:
    state = SamplingState(2, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, logit_bias={1: 1.0}), 0, 3, [])
    assert state.is_only_greedy([1], [3]) and not state.is_only_greedy([0], [3])
    state.enter(0, SamplingParams(temperature=0.0), 0, 3, [])
    assert state.is_only_greedy([0], [3])
    assert not (state.edits or state.num_logprobs or state.num_prompt_logprobs)


def test_equal_parameters_share_their_edits_and_others_do_not() -> None:
    state = SamplingState(4, VOCAB)
    ids = [3, -1, 3, 49, 50, 1]
    for row, allowed in enumerate((ids, [*ids], [4], ids)):
        state.enter(row, SamplingParams(allowed_token_ids=allowed), 0, 3, [])
    assert [state.edits[row].allowed.tolist() for row in range(4)] == [[1, 3, 49], [1, 3, 49], [4], [1, 3, 49]]
    assert state.edits[0] is state.edits[1], "the sequences of one request"
