"""Answers that keep to a grammar, from weights that are chance: whatever else a request asks for, whoever runs beside it.
Every finished answer is judged by jsonschema, or by Python's own regexes."""

import json
import re
import threading
import time
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.sampling.grammar import masks
from octavo.sampling.grammar.row_processes import GrammarLimits
from octavo.schedule.results import Committed
from octavo.text.grammar.build import schema_grammar
from octavo.text.grammar.keywords import FORMATS
from tests.doubles import write_byte_tokenizer
from tests.schemas import PEOPLES, peoples, suite
from tests.worker.tiny import write_tiny_llama

VOCAB = 1200
MODEL_VOCAB = 1237  # a few logits stand for no token, as makers like to pad
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**22,
    "max_num_seqs": 32,
    "page_size": 4,
    "dtype": "float32",
    "cpu_threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary that was learned from JSON: its tokens run across the borders of what a schema asks for."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_llama(folder, seed=5, vocab_size=MODEL_VOCAB)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        json.dumps(schema, indent=indent) for schema in [*peoples().values(), *suite().values()] for indent in (1, None)
    ]
    words.train_from_iterator(texts, trainer)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def asks(seed: int = 0, max_tokens: int = 120, **values: Any) -> SamplingParams:
    wish = {key: values.pop(key) for key in (*StructuredOutputsParams.__annotations__,) if key in values}
    return SamplingParams(
        **{"temperature": 2.0, "seed": seed, "max_tokens": max_tokens, "structured_outputs": wish or None, **values}
    )


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers
    formats = jsonschema.FormatChecker(
        [name for name in FORMATS if name in jsonschema.FormatChecker.checkers and name in checkers]
    )
    return jsonschema.Draft202012Validator(schema, format_checker=formats)


HIDDEN_WORD = {"type": "object", "patternProperties": {"[a-z]cole": True}, "additionalProperties": False}


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
def test_every_finished_answer_validates(folder, monkeypatch, native):
    """More than 300 schemas, 32 at once. So does one that had to end because of max_tokens, and it says that it had to."""
    monkeypatch.setenv("OCTAVO_NATIVE", native)
    with LLM(str(folder), **OPTIONS) as llm:
        schemas = [schema for name, schema in peoples().items() if name != "draft 7 tuple"]
        for schema in suite().values():
            try:
                schema_grammar(schema, llm.text.vocabulary, field=Field("schema"))
            except (InvalidRequest, Unsupported):
                continue
            if "\\p" not in str(schema) and "\\" not in str(schema):  # patterns that Python reads otherwise
                schemas.append(schema)
        assert len(schemas) > 300
        if native == "0":
            schemas = schemas[::6]
        params = [asks(number, json=schema) for number, schema in enumerate(schemas)]
        outputs = llm.generate([f"Form {number}: " for number in range(len(schemas))], params, use_tqdm=False)
    num_finished, broken = 0, []
    for schema, output in zip(schemas, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason in ("stop", "length")
        num_finished += answer.finish_reason == "stop"
        try:
            validator(schema).validate(json.loads(answer.text))
        except ValueError:
            assert answer.finish_reason == "length" and len(answer.token_ids) == 120
            broken.append(schema)
    # All of the others have an end in reach, and come to it. Of this one the search does not find the word that a name must hold.
    assert all(schema == HIDDEN_WORD for schema in broken), broken
    assert num_finished > 0.7 * len(schemas)


LONG = {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(22)}, "additionalProperties": False,
        "required": [f"f{n}" for n in range(22)]}  # fmt: skip


def test_many_required_fields_are_all_there_in_the_end(llm):
    """Its shortest answer is so long that its end is looked for from the beginning: chance would fill the first field."""
    for seed in range(3):
        answer = one(llm, asks(seed, 240, json=LONG))
        validator(LONG).validate(json.loads(answer.text))
        assert answer.finish_reason == "length"
    processes = llm._loop.executor._runner.rows.sampling.grammars._processes._by_grammar
    assert max(process.looks_from for process in processes.values()) > 192


