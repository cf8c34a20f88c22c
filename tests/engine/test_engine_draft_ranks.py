"""Drafts over two tensor parallel ranks: answers are to the bit those of two ranks without drafts, and drafts are right: those of a model
for itself always, those of a head as its published architecture says."""

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.speculation import identity
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.messages import GenerateRequest, StepResult
from octavo.parallel import NO_LINKS, Group, Ranks
from octavo.text import load_text
from octavo.text.grammar.build import grammar_of
from octavo.weights.sources.source import local
from octavo.worker.load import Loader
from tests.doubles import write_byte_tokenizer
from tests.draft_heads import VOCAB_SIZE, Eagle3Reference, MTPReference, write_eagle3, write_mtp
from tests.engine.test_engine_draft_model import results_of
from tests.worker.tiny import tiny_config, write_tiny_llama

CONTEXT_LEN = 512
SEED, COUNT = 3, 6
LIKELY = [17, 79, 166]  # tokens that a bias makes so likely that heads with random weights are right now and then
NO_DRAFTS = '{"method": "none"}'

Answers = dict[tuple[str, int], tuple[list[int], list[object], list[object]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "llama", vocab_size=VOCAB_SIZE, num_layers=3)
    write_mtp(folder / "deepseek")
    for name in ("llama", "deepseek"):
        write_byte_tokenizer(folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LEN}))
    write_eagle3(folder / "head", folder / "llama", tapped=[0, 1, 3], draft_vocab_size=101)
    yield folder


def drafting(method: str, model: Path | None = None, **options: object) -> str:
    named = {} if model is None else {"model": str(model)}
    return json.dumps({"method": method, "num_speculative_tokens": 4, "adaptive": False, **named, **options})


def two_ranks(model: Path, speculative: str, kib: int) -> LLM:
    return LLM(
        str(model), speculative_config=speculative, tensor_parallel_size=2, device="cpu", cpu_threads=1, page_size=4,
        max_num_seqs=4, max_num_batched_tokens=48, kv_cache_memory_bytes=kib * 2**10, swap_space=0.0002,
    )  # fmt: skip


