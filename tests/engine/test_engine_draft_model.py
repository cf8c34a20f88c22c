"""A draft model beside the model: its pages stay right in all that happens to pages, and what cannot be is refused with one sentence.

A model that drafts for itself is always right if its pages are: on a CPU no bit depends on how tokens are divided into steps."""

import json
import random

import msgspec
import pytest

from octavo import LLM, LoRARequest
from octavo.config import replace
from octavo.engine.build import start_engine
from octavo.engine.loop import EngineLoop
from octavo.engine.process import start_recorder
from octavo.engine.tier_traffic import TierTraffic
from octavo.errors import ConfigError
from octavo.ipc.launch import EngineLaunch
from octavo.messages import GenerateRequest, SamplingParams
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.recording.format import read
from octavo.replay.recompute import Recomputation
from octavo.replay.replay import Replay
from octavo.sampling.grammar import masks
from octavo.worker.dry_run import DryRun
from octavo.worker.load import Loader
from tests.adapters import write_model, write_peft
from tests.doubles import write_byte_tokenizer
from tests.worker.tiny import disturbed, tiny_config, write_tiny_llama


def drafting(path, **options) -> str:
    return json.dumps({"method": "draft_model", "model": str(path), "num_speculative_tokens": 4, **options})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_llama(folder, vocab_size=258), write_byte_tokenizer(folder)


def results_of(llm: LLM) -> list:
    """The results of the engine's steps, from now on."""
    executor, results = llm._loop.executor, []
    collect = executor.collect

    def noting():
        results.append(collect())
        return results[-1]

    executor.collect = noting
    return results


def run(loop: EngineLoop, seed: int, count: int) -> None:
    """Requests with common prefixes, one to three choices each, some of them continued from others' output."""
    r = random.Random(seed)
    stem = [r.randrange(258) for _ in range(60)]
    outputs: list[list[int]] = []
    prompts: dict[str, list[int]] = {}
    for number in range(count):
        prompt = stem[: r.randrange(60)] + [r.randrange(258) for _ in range(r.randrange(1, 12))]
        if outputs and number % 3 == 0:
            prompt = [*r.choice(outputs)[:90], r.randrange(258)]
        sampling = {"temperature": r.choice([0.0, 0.8, 1.5]), "presence_penalty": r.choice([0.0, 0.7])}
        params = SamplingParams(n=r.choice([1, 1, 2, 3]), seed=number, max_tokens=r.randrange(1, 30), **sampling)
        prompts[f"r{number}"] = prompt
        loop.add(GenerateRequest(f"r{number}", prompt, params, [5]))
        for _ in range(r.randrange(8)):
            for delta in loop.step():
                outputs.append(prompts[delta.request_id] + delta.token_ids)
    while loop.has_work:
        loop.step()


@pytest.mark.parametrize(
    ("rows", "is_eager"), [(3, False), (8, False), (3, True)], ids=["few rows", "steps on a thread", "without tapes"]
)
def test_what_the_model_drafts_for_itself_is_always_right(source, rows, is_eager):
    model = str(source[0].path)
    options = {"page_size": 4, "max_num_seqs": rows, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 240 * 2048}
    if rows == 3:
        options |= {"kv_cache_memory_bytes": 70 * 2048, "swap_space": 0.0002, "enforce_eager": is_eager}
    with LLM(model, speculative_config=drafting(model, adaptive=False), cpu_threads=1, **options) as llm:
        results = results_of(llm)
        run(llm._loop, rows, 60)
        scheduler = llm._loop.scheduler
        assert scheduler.cache.hit_tokens > 200
        assert scheduler.num_preemptions > 5 or rows == 8
    drafted = [count for result in results for count in result.drafted]
    runs = [count for result in results for count in result.runs]
    assert runs == [1 + count for count in drafted], "a wrong key or value was read"
    assert sum(drafted) > 300
    assert sum(result.draft_work.caught_up for result in results if result.draft_work is not None) > 300