def one(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> Any:
    (output,) = llm.generate([prompt or "Say it: "], params, use_tqdm=False)
    return output.outputs[0]


def test_other_forms_are_kept_to(llm):
    for seed in range(6):
        assert re.fullmatch(r"[a-c]{2,5}-\d", one(llm, asks(seed, regex=r"[a-c]{2,5}-\d")).text)
        assert one(llm, asks(seed, choice=["yes", "no", "perhaps not"])).text in ("yes", "no", "perhaps not")
        for max_tokens in (8, 20, 40):
            answer = one(llm, asks(seed, max_tokens, json_object=True))
            assert isinstance(json.loads(answer.text), dict)
            assert answer.finish_reason == "stop" or max_tokens - 4 <= len(answer.token_ids) <= max_tokens
        answer = one(llm, asks(seed, grammar='root ::= "a" ("b" | "c")* "d"'))
        assert answer.finish_reason == "length" or re.fullmatch("a[bc]*d", answer.text)
        answer = one(llm, asks(seed, json_object=True, temperature=0.7))
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_neighbours_do_not_notice(llm):
    """Alone, beside a grammar, and beside a grammar that comes and goes: the same tokens."""
    plain = [asks(seed, 40) for seed in range(5)]
    plain += [asks(9, 40, temperature=0.0), asks(3, 40, repetition_penalty=1.4), asks(4, 40, logprobs=2)]
    prompts = [[seed + 1, 7, seed * 3 + 2] for seed in range(len(plain))]
    alone = [one(llm, params, prompt).token_ids for params, prompt in zip(plain, prompts, strict=True)]
    mixed_params, mixed_prompts = [], []
    for at, (params, prompt) in enumerate(zip(plain, prompts, strict=True)):
        mixed_params += [params, asks(at, 30, json=PEOPLES["person"])]
        mixed_prompts += [prompt, [at + 50]]
    together = llm.generate(mixed_prompts, mixed_params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together[::2]] == alone


def test_nobody_waits_while_a_grammar_is_compiled(llm):
    """Its compiler is held up: who runs goes on, who comes later enters, and who needs it waits for nothing else."""
    loop, is_compiled = llm._loop, threading.Event()
    grammars = llm._loop.executor._runner.rows.sampling.grammars
    requests = [llm._request([at + 1], asks(at, 60)) for at in range(2)]
    needs = llm._request([9], asks(2, 60, regex="[ab]{7}(compiled|late)"))
    held, _ = [grammars._processes._pool.submit(is_compiled.wait, 10) for _ in range(2)]  # all of its threads
    loop.add(requests[0])
    loop.step()
    loop.add(needs)
    loop.add(requests[1])
    deltas = [delta for _ in range(8) for delta in loop.step()]
    assert not held.done(), "a step waited"
    assert {delta.request_id for delta in deltas} == {request.id for request in requests}
    assert len(loop.scheduler.awaiting_grammar) == 1 and loop.scheduler.num_waiting == 1
    (journal,) = [observer for observer in loop.observers if isinstance(observer, EngineJournal)]
    (journey,) = journal.open_parts(loop.scheduler.requests(), time.monotonic(), needs.id)
    assert [wait.reason for wait in journey.tracks[0].stages[0].waits] == ["grammar"]
    is_compiled.set()
    tokens: list[int] = []
    is_over = False
    while not is_over or loop.has_work:  # a step in which all are aside waits until one is not
        for delta in loop.step():
            if delta.request_id == needs.id:
                tokens += delta.token_ids
                is_over |= delta.finish is not None
    assert re.fullmatch("[ab]{7}(compiled|late)", llm.text.decode(tokens, skip_special_tokens=True))


def test_an_answer_does_not_depend_on_who_runs_beside_it(llm):
    params = [asks(seed, 60, json=schema) for seed, schema in enumerate(list(PEOPLES.values())[:8])]
    params = [p for p in params if p.structured_outputs["json"] is not PEOPLES["draft 7 tuple"]]
    prompts = [[seed + 3] * (1 + seed) for seed in range(len(params))]
    alone = [one(llm, p, prompt).token_ids for p, prompt in zip(params, prompts, strict=True)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone


def test_a_request_that_left_its_row_goes_on_where_it_was(folder, llm):
    """Few pages: requests are preempted, computed again or swapped, and end as if they had not been."""
    params = [asks(seed, 60, json=PEOPLES["many of a kind" if seed % 2 else "person"]) for seed in range(10)]
    prompts = [[seed + 1, 2, 3, 4, 5] for seed in range(10)]
    calm = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    page_bytes = llm.report.page_bytes
    for swap_space in (0.0, 0.01):
        options = {**OPTIONS, "kv_cache_memory_bytes": 40 * page_bytes, "swap_space": swap_space}
        with LLM(str(folder), max_model_len=128, **options) as small:
            crowded = small.generate(prompts, params, use_tqdm=False)
            assert small.engine_stats()["preemptions"] > 0
        assert [output.outputs[0].token_ids for output in crowded] == calm


def test_each_of_several_choices_has_a_grammar_of_its_own(llm):
    (output,) = llm.generate(["One, two: "], asks(4, 100, json=PEOPLES["shapes"], n=6), use_tqdm=False)
    texts = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert len({*texts}) > 1
    for text in texts:
        validator(PEOPLES["shapes"]).validate(json.loads(text))


def test_an_answer_ends_where_its_grammar_does(llm):
    """Neither min_tokens nor ignore_eos makes it longer than the grammar; both make it as long as that allows."""
    assert one(llm, asks(json={"const": 7}, ignore_eos=True)).finish_reason == "stop"
    answer = one(llm, asks(json={"const": [7, 8]}, min_tokens=100))
    assert json.loads(answer.text) == [7, 8] and answer.finish_reason == "stop"
    for seed in range(4):
        answer = one(llm, asks(seed, 60, regex="[a-z]{1,30}", min_tokens=12))
        assert len(answer.token_ids) > 12 or len(answer.text) == 30
        assert one(llm, asks(seed, 90, regex="[a-z]{1,30}", ignore_eos=True)).text[29:]
    assert one(llm, asks(max_tokens=3, regex="a{50}")).finish_reason == "length"


def test_a_short_answer_is_the_models_own_and_whole(llm):
    """With room for hardly a token, all that fits is left to choose from. Who was narrowed or ended by the limit says `length`."""
    choice = ["a", "b", "cc", "no such answer has room"]
    for max_tokens in (1, 2, 3):
        answers = [one(llm, asks(seed, max_tokens, choice=choice)) for seed in range(12)]
        assert {"a", "b"} <= {answer.text for answer in answers} <= {*choice[:3]}
        assert {answer.finish_reason for answer in answers} == {"length"}
    assert {one(llm, asks(seed, 2, choice=["a", "b"])).finish_reason for seed in range(6)} == {"stop"}
    for max_tokens in (1, 2, 3, 4, 5, 6):
        for seed in range(4):
            answer = one(llm, asks(seed, max_tokens, regex="(ab|cde)*", ignore_eos=seed % 2 == 0))
            assert re.fullmatch("(ab|cde)*", answer.text) and len(answer.token_ids) <= max_tokens
    answer = one(llm, asks(0, 1, regex="(xqj)*", skip_special_tokens=False))  # no token is all of it
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("", "length", [])


def test_stops_bans_bias_and_penalties_within_a_grammar(llm):
    """A stop ends an answer where it comes. A ban yields where the grammar leaves nothing else."""
    answer = one(llm, asks(regex="[ab]{40}", stop=["b"], temperature=0.0, logit_bias={66: 5.0}))
    assert answer.finish_reason == "stop" and set(answer.text) <= {"a"}
    word = llm.text.encode("x", add_special_tokens=False)
    assert one(llm, asks(choice=["x"], bad_words=["x"])).text == "x"
    assert one(llm, asks(choice=["x"], allowed_token_ids=[token + 1 for token in word])).text == "x"
    assert one(llm, asks(choice=["x", "y"], bad_words=["x"])).text == "y"
    for values in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"top_k": 3},
        {"top_p": 0.4},
    ):
        answer = one(llm, asks(json=PEOPLES["person"], **values))
        if answer.finish_reason == "stop":
            validator(PEOPLES["person"]).validate(json.loads(answer.text))