def requests_for(model: Path, count: int) -> list[GenerateRequest]:
    """Greedy and seeded, with penalties, bias, stop tokens, several choices, logprobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "FORM_SHARE", 0.0)
        found = identity.random_requests(SEED, count, load_text(model, tokenizer=""), VOCAB_SIZE, CONTEXT_LEN)
    for number, request in enumerate(found):
        if number % 2:
            params = msgspec.structs.replace(request.params, logit_bias=dict.fromkeys(LIKELY, 60.0))
            found[number] = msgspec.structs.replace(request, params=params)
    return found


def requests_with_grammars(model: Path) -> list[GenerateRequest]:
    text = load_text(model, tokenizer="")
    grammar = grammar_of({"regex": "([a-f]{3}-){5}x"}, text.vocabulary)
    params = SamplingParams(seed=3, max_tokens=450, logprobs=1, grammar=grammar)
    return [
        GenerateRequest(
            f"grammar{number}", [7, 8, number], msgspec.structs.replace(params, temperature=temperature), []
        )
        for number, temperature in enumerate((0.0, 0.9))
    ]


def answers(llm: LLM, requests: Sequence[GenerateRequest], drafts: bool = True) -> Answers:
    """Of requests that come one after the other."""
    r, loop = random.Random(1), llm._loop
    found: Answers = defaultdict(lambda: ([], [], []))
    waiting = list(requests)
    while waiting or loop.has_work:
        if waiting and (r.random() < 0.7 or not loop.has_work):
            request = waiting.pop(0)
            params = msgspec.structs.replace(request.params, use_speculation=drafts)
            loop.add(msgspec.structs.replace(request, params=params))
        for delta in loop.step():
            tokens, logprobs, ends = found[delta.request_id, delta.index]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            ends += [] if delta.finish is None else [(delta.finish.reason, delta.finish.stop_token)]
    return found


def drafts_of(results: list[StepResult]) -> tuple[list[int], list[int]]:
    """(tokens of each draft, tokens that each brought)."""
    return [n for each in results for n in each.drafted], [n for each in results for n in each.runs]


@pytest.fixture(scope="module")
def itself(folders: Path) -> Iterator[tuple[LLM, Answers]]:
    """An engine in which a model drafts for itself, and answers without drafts."""
    model = folders / "llama"
    with two_ranks(model, drafting("draft_model", model), kib=3 * 140) as llm:
        results = results_of(llm)
        plain = answers(llm, [*requests_for(model, COUNT), *requests_with_grammars(model)], drafts=False)
        assert llm._loop.scheduler.num_preemptions > 0
        assert not any(result.drafted for result in results)
        yield llm, plain


def part_of(plain: Answers, found: Answers) -> Answers:
    return {key: plain[key] for key in found}


def test_what_the_model_drafts_for_itself_is_always_right(folders: Path, itself: tuple[LLM, Answers]):
    model, (llm, plain) = folders / "llama", itself
    results, before = results_of(llm), llm._loop.scheduler.num_preemptions
    found = answers(llm, requests_for(model, COUNT))
    assert found == part_of(plain, found)
    drafted, runs = drafts_of(results)
    assert sum(drafted) > 100 and runs == [1 + count for count in drafted]
    assert llm._loop.scheduler.num_preemptions > before
    for _ in range(40):  # on a busy machine, masks of drafted tokens come late
        results = results_of(llm)
        found = answers(llm, requests_with_grammars(model))
        assert found == part_of(plain, found)
        drafted, runs = drafts_of(results)
        if sum(runs) - len(runs) > 5:
            break
    else:
        pytest.fail("no draft counts under a grammar")


def test_what_a_grammar_forces_is_drafted_on_all_ranks_alike(folders: Path):
    """Each rank has grammar processes of its own, which look for forced stretches in their own time."""
    model = folders / "llama"
    grammar = grammar_of(
        {"regex": "(yes|no), and that is all there is to say(, (yes|no), again and again)?"},
        load_text(model, tokenizer="").vocabulary,
    )
    params = SamplingParams(max_tokens=300, logprobs=1, grammar=grammar)
    requests = [
        GenerateRequest(f"forced{n}", [9, n], msgspec.structs.replace(params, seed=n, temperature=0.5 * n), [])
        for n in range(4)
    ]  # fmt: skip
    with two_ranks(model, drafting("ngram"), kib=3 * 140) as llm:
        plain = answers(llm, requests, drafts=False)
        for _ in range(40):  # on a busy machine, masks come late
            results = results_of(llm)
            found = answers(llm, requests)
            assert found == plain
            _, runs = drafts_of(results)
            if sum(runs) - len(runs) > 20:
                break
        else:
            pytest.fail("a grammar drafts nothing that counts")


def test_both_are_counted_on_each_rank(folders: Path, itself: tuple[LLM, Answers]):
    with LLM(str(folders / "llama"), speculative_config=NO_DRAFTS, device="cpu", cpu_threads=1, page_size=4) as llm:
        one = llm.report
    two = itself[0].report
    assert two.page_bytes == 2 * one.page_bytes, "of the model and of the draft model, each divided"
    assert 1.0 < two.weights_bytes / (2 * one.weights_bytes) < 1.1, "norms are whole on each rank"
    assert any("of weights, 768 bytes of each KV page" in note for note in two.notes), two.notes
    assert min(two.one_row_seconds, two.verify_seconds, two.draft_seconds) > 0, "else no draft would pay"


def check_head(llm: LLM, reference: Eagle3Reference | MTPReference) -> None:
    """Compare how much of each draft of an answer counts with how much would of what the reference drafts."""
    results, prompt = results_of(llm), [7, 1, 200, 31, 5]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys(LIKELY, 60.0))
    tokens = prompt + llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    end, checked = len(prompt), []
    for result in results:
        (run,) = result.runs or [1]
        if sum(result.drafted):
            with torch.inference_mode():
                expected, _ = reference.drafts(tokens[:end], result.drafted[0], LIKELY)
            pairs = zip(expected, tokens[end:], strict=False)
            right = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(expected))
            assert run == 1 + right, f"behind {end} tokens"
            checked.append(right)
        end += run
    assert end == len(tokens) and len(checked) > 8 and 0 in checked and max(checked) > 1, checked


def test_an_eagle3_head(folders: Path, itself: tuple[LLM, Answers]):
    model, head = folders / "llama", folders / "head"
    with two_ranks(model, drafting("eagle3", head), kib=13 * 140) as llm:
        found = answers(llm, requests_for(model, COUNT)[:3])
        assert found == part_of(itself[1], found)
        check_head(llm, Eagle3Reference(model, head))
        more = llm.report.page_bytes - itself[0].report.page_bytes // 2
    assert more == 2 * 4 * 4 * (2 * 12 + 32), "on each rank, keys and values of one of two heads, and a whole feature"


def test_an_mtp_head(folders: Path):
    model = folders / "deepseek"
    with two_ranks(model, drafting("mtp"), kib=13 * 140) as llm:
        requests = requests_for(model, 2)
        results = results_of(llm)
        plain = answers(llm, requests, drafts=False)
        assert not any(result.drafted for result in results)
        assert answers(llm, requests) == plain
        assert sum(drafts_of(results)[0]) > 15
        check_head(llm, MTPReference(model))


def test_what_ranks_cannot_divide_is_refused(folders: Path, tmp_path: Path):
    """By its name, and before any weights are read."""
    model, draft, head = local(folders / "llama"), tmp_path / "draft", tmp_path / "head"
    shutil.copytree(model.path, draft)
    changed(draft, num_attention_heads=1, num_key_value_heads=1)
    shutil.copytree(folders / "head", head)
    changed(head, transformer_layer_config={"num_attention_heads": 3, "num_key_value_heads": 3})
    for speculative, problem in (
        (drafting("draft_model", draft), "draft model draft: .*num_attention_heads 1, num_key_value_heads 1; sizes"),
        (drafting("eagle3", head), "EAGLE-3 head head: .*num_attention_heads 3, num_key_value_heads 3; sizes"),
    ):
        loader = Loader(tiny_config(speculative_config=speculative, tensor_parallel_size=2), model, first_of_two())
        checkpoint = loader.open()
        with pytest.raises(ConfigError, match=problem):
            loader.choose(checkpoint)
    speculative = drafting("draft_model", model.path, draft_tensor_parallel_size=1)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size 1 is not --tensor-parallel-size 2: leave it out"):
        Loader(tiny_config(speculative_config=speculative, tensor_parallel_size=2), model).open()


def changed(folder: Path, **values: object) -> None:
    """Change values of a config.json; those in a dictionary within it too."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in values.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))


def first_of_two() -> Ranks:
    """As rank 0 of two sees itself, before it talks to the other."""
    group = Group.single()
    group.size = 2
    return Ranks(group, NO_LINKS, 0, 1, group)
