"""Draft heads through the whole engine: what they say is what their published architectures say, behind any tokens and in all that happens
to pages; and whatever they say, no token changes."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.speculation import identity
from benchmarks.speculation.identity import Campaign
from octavo import LLM, SamplingParams
from octavo.engine.build import start_engine
from octavo.engine.process import start_recorder
from octavo.engine.tier_traffic import TierTraffic
from octavo.errors import ConfigError
from octavo.ipc.launch import EngineLaunch
from octavo.models.draft_heads.eagle3 import layers_of
from octavo.recording.format import read
from octavo.replay.recompute import Recomputation
from octavo.weights.sources.source import local
from octavo.worker.draft_head import HeadDrafter
from octavo.worker.dry_run import DryRun
from octavo.worker.load import Loader
from tests.doubles import write_byte_tokenizer
from tests.draft_heads import VOCAB_SIZE, Eagle3Reference, MTPReference, few_tokens_of, write_eagle3, write_mtp
from tests.engine.test_engine_draft_model import results_of, run
from tests.worker.tiny import disturbed, tiny_config, write_tiny_llama

NUM_DRAFTED = 4


def eagle3(path, **options) -> str:
    return json.dumps({"method": "eagle3", "model": str(path), "num_speculative_tokens": NUM_DRAFTED, **options})


def mtp(**options) -> str:
    return json.dumps({"method": "mtp", "num_speculative_tokens": NUM_DRAFTED, **options})


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder, vocab_size=VOCAB_SIZE, num_layers=3)
    write_byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 320}))
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    write_mtp(folder, has_copies=True, num_predicting=2)
    write_byte_tokenizer(folder)
    return folder


class Noted:
    """Each draft of an engine with one row: the tokens behind which it was made, its tokens, and the logits of each."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], list[int], list[torch.Tensor]]] = []
        drafter = llm._loop.executor._runner.draft
        assert isinstance(drafter, HeadDrafter)
        logits: list[torch.Tensor] = []
        propose, spread = drafter.propose, drafter._spread

        def noting_logits(found):
            logits.append(found.clone())
            return spread(found)

        def noting_drafts(plan):
            logits.clear()
            proposed, work = propose(plan)
            for draft in plan.drafts:
                row, start = plan.rows[draft.at], plan.starts[draft.at]
                tokens = drafter._rows.tokens[row, : start + 1].tolist()
                made = next(each.tokens for each in proposed.drafts if each.at == draft.at)
                assert all(len(each) == 1 for each in logits) and len(made) in (0, len(draft.tokens))
                self.drafts.append((tokens, made, [each[0] for each in logits]))
            return proposed, work

        monkeypatch.setattr(drafter, "propose", noting_drafts)
        monkeypatch.setattr(drafter, "_spread", noting_logits)

    def compare(self, reference) -> float:
        """→ the largest difference of a logit."""
        worst = 0.0
        with torch.inference_mode():
            for tokens, made, logits in filter(lambda draft: draft[1], self.drafts):
                expected, expected_logits = reference.drafts(tokens, len(made))
                assert made == expected
                for ours, theirs in zip(logits, expected_logits, strict=True):
                    worst = max(worst, float((ours - theirs).abs().max()))
        return worst


EAGLE3_CASES = {
    "speculators": {"tapped": [0, 1, 2]},
    "published": {"tapped": [0, 1, 3], "is_speculators": False, "has_embedding": True},
    "qwen3 layers": {"tapped": [1, 2, 3], "family": "qwen3", "num_layers": 2, "norm_output": True},
    "normed": {"tapped": [1, 2], "norm_before_residual": True, "fc_norm": True, "draft_vocab_size": VOCAB_SIZE},
    "normed together": {"tapped": [0, 1, 2], "norm_before_fc": True},
}


def check_drafts(model: Path, speculative: str, reference, monkeypatch, **options) -> None:
    """Answers, some of them behind a prefix that another request has computed, and one behind a long prompt."""
    stem = [(7 * i) % VOCAB_SIZE for i in range(1, 20)]
    prompts = [stem, [*stem[:17], 3, 4], [5], [*stem, *stem, *stem]]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    options = {
        "page_size": 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 2**21,
    } | options
    with LLM(str(model), speculative_config=speculative, cpu_threads=1, **options) as llm:
        noted = Noted(llm, monkeypatch)
        found = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        assert llm._loop.scheduler.cache.hit_tokens > 15
    with LLM(str(model), speculative_config='{"method": "none"}', cpu_threads=1, **options) as llm:
        for prompt, tokens in zip(prompts, found, strict=True):
            assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == tokens
    assert sum(len(made) for _, made, _ in noted.drafts) > 60
    assert sum(not made for _, made, _ in noted.drafts) == 2, "a prompt of one token, and one that takes two passes"
    worst = noted.compare(reference)
    assert worst <= 1e-4, worst
    print(f"largest difference of a logit: {worst:.1e}")