def test_logprobs_are_the_models_own(llm):
    """The grammar changes what is chosen, not what the model thought of it."""
    free = one(llm, asks(temperature=0.0, max_tokens=1, logprobs=3))
    bound = one(llm, asks(temperature=0.0, max_tokens=1, logprobs=3, choice=["zz"]))
    assert bound.text == "z" or bound.text == "zz"
    chosen = bound.logprobs[0].pop(bound.token_ids[0])
    assert chosen.rank > 3 and len(bound.logprobs[0]) == 3
    assert {token: entry.logprob for token, entry in free.logprobs[0].items()} == {
        token: entry.logprob for token, entry in bound.logprobs[0].items()
    }


def test_a_stop_id_that_is_no_text_may_end_a_grammar(llm):
    turn = llm.text.encode("<|turn|>")[0]
    ends = {one(llm, asks(seed, regex="ab?", stop_token_ids=[turn])).stop_reason for seed in range(40)}
    assert turn in ends and None in ends


def test_words_that_no_token_can_say_fail_alone(tmp_path):
    """A vocabulary without the byte that a grammar asks for: that request ends with an error, its neighbour with its answer."""
    write_tiny_llama(tmp_path, vocab_size=258)
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["zz"] = vocabulary.pop("z")  # no token is a z alone
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        wishes = [asks(choice=["az"], max_tokens=8), asks(choice=["ab"], max_tokens=8), asks(max_tokens=8)]
        with pytest.raises(InvalidRequest, match="grammar"):
            llm.generate([[1]], wishes[0], use_tqdm=False)
        good = llm.generate([[1], [2]], wishes[1:], use_tqdm=False)
        assert good[0].outputs[0].text == "ab" and len(good[1].outputs[0].token_ids) <= 8


