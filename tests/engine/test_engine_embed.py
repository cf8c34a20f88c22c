"""LLM.embed against transformers: encoders and decoders, each way of pooling, any batch, with native kernels and without."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaModel,
)

from octavo import LLM
from octavo.errors import ConfigError, ContextTooLong, InvalidRequest, Unsupported
from tests.models import checkpoints
from tests.weights.gguf_writer import Packed, write_gguf

CLS, SEP = 1, 2
VOCAB_SIZE = 160
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
MEAN_POOLING = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def bert() -> PreTrainedModel:
    return checkpoints._randomised(BertModel(BertConfig(**SMALL)))


def roberta() -> PreTrainedModel:
    config = RobertaConfig(**SMALL, pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5)
    return checkpoints._randomised(RobertaModel(config))


def xlm_roberta() -> PreTrainedModel:
    config = XLMRobertaModel.config_class(**SMALL, pad_token_id=1, type_vocab_size=1)
    return checkpoints._randomised(XLMRobertaModel(config))


def write(model: PreTrainedModel, folder: Path, pooling: dict[str, Any] | None = None, normalize: bool = True) -> Path:
    """The model, a tokenizer of numbers ("7 12" are the ids 7 and 12, between CLS and SEP), and a sentence's modules."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing((str(SEP), SEP), (str(CLS), CLS))
    tokenizer.save(str(folder / "tokenizer.json"))
    if pooling is not None:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        modules = [
            {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def expected(model: PreTrainedModel, tokens: list[int], kind: str, normalize: bool = True) -> torch.Tensor:
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    vector = {"cls": states[0], "mean": states.mean(dim=0), "last": states[-1]}[kind]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector


def prompts(seed: int, lengths: tuple[int, ...] = (1, 2, 9, 31, 40)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def vectors(llm: LLM, given: Any, **options: Any) -> list[list[float]]:
    return [output.embedding for output in llm.embed(given, use_tqdm=False, **options)]


def close(found: list[float], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("make", [bert, roberta, xlm_roberta])
def test_an_encoder_gives_transformers_vectors_in_any_batch(
    make: Callable[[], PreTrainedModel], native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", native)
    model = make()
    write(model, tmp_path / "model")
    with LLM(str(tmp_path / "model"), device="cpu", max_num_seqs=3, cpu_threads=1) as llm:
        assert (llm.report.num_pages, llm.report.page_bytes, llm.report.can_generate) == (0, 0, False)
        given = prompts(seed=1)
        for kind in ("cls", "mean", "last"):
            together = vectors(llm, given, pooling=kind)
            for tokens, found in zip(given, together, strict=True):
                close(found, expected(model, tokens, kind))
                (alone,) = vectors(llm, [tokens], pooling=kind)
                close(alone, torch.tensor(found))
                # Only native kernels promise the same bits whatever is beside it.
                assert alone == found or not any("native CPU kernels (" in note for note in llm.report.notes)


def test_a_folder_of_sentence_transformers_says_how(tmp_path: Path) -> None:
    model = bert()
    write(model, tmp_path / "model", MEAN_POOLING, normalize=False)
    (tmp_path / "model" / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    with LLM(str(tmp_path / "model"), device="cpu", cpu_threads=1) as llm:
        (output,) = llm.embed("7 12 90", use_tqdm=False)
        assert output.prompt_token_ids == [CLS, 7, 12, 90, SEP]
        close(output.embedding, expected(model, output.prompt_token_ids, "mean", normalize=False))
        long = " ".join(["5"] * 30)
        with pytest.raises(ContextTooLong, match="32 tokens; at most 20"):
            llm.embed(long)
        (cut,) = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
        assert cut.prompt_token_ids == [CLS, *[5] * 18, SEP], "what goes around a text stays"
        assert llm.embed(long, truncate_prompt_tokens=4, use_tqdm=False)[0].prompt_token_ids == [CLS, 5, 5, SEP]
        assert llm.embed([[5] * 30], truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids == [5] * 20


def test_dimensions_are_cut_before_the_vector_is_normalised(tmp_path: Path) -> None:
    model = bert()
    write(model, tmp_path / "model")
    with LLM(str(tmp_path / "model"), device="cpu", cpu_threads=1) as llm:
        whole = torch.tensor(vectors(llm, [[5, 6, 7]], normalize=False)[0])
        (short,) = vectors(llm, [[5, 6, 7]], dimensions=8)
        close(short, torch.nn.functional.normalize(whole[:8], dim=0))
        for wrong in (0, -1, 49, True, 3.0):
            with pytest.raises(InvalidRequest, match="dimensions must be a whole number from 1 to 48"):
                llm.embed([[5]], dimensions=wrong)
        with pytest.raises(InvalidRequest, match="pooling must be one of cls, mean, last, got 'max'"):
            llm.embed([[5]], pooling="max")
        with pytest.raises(InvalidRequest, match="from 0 to 159"):
            llm.embed([[160]])
        with pytest.raises(InvalidRequest, match="empty"):
            llm.embed([[]])
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be -1 or"):
            llm.embed([[5]], truncate_prompt_tokens=65)
        with pytest.raises(Unsupported, match="does not generate text"):
            llm.generate([[5]])


def test_what_a_folder_asks_for_and_is_not_offered_is_said(tmp_path: Path) -> None:
    folder = write(bert(), tmp_path / "model", {"pooling_mode_max_tokens": True})
    with LLM(str(folder), device="cpu", cpu_threads=1) as llm:
        with pytest.raises(Unsupported, match="pooling_mode_max_tokens"):
            llm.embed([[5]])
        assert len(vectors(llm, [[5]], pooling="cls")[0]) == 48
    (folder / "modules.json").write_text('[{"type": "x.Pooling", "path": "../elsewhere"}]')
    with LLM(str(folder), device="cpu", cpu_threads=1) as llm, pytest.raises(ConfigError, match=r"'\.\./elsewhere'"):
        llm.embed([[5]])


def test_a_step_holds_a_whole_prompt(tmp_path: Path) -> None:
    folder = str(write(bert(), tmp_path / "model"))
    with LLM(folder, device="cpu", cpu_threads=1, max_num_batched_tokens=40) as llm:
        assert llm.report.max_model_len == 40
        assert len(vectors(llm, prompts(seed=2))) == 5
        with pytest.raises(ContextTooLong, match="41 tokens; at most 40"):
            llm.embed([[5] * 41])
    with pytest.raises(ConfigError, match="--max-model-len 50 is beyond --max-num-batched-tokens 40"):
        LLM(folder, device="cpu", max_num_batched_tokens=40, max_model_len=50)
    with pytest.raises(ConfigError, match="--attention-backend reference is for models that generate"):
        LLM(folder, device="cpu", attention_backend="reference")


def test_ranks_share_an_encoder(tmp_path: Path) -> None:
    model = bert()
    folder = str(write(model, tmp_path / "model"))
    with LLM(folder, device="cpu", cpu_threads=1, tensor_parallel_size=2) as llm:
        given = prompts(seed=6)
        for tokens, found in zip(given, vectors(llm, given), strict=True):
            close(found, expected(model, tokens, "mean"))


def test_an_encoder_from_a_gguf_file(tmp_path: Path) -> None:
    model = bert()
    names = {"embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd"}
    names |= {"embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm"}
    parts = {"attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v"}
    parts |= {"attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm"}
    parts |= {"intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm"}
    names |= {f"encoder.layer.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(2) for ours, theirs in parts.items()}
    packed = [
        Packed(
            f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}", tuple(t.shape), "F32", t.numpy().tobytes()
        )
        for name, t in model.state_dict().items()
        if name.rpartition(".")[0] in names
    ]
    sizes = {"embedding_length": 48, "block_count": 2, "feed_forward_length": 80, "attention.head_count": 4}
    sizes |= {"context_length": 64, "attention.layer_norm_epsilon": 1e-12, "vocab_size": 160, "pooling_type": 2}
    metadata = {"general.architecture": "bert"} | {f"bert.{key}": value for key, value in sizes.items()}
    path = write_gguf(tmp_path / "model.gguf", metadata, packed)
    with LLM(str(path), device="cpu", cpu_threads=1) as llm:
        (tokens,) = prompts(seed=5, lengths=(12,))
        close(vectors(llm, [tokens])[0], expected(model, tokens, "cls"))


def opt() -> PreTrainedModel:
    """Its hidden states are wider than what its head multiplies."""
    sizes = {"hidden_size": 48, "word_embed_proj_dim": 24, "ffn_dim": 80, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=160, num_attention_heads=4, max_position_embeddings=128, **sizes)
    return checkpoints._randomised(OPTForCausalLM(config))


def granite() -> PreTrainedModel:
    """Its logits are divided by a factor, which is none of a vector's business."""
    return checkpoints._randomised(GraniteForCausalLM(GraniteConfig(**checkpoints.LLAMA, logits_scaling=8.0)))


@pytest.mark.parametrize("make", [opt, granite])
def test_a_vector_is_what_the_head_multiplies_in_its_own_scale(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make()
    model.save_pretrained(tmp_path / "model")
    (tokens,) = prompts(seed=7, lengths=(9,))
    with torch.no_grad():
        states = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
    with LLM(str(tmp_path / "model"), device="cpu", cpu_threads=1) as llm:
        close(vectors(llm, [tokens], normalize=False)[0], states[-1])
        assert llm.report.hidden_size == states.shape[1]
        with pytest.raises(InvalidRequest, match=f"from 1 to {states.shape[1]}"):
            llm.embed([tokens], dimensions=states.shape[1] + 1)


DECODERS = {"llama": checkpoints.llama, "gpt2": checkpoints.gpt2, "qwen3": checkpoints.qwen3}


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_embeds_between_the_requests_it_generates_for(
    family: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, cached prefixes and batch mates change nothing; the mean is computed whole."""
    monkeypatch.setenv("OCTAVO_NATIVE", native)
    model = DECODERS[family]()
    model.save_pretrained(tmp_path / "model")
    with LLM(str(tmp_path / "model"), device="cpu", cpu_threads=1, max_num_batched_tokens=24, page_size=4) as llm:
        given = prompts(seed=3, lengths=(1, 7, 20, 24))
        for kind in ("last", "mean", "cls"):
            for tokens, found in zip(given, vectors(llm, given, pooling=kind), strict=True):
                close(found, expected(model, tokens, kind))
        tokens = prompts(seed=4, lengths=(60,))[0]
        (first,) = vectors(llm, [tokens])  # in three chunks
        close(first, expected(model, tokens, "last"))
        again = llm.embed([tokens], use_tqdm=False)[0].embedding  # most of it from the prefix cache
        close(again, expected(model, tokens, "last"))
        assert llm.engine_stats()["prefix_hit_tokens"] >= 56
        with pytest.raises(
            ContextTooLong, match="60 tokens; at most 24 can be embedded; raise --max-num-batched-tokens"
        ):
            llm.embed([tokens], pooling="mean")


# ── the real thing ──────────────────────────────────────────────────────────────────────────────────

SENTENCES = ["That is a happy person", "That is a happy dog", "Today is a sunny day", "naïve café 東京 🎉 " * 20]


@pytest.mark.model
def test_a_real_model_equals_transformers() -> None:
    root = os.environ.get("OCTAVO_TEST_MODELS")
    if not root or not (Path(root) / "all-MiniLM-L6-v2").is_dir():
        pytest.skip("set OCTAVO_TEST_MODELS to a folder that holds all-MiniLM-L6-v2")
    folder = Path(root) / "all-MiniLM-L6-v2"
    model = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(str(folder), device="cpu") as llm:
        outputs = llm.embed(SENTENCES, use_tqdm=False)
        for sentence, output in zip(SENTENCES, outputs, strict=True):
            close(output.embedding, expected(model, output.prompt_token_ids, "mean"))
            assert llm.embed(sentence, use_tqdm=False)[0].embedding == output.embedding
        person, dog, day, _ = (torch.tensor(output.embedding) for output in outputs)
        assert float(person @ dog) > 0.6 > 0.4 > float(person @ day)