@pytest.mark.parametrize("case", EAGLE3_CASES)
def test_an_eagle3_head_says_what_its_reference_says(llama, tmp_path, monkeypatch, case):
    head = write_eagle3(tmp_path / "head", llama, **EAGLE3_CASES[case])
    check_drafts(llama, eagle3(head, adaptive=False), Eagle3Reference(llama, head), monkeypatch)


def test_an_eagle3_head_without_tapes(llama, tmp_path, monkeypatch):
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    check_drafts(llama, eagle3(head, adaptive=False), Eagle3Reference(llama, head), monkeypatch, enforce_eager=True)


def test_an_mtp_head_says_what_its_reference_says(deepseek, monkeypatch):
    check_drafts(deepseek, mtp(adaptive=False), MTPReference(deepseek), monkeypatch)


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────


class FirstPasses:
    """The logits of the first pass of each draft, of all rows, and the tokens behind which they stand."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[list[int], torch.Tensor]] = []
        drafter = llm._loop.executor._runner.draft
        is_first, logits = [False], []
        propose, compute, spread = drafter.propose, drafter.compute, drafter._spread

        def proposing(plan):
            is_first[0] = True
            return propose(plan)

        def computing(columns):
            logits.clear()
            tokens = compute(columns)
            if is_first[0] and tokens.tokens:
                rows, lens = columns.rows[columns.samples].tolist(), columns.lens[columns.samples].tolist()
                for row, length, of_row in zip(rows, lens, logits[0], strict=True):
                    self.found.append((drafter._rows.tokens[row, :length].tolist(), of_row))
            is_first[0] = False
            return tokens

        monkeypatch.setattr(drafter, "propose", proposing)
        monkeypatch.setattr(drafter, "compute", computing)
        monkeypatch.setattr(drafter, "_spread", lambda found: logits.append(found.clone()) or spread(found))


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_pages_stay_right_in_all_that_happens_to_them(llama, deepseek, tmp_path, monkeypatch, kind):
    """Shared, forked, copied, swapped, preempted, given back: every draft is what the head says behind the whole sequence."""
    if kind == "eagle3":
        head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
        model, speculative, reference = llama, eagle3(head, adaptive=False), Eagle3Reference(llama, head)
    else:
        model, speculative, reference = deepseek, mtp(adaptive=False), MTPReference(deepseek)
    page_bytes = start_engine_page_bytes(model, speculative)
    options = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32, "swap_space": 0.0005}
    options["kv_cache_memory_bytes"] = 31 * page_bytes
    with LLM(str(model), speculative_config=speculative, cpu_threads=1, **options) as llm:
        passes = FirstPasses(llm, monkeypatch)
        run(llm._loop, 3, 60)
        scheduler = llm._loop.scheduler
        assert scheduler.cache.hit_tokens > 100 and scheduler.num_preemptions > 0
    assert len(passes.found) > 100
    chosen = random.Random(1).sample(passes.found, 60)
    with torch.inference_mode():
        worst = max(float((logits - reference.drafts(tokens, 1)[1][0]).abs().max()) for tokens, logits in chosen)
    assert worst <= 1e-4, worst


def start_engine_page_bytes(model: Path, speculative: str) -> int:
    dry_run = DryRun(tiny_config(speculative_config=speculative), local(model))
    dry_run.configuration(), dry_run.arithmetic()
    return dry_run.needs().page_bytes


def test_behind_pages_from_a_tier_it_does_not_draft(llama, tmp_path, monkeypatch):
    """A tier has no features."""
    monkeypatch.setattr(TierTraffic, "_compute_seconds", lambda self, start, count: float("inf"))
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    speculative = eagle3(head, adaptive=False)
    options = {"speculative_config": speculative, "kv_tier": f"disk:64MiB:{tmp_path / 'tier'}", "block_size": 4}
    options["kv_cache_memory_bytes"] = 22 * start_engine_page_bytes(llama, speculative)
    prompt, other = list(range(60)), list(range(80, 140))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found, drafted = [], []
    for _ in range(2):
        with LLM(str(llama), cpu_threads=1, **options) as llm:
            llm.generate([other], params, use_tqdm=False)  # so that all pages hold something else
            results = results_of(llm)
            found.append(llm.generate([prompt], params, use_tqdm=False)[0])
            num_loaded = llm._loop.tier.stats.loaded_pages
            drafted.append(sum(count for result in results for count in result.drafted))
    assert num_loaded > 10 and found[1].num_cached_tokens > 40
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    assert drafted[0] > 10 and drafted[1] == 0


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_drafts_of_a_head_change_nothing(llama, deepseek, tmp_path, monkeypatch, kind):
    """Greedy, seeded, with penalties, grammars and stops, preempted, killed and replayed."""
    monkeypatch.setattr(identity, "FORM_SHARE", 0.05)
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    model = llama if kind == "eagle3" else deepseek
    speculative = eagle3(head) if kind == "eagle3" else mtp()
    memory = 90 * start_engine_page_bytes(model, speculative)
    options = {"kv_cache_memory_bytes": memory, "max_model_len": 320, "cpu_threads": 1}
    campaign = Campaign(local(model), options, tmp_path, eagle3=str(head), has_mtp=True)
    campaign.leaning = few_tokens_of(head)
    campaign.check(3, 40, [kind])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.accepted > 25 and seen.drafted - seen.accepted > 50, seen
    assert seen.preemptions > 2 and seen.deaths > 0 and seen.replayed_steps > 100, seen


def test_the_same_tokens_are_computed_from_a_recording(llama, tmp_path):
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    options = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 2**18}
    config = tiny_config(speculative_config=eagle3(head, adaptive=False), record_tokens=True, **options)
    engine, folder = start_engine(config, local(llama), "tiny"), tmp_path / "recording"
    folder.mkdir()
    launch = EngineLaunch(config, str(llama), "folder", "tiny", "tiny", "", record_to=str(folder))
    engine.loop.record(start_recorder(launch, engine))
    run(engine.loop, 5, 12)
    engine.loop.close()
    computation = Recomputation(read(folder))
    findings = computation.run()
    assert computation.replay.num_same == computation.replay.num_steps > 20
    assert findings.num_same == findings.num_tokens > 80, findings


# ── memory, mistakes ────────────────────────────────────────────────────────────────────────────────


def test_memory_counts_the_head_and_its_features(llama, tmp_path):
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    sizes = []
    for speculative in ('{"method": "none"}', eagle3(head)):
        config = tiny_config(kv_cache_memory_bytes=2**20, speculative_config=speculative)
        engine = start_engine(config, local(llama), "tiny")
        report = engine.report
        engine.loop.close()
        dry_run = DryRun(config, local(llama))
        dry_run.configuration(), dry_run.arithmetic(), dry_run.tensors()
        assert dry_run.needs().page_bytes == report.page_bytes
        sizes.append((report.weights_bytes, report.page_bytes))
    tensors = load_file(head / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values() if tensor.is_floating_point())
    assert num_bytes <= sizes[1][0] - sizes[0][0] <= 1.2 * num_bytes
    assert sizes[1][1] - sizes[0][1] == 4 * 4 * (2 * 2 * 12 + 32), "keys and values of two heads, and a feature"
    assert report.draft_len == 320 and any("EAGLE-3 head head: " in note for note in report.notes)


def changed(head: Path, folder: Path, *, without: str = "", **values) -> Path:
    """A copy of a head with other values in its config.json, or without a tensor."""
    folder.mkdir()
    config = json.loads((head / "config.json").read_text())
    layers = config["transformer_layer_config"]
    layers |= {key: values.pop(key) for key in [*values] if key in layers}
    (folder / "config.json").write_text(json.dumps(config | values))
    tensors = load_file(head / "model.safetensors")
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 48}, "it takes hidden states of size 48, and the model's have 32"),
        ({"vocab_size": 300}, "it is for a vocabulary of 300 tokens, and the model's has 258"),
        ({"draft_vocab_size": 259}, "draft_vocab_size is 259, more than the 258 tokens of the model"),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing"),
        ({"without": "fc.weight"}, "the checkpoint lacks tensor fc.weight"),
        ({"without": "layers.0.hidden_norm.weight"}, "the checkpoint lacks tensor layers.0.hidden_norm.weight"),
        ({"without": "d2t"}, "the checkpoint lacks tensor d2t"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "must be different numbers from 0 to 3"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            r"fc.weight has shape \[32, 96\], its config asks for \[32, 64\]",
        ),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle': it must be eagle3"),
        ({"transformer_layer_config": 3}, "transformer_layer_config is missing"),
        ({"model_type": "gpt2"}, "its layers are of the family 'gpt2'"),
        ({"norm_output": "yes"}, "norm_output is 'yes': it must be true or false"),
        ({"layer_types": ["sliding_attention"]}, None),
    ],
    ids=str,
)
def test_heads_that_do_not_fit(llama, tmp_path, change, problem):
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    if problem is None:
        config = json.loads((head / "config.json").read_text())
        config["transformer_layer_config"] |= change
        (head / "config.json").write_text(json.dumps(config))
        bad, problem = head, "its layers have a sliding window"
    else:
        bad = changed(head, tmp_path / "bad", **change)
    with pytest.raises(ConfigError, match=f"EAGLE-3 head {bad.name}: .*{problem}"):
        Loader(tiny_config(speculative_config=eagle3(bad)), local(llama)).load()


def test_a_map_beyond_the_vocabulary(llama, tmp_path):
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    tensors = load_file(head / "model.safetensors")
    for offset, problem in ((500, "leads to tokens beyond the model's 258"), (-1, "leads to one token twice")):
        offsets = tensors["d2t"].clone()
        offsets[50] = offset if offset > 0 else offsets[49] - 1
        save_file(tensors | {"d2t": offsets}, head / "model.safetensors")
        with pytest.raises(ConfigError, match=f"EAGLE-3 head head: the checkpoint's tensor d2t {problem}"):
            Loader(tiny_config(speculative_config=eagle3(head)), local(llama)).load()


def test_models_that_a_head_cannot_draft_for(llama, deepseek, tmp_path):
    with pytest.raises(ConfigError, match="this llama model has no layers for multi-token prediction"):
        Loader(tiny_config(speculative_config=mtp()), local(llama)).open()
    plain = disturbed(local(deepseek), tmp_path / "plain", 0.0)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match="this deepseek_v3 model has no layers for multi-token prediction"):
        Loader(tiny_config(speculative_config=mtp()), local(plain)).open()
    tensors = load_file(deepseek / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"MTP head of plain: the checkpoint lacks tensor model.layers.2.eh_proj.weight"
    ):
        Loader(tiny_config(speculative_config=mtp()), local(plain)).load()
    head = write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2])
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2: eagle3 cannot draft for a model that is div"):
        Loader(tiny_config(speculative_config=eagle3(head), pipeline_parallel_size=2), local(llama)).open()
    with pytest.raises(ConfigError, match="no such file or folder: /nowhere"):
        Loader(tiny_config(speculative_config=eagle3("/nowhere")), local(llama)).open()


@pytest.mark.parametrize("case", ["speculators", "published"])
def test_the_method_follows_from_the_checkpoint(llama, tmp_path, case):
    """As with vLLM: `model` without `method`."""
    head = write_eagle3(tmp_path / "head", llama, **EAGLE3_CASES[case])
    engine = start_engine(tiny_config(speculative_config=json.dumps({"model": str(head)})), local(llama), "tiny")
    report = engine.report
    engine.loop.close()
    assert report.speculation.method == "eagle3" and any("EAGLE-3 head head: " in note for note in report.notes)


def test_a_model_named_as_its_own_drafter(llama, deepseek):
    """It has layers for multi-token prediction, or drafts as a whole."""
    for model, method in ((deepseek, "mtp"), (llama, "draft_model")):
        engine = start_engine(tiny_config(speculative_config=json.dumps({"model": str(model)})), local(model), "tiny")
        report = engine.report
        engine.loop.close()
        assert report.speculation.method == method and report.draft_len == report.max_model_len


@pytest.mark.parametrize(
    ("named", "config", "problem"),
    [
        ("draft_model", {}, "bad is an EAGLE-3 head, not a draft model: use the method eagle3"),
        ("", {"speculators_model_type": "dflash"}, "bad is a draft head of the kind 'dflash', which is not supported"),
        ("", {"speculators_model_type": None, "architectures": ["DeepseekV3ForCausalLMNextN"]}, "use the method mtp"),
        ("", {"speculators_model_type": None, "architectures": ["EagleLlamaForCausalLM"]}, "of the kind 'eagle'"),
        ("", {"speculators_model_type": None, "architectures": 3, "model_type": "medusa"}, "of the kind 'medusa'"),
    ],
    ids=str,
)
def test_heads_that_are_no_draft_models(llama, tmp_path, named, config, problem):
    bad = changed(write_eagle3(tmp_path / "head", llama, tapped=[0, 1, 2]), tmp_path / "bad")
    written = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(written | config))
    given = {"model": str(bad)} | ({"method": named} if named else {})
    with pytest.raises(ConfigError, match=f"--speculative-config: bad is .*{problem.removeprefix('bad is ')}"):
        Loader(tiny_config(speculative_config=json.dumps(given)), local(llama)).open()


def test_layers_that_a_head_names_none_of():
    assert layers_of({}, 32) == [2, 16, 29]
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids is "):
        layers_of({}, 2)