def test_what_cannot_be_kept_to_is_refused(llm, tmp_path):
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex"):
        llm.generate([[1]], asks(regex="("), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="exactly one of"):
        llm.generate([[1]], asks(regex="a", choice=["b"]), use_tqdm=False)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks want two GPUs, or none")
def test_two_ranks_keep_to_a_grammar_alike(folder, llm):
    params = [asks(seed, 40, json=PEOPLES["person"]) for seed in range(3)]
    prompts = [[seed + 1, 7] for seed in range(3)]
    single = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as two:
        assert [output.outputs[0].token_ids for output in two.generate(prompts, params, use_tqdm=False)] == single


@pytest.mark.parametrize(
    ("schema", "max_tokens"), [(PEOPLES["many of a kind"], 60), (LONG, 240)], ids=["short", "long"]
)
def test_an_engine_that_takes_a_request_over_goes_on_where_it_was(llm, schema, max_tokens):
    """Another engine gets the prompt and the tokens so far, and nothing of the matcher that saw them."""
    params, prompt = asks(8, max_tokens, json=schema), [5, 6, 7]
    whole = one(llm, params, prompt).token_ids
    for cut in (1, len(whole) // 2, len(whole) - 1):
        request = msgspec.structs.replace(llm._request(prompt, params), begun=[whole[:cut]])
        deltas: list[TokenDelta] = []
        llm._loop.add(request)
        while not deltas or deltas[-1].finish is None:
            deltas += llm._loop.step()
        assert whole[:cut] + [token for delta in deltas for token in delta.token_ids] == whole


HEAD = '%llguidance {"no_forcing": true}\n'
SLOW = HEAD + "start: /[a-z]/ rest\nrest: " + " | ".join(['"q"'] * 12_000)  # its second mask takes tenths of a second


def with_grammar(llm: LLM, prompt: list[int], params: SamplingParams, grammar: str) -> GenerateRequest:
    """A request with a grammar that no API process has checked."""
    request = llm._request(prompt, params)
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))


def run_to_end(llm: LLM, requests: list[GenerateRequest]) -> dict[str, tuple[list[int], Finish]]:
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    ends: dict[str, Finish] = {}
    for request in requests:
        llm._loop.add(request)
    while len(ends) < len(requests):
        for delta in llm._loop.step():
            tokens[delta.request_id] += delta.token_ids
            if delta.finish is not None:
                ends[delta.request_id] = delta.finish
    return {name: (tokens[name], ends[name]) for name in tokens}


class LateSteps(StepObserver):
    """Counts the tokens that did not count."""

    def __init__(self) -> None:
        self.num_late = 0

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self.num_late += len(committed.result.late)


def test_answers_do_not_depend_on_which_masks_are_late(folder, llm, monkeypatch):
    """No step waits for a mask, so that most are late, beside steps that are planned ahead and preemptions: the same tokens."""
    params = [asks(seed, 40, json=PEOPLES["many of a kind" if seed % 2 else "person"]) for seed in range(9)]
    params += [asks(9, 40), asks(3, 40, json=PEOPLES["shapes"], logprobs=2, n=2), asks(5, 30, regex="[a-z ]{60}")]
    prompts = [[seed + 1, 2, 3, 4, 5] for seed in range(len(params))]
    calm = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(masks, "_LEAST_WAIT", 0.0)
    monkeypatch.setattr(masks, "_WAIT_ALONE", 0.0)
    for num_pages in (400, 40):
        options = {**OPTIONS, "kv_cache_memory_bytes": num_pages * llm.report.page_bytes}
        with LLM(str(folder), max_model_len=128, **options) as hasty:
            grammars = hasty._loop.executor._runner.rows.sampling.grammars
            grammars._limits = GrammarLimits(most_wait=0.0)
            grammars._credit = 0.0
            hasty._loop.observers.add(late_steps := LateSteps())
            hurried = hasty.generate(prompts, params, use_tqdm=False)
            assert late_steps.num_late > 100 and (num_pages > 100 or hasty.engine_stats()["preemptions"] > 0)
        for one_output, other in zip(calm, hurried, strict=True):
            for mine, theirs in zip(one_output.outputs, other.outputs, strict=True):
                assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
                assert mine.logprobs == theirs.logprobs