def test_it_catches_up_in_parts(source):
    """Beside streams, a long prompt is computed in as many steps as the limit asks for; meanwhile the row goes on without drafts."""
    model = str(source[0].path)
    with LLM(
        model, speculative_config=drafting(model, adaptive=False), max_inter_token_ms=0.001, page_size=4,
        max_num_seqs=1, max_num_batched_tokens=512, kv_cache_memory_bytes=2**18, cpu_threads=1,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for length in (1, 9, 30):  # until it is known what steps cost
            llm.generate([[7] * length], params, use_tqdm=False)
        assert llm._loop.scheduler.costs is not None
        results = results_of(llm)
        for text in ([1, 2] * 30, [1, 2] * 30 + [3]):
            llm.generate([text], params, use_tqdm=False)
    drafted = [count for result in results for count in result.drafted]
    num_first = drafted.index(4)
    assert num_first >= 3, "three steps of 16 tokens at most, then the rest"
    assert drafted[:num_first] == [0] * num_first and 0 not in drafted[num_first:], (
        "the second finds what the first has"
    )


def test_pages_from_a_tier_are_computed_again(source, tmp_path, monkeypatch):
    """A tier has no pages of a draft model."""
    monkeypatch.setattr(TierTraffic, "_compute_seconds", lambda self, start, count: float("inf"))
    model, params = str(source[0].path), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    options = {"speculative_config": drafting(model, adaptive=False), "kv_tier": f"disk:64MiB:{tmp_path / 'tier'}"}
    prompt, other = list(range(60)), list(range(80, 140))
    for _ in range(2):
        with LLM(model, block_size=4, kv_cache_memory_bytes=18 * 2048, cpu_threads=1, **options) as llm:
            longer = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            llm.generate([other], longer, use_tqdm=False)  # so that all pages hold something else
            results = results_of(llm)
            found = llm.generate([prompt], params, use_tqdm=False)[0]
            num_loaded = llm._loop.tier.stats.loaded_pages
    assert num_loaded > 10 and found.num_cached_tokens > 40
    assert all(run == 1 + count for result in results for run, count in zip(result.runs, result.drafted, strict=True))
    assert sum(result.draft_work.caught_up for result in results if result.draft_work is not None) >= len(prompt) - 1


def test_memory_counts_both(source, tmp_path):
    """Weights and pages of both are in the report, and in what the checks before a start say."""
    model = source[0]
    draft = write_tiny_llama(tmp_path / "draft", seed=3, vocab_size=258, num_layers=1)
    write_byte_tokenizer(tmp_path / "draft")
    plain, with_draft = (
        tiny_config(kv_cache_memory_bytes=2**20, speculative_config=config)
        for config in ('{"method": "none"}', drafting(draft.path))
    )
    sizes = []
    for config in (plain, with_draft):
        engine = start_engine(config, model, "tiny")
        report = engine.report
        dry_run = DryRun(config, model)
        dry_run.configuration(), dry_run.arithmetic(), dry_run.tensors()
        needs = dry_run.needs()
        assert needs.page_bytes == report.page_bytes
        sizes.append((report.weights_bytes, report.page_bytes, report.num_pages, needs.weights_bytes))
        engine.loop.close()
    alone = start_engine(plain, draft, "tiny")
    alone.loop.close()
    assert sizes[1][0] == sizes[0][0] + alone.report.weights_bytes
    assert sizes[1][1] == sizes[0][1] + alone.report.page_bytes
    dry_run = DryRun(plain, draft)
    dry_run.configuration(), dry_run.arithmetic()
    assert sizes[1][3] == sizes[0][3] + dry_run.needs().weights_bytes
    assert sizes[1][2] == sizes[0][2] * 2 // 3, "the same bytes for pages that take half as much again"
    assert report.draft_len == 128 and any("draft model draft: " in note for note in report.notes)


def test_beyond_its_context_it_does_not_draft(source, tmp_path):
    draft = disturbed(source[0], tmp_path / "short", 0.0)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    model, params = str(source[0].path), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(model, speculative_config=drafting(draft, adaptive=False), cpu_threads=1) as llm:
        results = results_of(llm)
        with_drafts = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(model, speculative_config='{"method": "none"}', cpu_threads=1) as llm:
        assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == with_drafts
    drafted = [sum(result.drafted) for result in results]
    assert sum(drafted) == sum(run - 1 for result in results for run in result.runs), "each of them counts"
    assert 24 <= sum(drafted) <= 37 and drafted[-20:] == [0] * 20


def test_requests_may_do_without(source):
    model = str(source[0].path)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, use_speculation=False)
    with LLM(model, speculative_config=drafting(model, adaptive=False), cpu_threads=1) as llm:
        results = results_of(llm)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        metrics = next(each for each in llm._loop.observers if isinstance(each, EngineMetrics))
        assert len(results) == 9 and not any(result.drafted for result in results) and not metrics.draft_tokens
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert metrics.draft_tokens == metrics.accepted_tokens == 6, "four, and two before the last"


