"""Beam searches by transformers, and the same asked of Octavo."""

from dataclasses import dataclass, field
from typing import Any

import torch

from octavo import LLM, SamplingParams

SAME = 1e-4  # nat: sums this close are decided by the order of additions


@dataclass
class Case:
    prompt: list[int]
    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    eos_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(
            use_beam_search=True,
            n=self.width,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=self.eos_ids,
            ignore_eos=True,
            **more,
        )


@torch.inference_mode()
def transformers_beams(model: Any, case: Case) -> list[tuple[list[int], float]]:
    """(answer, score), the best first."""
    found = model.generate(
        torch.tensor([case.prompt]),
        attention_mask=torch.ones(1, len(case.prompt), dtype=torch.int64),
        num_beams=case.width,
        num_return_sequences=case.width,
        max_new_tokens=case.max_tokens,
        min_new_tokens=case.min_tokens or None,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos_token_id=case.eos_ids or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = row[len(case.prompt) :][: case.max_tokens]
        ends = [at for at, token in enumerate(answer) if token in case.eos_ids]
        answers.append((answer[: ends[0] + 1] if ends else answer, score))
    return answers


def our_beams(llm: LLM, cases: list[Case]) -> list[list[tuple[list[int], float]]]:
    outputs = llm.generate([case.prompt for case in cases], [case.params() for case in cases], use_tqdm=False)
    return [
        [
            (choice.token_ids, choice.cumulative_logprob / len(choice.token_ids) ** case.length_penalty)
            for choice in o.outputs
        ]
        for case, o in zip(cases, outputs, strict=True)
    ]


def check_beams(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]], what: str) -> None:
    """Equal to the last token. Two answers with the same score may change places."""
    assert len(ours) == len(theirs), what
    for at, ((tokens, score), (want, its_score)) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(score - its_score) < SAME * max(1.0, abs(its_score)), (
            f"{what}, beam {at}: {score} is not {its_score}"
        )
        twins = [answer for answer, other in theirs if abs(other - its_score) < SAME]
        assert tokens == want or (len(twins) > 1 and tokens in twins), f"{what}, beam {at}: {tokens} is not {want}"