def test_a_slow_grammar_holds_up_only_itself(llm):
    """Its second mask takes longer than a step may wait. Its neighbours' tokens are what they would have been, and go on coming."""
    plain = [llm._request([at + 1], asks(at, 100)) for at in range(3)]
    alone = run_to_end(llm, plain)
    again = [llm._request([at + 1], asks(at, 100)) for at in range(3)]
    slow = with_grammar(llm, [9], asks(1, 60), SLOW)
    llm._loop.observers.add(late_steps := LateSteps())
    beside = run_to_end(llm, [slow, *again])
    llm._loop.observers.remove(late_steps)
    assert late_steps.num_late > 0
    assert [beside[request.id][0] for request in again] == [alone[request.id][0] for request in plain]
    tokens, finish = beside[slow.id]
    # What follows is more than a row of the parser may hold.
    assert finish.reason == "error" and "items" in finish.message and len(tokens) == 1


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks want two GPUs, or none"))])  # fmt: skip
def test_a_grammar_that_takes_too_long_fails_alone(folder, llm, num_ranks):
    forever = HEAD + 'start: "a" start | ' + " | ".join(f"r{n}" for n in range(1500)) + "\n"
    forever += "".join(f'r{n}: as "b{n}"\n' for n in range(1500)) + 'as: "a" as | "a" "c"\n'
    options = {**OPTIONS, "grammar_step_seconds": 0.2, "tensor_parallel_size": num_ranks}
    with LLM(str(folder), **options) as small:
        # Greedy, and fond of the letter: each token adds as many items as there are rules.
        letter = small.text.encode("a", add_special_tokens=False)[0]
        wish = asks(temperature=0.0, max_tokens=200, logit_bias={letter: 100.0})
        bad, good = with_grammar(small, [9], wish, forever), small._request([3], asks(3, 60, json=PEOPLES["person"]))
        found = run_to_end(small, [bad, good])
        assert found[bad.id][1].reason == "error" and "--grammar-step-seconds" in found[bad.id][1].message
        assert found[good.id][0] == one(llm, asks(3, 60, json=PEOPLES["person"]), [3]).token_ids


def test_an_object_with_many_optional_properties(llm):
    """More items in a row of the parser than its default limit."""
    names = [f"p{n}" for n in range(510)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": False,
    }
    request = with_grammar(llm, [4], asks(2, 60), HEAD + "start: %json " + json.dumps(schema))
    tokens, finish = run_to_end(llm, [request])[request.id]
    assert finish.reason in ("stop", "length")
    validator(schema).validate(json.loads(llm.text.decode(tokens)))


PLAIN = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}, "additionalProperties": False,
         "required": ["name", "size"]}  # fmt: skip
CHOICES = {
    "anyOf": [
        PLAIN,
        {"type": "object", "properties": {"state": {"enum": ["unavailable", "gone"]}, "at": {"type": ["array", "null"]}},
         "required": ["state", "at"], "additionalProperties": False},
    ]
}  # fmt: skip


# Parts that say different things of the same value, and one whose shortest value is searched for: its pattern is not read.
JOINED = {
    "$ref": "#/$defs/named",
    "properties": {"kind": {"enum": ["a", "b"]}, "code": {"type": "string", "pattern": r"^[^\x00-\x7f]{3}$"}},
    "required": ["kind", "code"],
    "if": {"properties": {"kind": {"const": "a"}}},
    "then": {"required": ["size"]},
    "else": {"required": ["weight"]},
    "$defs": {"named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


@pytest.mark.parametrize("schema", [PLAIN, CHOICES, JOINED], ids=["plain", "choices", "joined"])
def test_a_limit_without_room_for_the_shortest_answer_is_refused_with_what_it_takes(llm, schema):
    with pytest.raises(InvalidRequest, match=r"the shortest one that the grammar allows takes [0-9]+ tokens") as error:
        one(llm, asks(max_tokens=2, json=schema))
    needed = int(re.search("takes ([0-9]+) tokens", str(error.value))[1])
    for seed in range(4):
        validator(schema).validate(json.loads(one(llm, asks(seed, needed, json=schema)).text))


@pytest.mark.parametrize(
    "items", [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 9}, {"type": "number"}, {}]
)
def test_items_differ_in_every_choice_and_at_every_limit(llm, items):
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 3}
    params = [asks(seed, max_tokens, json=schema, n=2) for seed, max_tokens in ((1, 30), (2, 60))]
    for request in llm.generate(["a", "b"], params):
        for choice in request.outputs:
            validator(schema).validate(json.loads(choice.text))