def test_a_prediction_is_drafted_beside_it(source):
    """In one step: drafts of the plan, and of the model."""
    model, prompts = str(source[0].path), [[1, 2, 3], [4, 5, 6]]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=21, ignore_eos=True)
    with LLM(model, speculative_config=drafting(model, adaptive=False), cpu_threads=1) as llm:
        plain = llm.generate(prompts, msgspec.structs.replace(params, use_speculation=False), use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in plain]
        predicted = msgspec.structs.replace(params, prediction_ids=(*tokens[0][:6], 7, 7))
        results = results_of(llm)
        again = llm.generate(prompts, [predicted, params], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == tokens
    both = [result for result in results if len(result.drafted) == 2]
    assert both and all(result.runs[1] == 1 + result.drafted[1] for result in both), "the model is right"
    assert any(result.runs[0] > 1 for result in both) and any(result.runs[0] <= result.drafted[0] for result in both)


def test_the_same_tokens_are_computed_from_a_recording(source, tmp_path):
    """The draft model of the replay lacks other pages, so that its drafts may be others: tokens are the same."""
    draft = disturbed(source[0], tmp_path / "draft", 0.01)
    options = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 2**17}
    config = tiny_config(speculative_config=drafting(draft, adaptive=False), record_tokens=True, **options)
    engine, folder = start_engine(config, source[0], "tiny"), tmp_path / "recording"
    folder.mkdir()
    launch = EngineLaunch(config, str(source[0].path), "folder", "tiny", "tiny", "", record_to=str(folder))
    engine.loop.record(start_recorder(launch, engine))
    run(engine.loop, 5, 20)
    engine.loop.close()
    computation = Recomputation(read(folder))
    findings = computation.run()
    assert computation.replay.num_same == computation.replay.num_steps > 20
    assert findings.num_same == findings.num_tokens > 100, findings


