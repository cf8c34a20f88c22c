"""Grammars on a GPU, through the whole engine: steps ahead of the host, with and without graphs, give the same valid answers."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, SamplingParams
from octavo.sampling.grammar import masks
from tests.doubles import VOCAB_SIZE, write_byte_tokenizer
from tests.schemas import PEOPLES

pytestmark = pytest.mark.gpu

SCHEMAS = [schema for name, schema in PEOPLES.items() if name != "draft 7 tuple"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def answers(folder: Path, **options: Any) -> list[Any]:
    """Rows with a grammar and rows without, greedy and drawn, in one batch."""
    params, prompts = [], []
    for number in range(48):
        schema = SCHEMAS[number % len(SCHEMAS)] if number % 3 else None
        params.append(
            SamplingParams(
                temperature=0.0 if number % 4 == 0 else 1.5,
                repetition_penalty=1.2 if number % 5 == 0 else 1.0,
                seed=number,
                max_tokens=200,
                structured_outputs=None
                if schema is None
                else {"json": schema, "disable_any_whitespace": number % 2 == 0},
            )
        )
        prompts.append([65 + number % 26] * (1 + number % 7))
    with LLM(str(folder), device="cuda", dtype="bfloat16", max_num_seqs=64, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    num_valid = 0
    for number, output in enumerate(outputs):
        (answer,) = output.outputs
        if number % 3 and answer.finish_reason == "stop":
            schema = SCHEMAS[number % len(SCHEMAS)]
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            ).validate(json.loads(answer.text))
            num_valid += 1
    assert num_valid >= 10
    return [output.outputs[0].token_ids for output in outputs]


def test_graphs_or_none_the_same_valid_answers(folder):
    answers(folder)  # valid; the bits depend on which rows share a step, and that on how soon grammars are compiled
    assert answers(folder, deterministic=True) == answers(folder, deterministic=True, enforce_eager=True)


def test_late_masks_change_no_token(folder, monkeypatch):
    """No step waits for a mask, so that most are late: with graphs and without, the same answers."""
    calm = answers(folder, deterministic=True)
    monkeypatch.setattr(masks, "_LEAST_WAIT", 0.0)
    monkeypatch.setattr(masks, "_WAIT_ALONE", 0.0)
    monkeypatch.setattr(masks, "_WAIT_SHARE", -1.0)
    late = []
    settle = masks.Grammars._masks
    monkeypatch.setattr(masks.Grammars, "_masks", lambda *given: late.append(settle(*given)) or late[-1])
    for enforce_eager in (False, True):
        assert answers(folder, deterministic=True, enforce_eager=enforce_eager) == calm
    assert sum(len(found.late) for found in late) > 1000