@pytest.mark.parametrize("rows", [2, 8], ids=["few rows", "steps on a thread"])
def test_drafts_follow_the_grammar_of_their_row(source, tmp_path, monkeypatch, rows):
    """A model that drafts for itself is right under a grammar, too: each token is drawn by the mask of its position. (Far from max_tokens:
    near it there are no masks ahead.)"""
    monkeypatch.setattr(masks, "_LEAST_WAIT", 60.0)  # on a busy machine, too
    model = disturbed(source[0], tmp_path / "long", 0.0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    schema = {"type": "array", "items": {"enum": ["left", "right", 17]}, "minItems": 6, "maxItems": 9}
    kinds: list[dict] = [{"json": schema}, {"regex": "([a-f]{3}-){9}x"}, {}]
    params = [
        SamplingParams(
            temperature=temperature, seed=3, max_tokens=450 if kind else 40, structured_outputs=kind or None, logprobs=1
        )
        for kind in kinds
        for temperature in (0.0, 0.9)
    ]
    prompts = [[7, 8, number] for number in range(len(params))]
    options = {"page_size": 4, "max_num_seqs": rows, "kv_cache_memory_bytes": 2**20}
    found, results = [], []
    for config in ('{"method": "none"}', drafting(model, adaptive=False)):
        with LLM(str(model), speculative_config=config, cpu_threads=1, **options) as llm:
            results = results_of(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
            near_limit = results_of(llm)
            limited = msgspec.structs.replace(params[0], max_tokens=60)
            found[-1].append(llm.generate([prompts[0]], limited, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]
    assert {count for result in near_limit for count in result.drafted} == {1}, "a longer one could not be verified"
    del results[-len(near_limit) :]
    drafted = sum(count for result in results for count in result.drafted)
    right = sum(count - 1 for result in results for count in result.runs)
    # What lies behind an end is not verified; nor is, on a busy machine, what lies behind a mask that took more than its 5 ms.
    assert drafted > 200 and drafted - right <= len(kinds) * 2 + drafted // 20


def test_an_end_that_a_grammar_forces_beside_a_draft_is_replayed(source, tmp_path, monkeypatch):
    """From a recording without tokens: the stop token counts as no token of the run."""
    monkeypatch.setattr(masks, "_LEAST_WAIT", 60.0)  # on a busy machine, too
    model = source[0]
    config = tiny_config(speculative_config=drafting(model.path, adaptive=False))
    engine = start_engine(config, model, "tiny")
    launch = EngineLaunch(config, str(model.path), "folder", "tiny", "tiny", "", record_to=str(tmp_path))
    engine.loop.record(start_recorder(launch, engine))
    results, collect = [], engine.loop.executor.collect
    engine.loop.executor.collect = lambda: results.append(collect()) or results[-1]
    grammar = '%llguidance {"no_forcing": true}\nstart: /([a-z]+ )*/'
    for number in range(8):
        params = SamplingParams(seed=number, temperature=1.0, max_tokens=29 + number, grammar=grammar)
        engine.loop.add(GenerateRequest(f"r{number}", [number, 2, 3], params, [256]))
    while engine.loop.has_work or not engine.loop.scheduler.is_idle:
        engine.loop.step()
    engine.loop.close()
    assert any(result.last and result.runs and result.tokens[result.last[0]] == 256 for result in results)
    replay = Replay(read(tmp_path))
    for _ in replay.follow():
        pass
    assert replay.num_same == replay.num_steps > 20


def test_what_cannot_be_is_refused(source, tmp_path):
    model = source[0]
    other = write_tiny_llama(tmp_path / "other", vocab_size=200)
    with pytest.raises(
        ConfigError,
        match="draft model other: its vocabulary has 200 tokens and the model's has 258: a draft model must have",
    ):
        start_engine(tiny_config(speculative_config=drafting(other.path)), model, "tiny")
    write_byte_tokenizer(tmp_path / "other")
    renamed = (tmp_path / "other" / "tokenizer.json").read_text()
    text = json.loads(renamed)
    text["model"]["vocab"] = {f"x{piece}": i for piece, i in text["model"]["vocab"].items()}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(
        ConfigError, match=r"draft model other: its \d+ tokens and the 258 of the model differ in \d+ places"
    ):
        start_engine(tiny_config(speculative_config=drafting(other.path)), model, "tiny")
    for given, method in ((drafting(model.path), "draft_model"), ('{"method": "ngram"}', "ngram")):
        with pytest.raises(
            ConfigError, match=f"--pipeline-parallel-size 2: {method} cannot draft for a model that is div"
        ):
            Loader(tiny_config(speculative_config=given, pipeline_parallel_size=2), model).open()
    for given in ("", '{"method": "auto"}', '{"method": "none"}'):
        assert Loader(tiny_config(speculative_config=given, pipeline_parallel_size=2), model).open()
    with pytest.raises(ConfigError, match="no such file or folder: /nowhere"):
        start_engine(tiny_config(speculative_config=drafting("/nowhere")), model, "tiny")
    windows = json.loads((model.path / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 8}
    folder = disturbed(model, tmp_path / "windows", 0.0)
    (folder / "config.json").write_text(json.dumps(windows))
    config = replace(tiny_config(), speculative_config=drafting(model.path))
    with pytest.raises(
        ConfigError, match="a draft model cannot draft for mistral, whose layers keep only the KV pages of a window"
    ):
        start_engine(config, type(model)(folder, "windows", "folder"), "windows")


def test_adapters_are_the_models_alone(tmp_path):
    """The draft model drafts without them, worse than before, and no token differs."""
    weights = write_model(tmp_path / "m", 128)
    adapter = LoRARequest("a", 1, str(write_peft(tmp_path / "a", weights, size=0.7)))
    model, params = str(tmp_path / "m"), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for config in ('{"method": "none"}', drafting(model, adaptive=False)):
        with LLM(model, speculative_config=config, enable_lora=True, cpu_threads=1) as llm:
            results = results_of(llm)
            outputs = llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False, lora_request=[adapter, None])
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] and found[0][0] != found[0][1]
    num_wrong = [
        1 + drafted - run for result in results for drafted, run in zip(result.drafted, result.runs, strict=True)
    ]
    assert sum(num_wrong) > 0 and 0 in num_wrong
