"""load_text on real files of every kind: where each setting is found, and the messages for broken files.
The files hold vocabularies and settings, no weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from vocabularies import (
    CORPUS,
    SAMPLES,
    SENTENCEPIECE_SIZE,
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    marked_bpe,
    random_texts,
    sentencepiece_model,
    write_gguf_metadata,
)

from octavo.config import Config, replace
from octavo.errors import ConfigError, InvalidRequest
from octavo.messages import SamplingParams
from octavo.text import load_text
from octavo.text.pooling_config import read_pooling_config
from octavo.text.tokenize.gguf_vocab import gguf_chat_templates, gguf_tokenizer, read_vocabulary

HI = [{"role": "user", "content": "hi"}]


def write(folder: Path, **files: Any) -> Path:
    """`generation_config={...}` writes generation_config.json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folder_brings_its_end_ids_sampling_and_template(folder: Path) -> None:
    write(
        folder,
        config={"eos_token_id": 1},
        generation_config={"eos_token_id": [1, 5], "temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None},
        tokenizer_config={
            "eos_token": {"content": "<|start|>"},
            "chat_template": "{{ eos_token }}{{ messages[0].content }}",
        },
    )
    text = load_text(folder)
    assert text.eos_ids == (0, 1, 5)
    assert text.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert text.vocab_size == 401
    assert text.render_chat(HI) == "<|start|>hi"
    assert text.encode_chat(HI) == [0, *text.encode("hi")]


def test_sampling_advice_is_made_fit_for_use_or_left_out_with_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, generation_config={"top_k": 50.0, "temperature": 1, "top_p": 0.9, "min_p": None})
    advice = load_text(folder).default_sampling
    assert (advice, type(advice["top_k"])) == ({"top_k": 50, "temperature": 1, "top_p": 0.9}, int)
    SamplingParams(**advice)
    assert not caplog.records
    bad = {"top_k": 50.5, "temperature": "warm", "top_p": 7, "min_p": True, "repetition_penalty": float("nan")}
    write(folder, generation_config=bad)
    assert load_text(folder).default_sampling == {}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(bad)
    for name in bad:
        assert any("generation_config.json" in line and f" {name} must be " in line for line in lines), name
    write(folder, generation_config={"top_k": float("inf"), "temperature": 10**400})
    assert load_text(folder).default_sampling == {}


def test_templates_in_all_their_places(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    both = load_text(write(folder, tokenizer_config={"chat_template": named}))
    assert (both.render_chat(HI), both.render_chat(HI, tools=[{}])) == ("named", "[{}]<tool_call>")
    (folder / "chat_template.jinja").write_text("own file")
    assert load_text(folder).render_chat(HI) == "own file"
    override = tmp_path / "mine.txt"
    override.write_text("mine")
    assert load_text(folder, chat_template=str(override)).render_chat(HI, tools=[{}]) == "mine"


def test_a_chat_is_not_given_a_second_beginning(tmp_path: Path) -> None:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2", add_bos_token=True)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", metadata))
    assert text.encode("hi") == [0, *text.encode("hi", add_special_tokens=False)]
    assert text.encode_chat(HI) == text.encode("hi")


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [({}, [], []), ({"add_bos_token": True}, [0], []), ({"add_bos_token": False, "add_eos_token": True}, [], [1])],
)
def test_a_gguf_says_what_goes_around_a_text(
    options: dict[str, bool], before: list[int], after: list[int], tmp_path: Path
) -> None:
    path = write_gguf_metadata(tmp_path / "m.gguf", gguf_of_byte_level(byte_level(), "gpt-2", **options))
    text = load_text(path)
    assert text.encode("hi") == [*before, *text.encode("hi", add_special_tokens=False), *after]
    assert text.eos_ids == (1,)


def test_a_gguf_byte_level_vocabulary_encodes_as_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    library = byte_level()
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", gguf_of_byte_level(library, "gpt-2")))
    for sample in [*SAMPLES, *random_texts(3, 300)]:
        assert text.encode(sample) == library.encode(sample).ids


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", "123456", " x"]),
        ("smollm", [*"a123456", " x"]),
        ("llama-bpe", ["a", "123", "456", " x"]),
        ("qwen2", [*"a123456", " x"]),
    ],
)
def test_the_named_pretokenizer_cuts_the_words(pre: str, words: list[str]) -> None:
    from octavo.text.tokenize import pretokenizers

    cutter = pretokenizers.pre_tokenizer(pretokenizers.words_named(pre))
    text = "a123456 x"
    assert [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)] == words


def test_every_pretokenizer_compiles_and_loses_no_character() -> None:
    from octavo.text.tokenize import pretokenizers

    for name in pretokenizers._BY_NAME:
        cutter = pretokenizers.pre_tokenizer(pretokenizers.words_named(name))
        for sample in SAMPLES:
            at = 0
            for _, (start, end) in cutter.pre_tokenize_str(sample):
                assert start <= at <= end, (name, sample)
                at = end
            assert at == len(sample), (name, sample)


def test_a_gguf_sentencepiece_vocabulary_encodes_as_the_package_does(tmp_path: Path) -> None:
    """Real scores, byte fallback, user-defined and control tokens; the space after an added token is llama.cpp's."""
    model = sentencepiece_model("bpe", tmp_path)
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", gguf_of_sentencepiece(model)))
    for sample in [*SAMPLES[:-1], *CORPUS, *random_texts(5, 300)]:
        assert text.encode(sample) == [1, *model.encode(sample)] or "<|end|>" in sample or "s>" in sample
        assert text.decode(text.encode(sample)) == sample.replace("▁", " ") or "s>" in sample
    end = model.piece_to_id("<|end|>")
    assert text.encode("a<|end|>b</s>", False) == [*model.encode("a"), end, *model.encode("b"), 2]
    assert text.decode([*model.encode("a"), end, 2], skip_special_tokens=True) == "a<|end|>"


def test_a_gguf_may_do_without_the_space_before_the_first_word(tmp_path: Path) -> None:
    model = sentencepiece_model("bpe", tmp_path)
    metadata = gguf_of_sentencepiece(model, add_space_prefix=False, add_bos_token=False)
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", metadata))
    assert text.decode(text.encode(" a b")) == " a b"
    assert text.encode(" a") == [*model.encode("a")]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_file(kind: str, tmp_path: Path) -> None:
    model, size = sentencepiece_model(kind, tmp_path), SENTENCEPIECE_SIZE[kind]
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {str(size): {"content": "<|im|>", "special": True}},
    }
    write(tmp_path, tokenizer_config={**settings, "legacy": False})
    text = load_text(tmp_path)
    assert (text.eos_ids, text.vocab_size) == ((2,), size + 1)
    for sample in [*SAMPLES[:-1], *random_texts(9, 100)]:
        assert text.encode(sample) == [1, *model.encode(sample)]
        assert text.decode(text.encode(sample)) == sample.replace("▁", " ")
    bare = text.encode("<|im|>fox<s>", False)
    assert (bare[0], bare[-1]) == (size, 1)
    assert text.decode([*model.encode("a"), *bare]) == "afox"
    write(tmp_path, tokenizer_config={**settings, "add_bos_token": False, "add_eos_token": True})
    older = load_text(tmp_path)
    assert older.encode("a<|im|>fox") == [*model.encode("a"), size, *model.encode("fox"), 2]


def test_a_tokenizer_given_apart_replaces_the_vocabulary_and_keeps_the_models_end(tmp_path: Path) -> None:
    gguf = write_gguf_metadata(tmp_path / "m.gguf", gguf_of_byte_level(byte_level(), "unheard-of"))
    (tmp_path / "other").mkdir()
    marked_bpe().save(str(tmp_path / "other" / "tokenizer.json"))
    for name in ("other", "other/tokenizer.json"):
        text = load_text(gguf, tokenizer=str(tmp_path / name))
        assert text.decode(text.encode("a b")) == "a b"
        assert text.eos_ids == (1,)


def test_ends_of_turns_are_found_by_name_among_control_tokens_only(tmp_path: Path) -> None:
    library = byte_level()
    library.add_special_tokens(["<|im_end|>"])
    library.add_special_tokens(["<|end|>"])
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", gguf_of_byte_level(library, "gpt-2", eot_token_id=7)))
    assert text.eos_ids == (1, 7, 401)


def test_the_end_of_a_text_ends_one_where_the_file_names_only_the_end_of_a_turn(tmp_path: Path) -> None:
    """As in Qwen2.5's files, whose makers stop at both."""
    library = byte_level()
    library.add_special_tokens(["<|endoftext|>"])
    text = load_text(write_gguf_metadata(tmp_path / "m.gguf", gguf_of_byte_level(library, "qwen2")))
    assert text.eos_ids == (1, 401)


@pytest.mark.parametrize("bad", ["\ud800", "ok \udfff", "日本\udc80語"])
def test_a_lone_surrogate_is_the_callers_mistake(bad: str, folder: Path) -> None:
    text = load_text(write(folder, tokenizer_config={"chat_template": "{{ messages[0].content }}"}))
    with pytest.raises(InvalidRequest, match="surrogate") as raised:
        text.encode(bad)
    assert raised.value.param == "prompt"
    with pytest.raises(InvalidRequest) as raised:
        text.encode_chat([{"role": "user", "content": bad}])
    assert raised.value.param == "messages"


def test_a_panic_of_the_library_is_one_line(folder: Path) -> None:
    """Its panics are no Exceptions: this prefix is longer than the merged pieces that should have it."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        load_text(folder)


def test_a_sentencepiece_model_with_a_piece_that_is_not_utf8(tmp_path: Path) -> None:
    sentencepiece_model("bpe", tmp_path)
    model = (tmp_path / "tokenizer.model").read_bytes()
    place = model.rindex("▁".encode())
    (tmp_path / "tokenizer.model").write_bytes(model[: place + 1] + b"\xff" + model[place + 2 :])
    with pytest.raises(ConfigError, match="SentencePiece model cannot be read"):
        load_text(tmp_path)


def test_a_text_that_a_vocabulary_cannot_spell_is_the_callers_mistake(tmp_path: Path) -> None:
    """It has no token for unknown characters, and the library raises a bare Exception."""
    library = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], None, False))
    library.save(str(tmp_path / "tokenizer.json"))
    text = load_text(tmp_path)
    assert text.encode("ab") == [0, 1]
    with pytest.raises(InvalidRequest, match="cannot encode this text"):
        text.encode("abc")


def test_a_role_that_no_token_can_have_is_left_out(folder: Path) -> None:
    text = load_text(write(folder, tokenizer_config={"eos_token": "\ud800"}, config={"eos_token_id": 1}))
    assert text.eos_ids == (1,)


def one_line(error: ConfigError) -> str:
    assert "\n" not in error.message
    return error.message


def test_start_up_mistakes_are_one_line_each(tmp_path: Path, folder: Path) -> None:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2")

    def gguf(**changes: Any) -> Path:
        changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
        return write_gguf_metadata(tmp_path / "bad.gguf", {k: v for k, v in changed.items() if v is not None})

    for path, words in [
        (lambda: gguf(pre="unheard-of"), "unheard-of.*gpt-2.*smollm"),
        (lambda: gguf(model="t5"), "'t5'; gpt2, llama, bert and gemma4"),
        (lambda: gguf(model="rwkv"), "rwkv"),
        (lambda: gguf(model="bert"), "inconsistent.*UNK"),
        (lambda: gguf(tokens=None), "no vocabulary"),
        (lambda: gguf(token_type=[1, 1]), "token types"),
        (lambda: gguf(merges=None), "no merges"),
        (lambda: gguf(merges=["not inside"]), "inconsistent"),
        (lambda: tmp_path / "nowhere", "does not exist"),
    ]:
        with pytest.raises(ConfigError, match=words) as raised:
            load_text(path())
        one_line(raised.value)
    for options, words in [
        ({"tokenizer": str(tmp_path / "nowhere")}, "--tokenizer"),
        ({"chat_template": str(tmp_path / "nowhere")}, "--chat-template"),
    ]:
        with pytest.raises(ConfigError, match=words) as raised:
            load_text(folder, **options)
        one_line(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}}}'),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'),
        ("tokenizer.json", '{"model": {"type": "Unheard", "vocab": {}}}'),
        ("tokenizer.json", b"\xff\x00"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str | bytes, folder: Path) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=name) as raised:
        load_text(folder)
    one_line(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": None}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<|im|>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"480": {"special": True}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"480": {"content": None}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"480": "<|im|>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"last": {"content": "<|im|>"}}}),
        ("added_tokens.json", {"<|im|>": None}),
        ("added_tokens.json", {"<|im|>": "last"}),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": [None]}),
        ("chat_template.json", {"chat_template": [{"template": "x"}]}),
        ("chat_template.jinja", b"\xff{{ messages }}"),
        ("additional_chat_templates/tool_use.jinja", b"caf\xe9"),
    ],
)
def test_a_file_with_the_wrong_things_in_it_is_named(name: str, content: Any, tmp_path: Path) -> None:
    sentencepiece_model("bpe", tmp_path)
    load_text(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConfigError) as raised:
        load_text(tmp_path)
    assert one_line(raised.value).startswith(str(path))


def test_variables_of_the_template_have_defaults(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "{% if enable_thinking is not false %}<think>{% endif %}{{ messages[0].content }}{{ eos_token }}"
    write(folder, tokenizer_config={"eos_token": "<|start|>", "chat_template": source})
    assert load_text(folder).render_chat(HI) == "<think>hi<|start|>"
    text = load_text(folder, default_chat_template_kwargs='{"enable_thinking": false}')
    assert text.render_chat(HI) == "hi<|start|>" and not caplog.records
    assert text.render_chat(HI, enable_thinking=True) == "<think>hi<|start|>", "a request's own value"
    load_text(folder, default_chat_template_kwargs='{"thinking": false}')
    assert "the chat template does not read 'thinking'" in caplog.text
    for name in ("messages", "tools", "a b"):
        with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs must not set '{name}'"):
            load_text(folder, default_chat_template_kwargs=json.dumps({name: 1}))
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        replace(Config(), default_chat_template_kwargs="[1]")


def test_a_tokenizer_that_is_not_here_says_what_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--tokenizer org/name does not exist: it names a folder or a file, not a model of the hub$"
    ):
        load_text(tmp_path, tokenizer="org/name")
    with pytest.raises(ConfigError, match=r"a \.gguf file has a tokenizer of its own: leave the flag out$"):
        load_text(tmp_path / "a.gguf", tokenizer="org/name")
    with pytest.raises(ConfigError, match=r"^the model .* does not exist"):
        load_text(tmp_path / "a.gguf")


def test_a_folder_without_a_tokenizer_and_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_text(tmp_path)
    sentencepiece_model("bpe", tmp_path)
    path = tmp_path / "tokenizer.model"
    whole = path.read_bytes()
    for content in (b"no model", b"", whole[: len(whole) // 2], whole[:-1], whole[100:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="SentencePiece") as raised:
            load_text(tmp_path)
        assert one_line(raised.value).startswith(str(path))


def test_a_tokenizer_that_is_larger_than_the_model_does_not_belong_to_it(folder: Path) -> None:
    """The model must know all of the vocabulary's own tokens; tokens added behind them may be beyond its size."""
    text = load_text(folder)
    text.require_fit(400)
    with pytest.raises(ConfigError, match=r"400 tokens, but the model's vocabulary has 399.*--tokenizer") as raised:
        text.require_fit(399)
    one_line(raised.value)


def test_importing_the_room_brings_neither_torch_nor_transformers() -> None:
    code = "import sys, octavo.text; print({'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.model
def test_the_embedded_model() -> None:
    """Every numeric character is a token of its own, no BOS, ChatML. The ids were checked against transformers' GGUF reader, and are the same
    except for "½ ² ٣": it ignores the file's "smollm" and does not split numbers off; made to, it agrees there too."""
    from octavo.weights.sources.source import resolve

    text = load_text(resolve("").path)
    assert (text.vocab_size, text.eos_ids) == (49152, (0, 2))
    assert text.encode("Hello world 123") == [19556, 905, 216, 33, 34, 35]
    assert text.encode("123 ½ ² ٣") == [33, 34, 35, 216, 16738, 216, 19133, 216, 164, 113]
    chat = text.encode_chat(HI)
    assert chat[:3] == [1, 9690, 198]
    assert chat[-10:] == [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    for sample in [*SAMPLES, *random_texts(13, 200)]:
        assert text.decode(text.encode(sample), skip_special_tokens=False) == sample


def test_a_vocabulary_trained_on_composed_text_gets_composed_text() -> None:
    for pre, expected in (("qwen2", "é"), ("gpt-2", "e\u0301")):
        tokenizer = gguf_tokenizer(read_vocabulary(gguf_of_byte_level(byte_level(), pre)))
        assert tokenizer.decode(tokenizer.encode("e\u0301", False), True) == expected


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "modules"])
def test_settings_nested_without_end_are_refused(folder: Path, name: str) -> None:
    (folder / f"{name}.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"{name}.json is not valid JSON") as caught:
        load_text(folder)
    assert "\n" not in caught.value.message


def test_what_happens_to_vectors_before_they_are_pooled_is_not_forgotten(tmp_path: Path) -> None:
    write(tmp_path, modules=[{"type": f"x.{kind}", "path": kind} for kind in ("Transformer", "Dense", "Pooling")])
    (tmp_path / "Pooling").mkdir()
    write(tmp_path / "Pooling", config={"pooling_mode": "mean"})
    sentence = read_pooling_config(tmp_path)
    assert (sentence.kind, sentence.unsupported) == ("mean", "a module of type 'Dense'")
    write(tmp_path, modules=[{"type": "x.Pooling", "path": ".."}])
    with pytest.raises(ConfigError, match=r"it puts a module into '\.\.'"):
        read_pooling_config(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"tokenizer.ggml.tokens": [1, 2]}, "holds no vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": 7}, "2 tokens but no list of token types"),
    ],
)
def test_a_gguf_vocabulary_of_the_wrong_types_is_refused(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_vocabulary(metadata)


def test_gguf_templates_of_the_wrong_types_are_none() -> None:
    assert gguf_chat_templates({"tokenizer.chat_templates": 7, "tokenizer.chat_template": 7}) == {}
    named = {"tokenizer.chat_templates": ["rag", 3], "tokenizer.chat_template.rag": "x", "tokenizer.chat_template": "y"}
    assert gguf_chat_templates(named) == {"rag": "x", "default": "y"}


def test_a_gguf_file_advises_how_to_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2") | {
        "general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.8,
        "general.sampling.penalty_repeat": -3.0, "general.sampling.mirostat": 1,
    }  # fmt: skip
    file = write_gguf_metadata(tmp_path / "m.gguf", metadata)
    advice = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert load_text(file).default_sampling == advice
    assert "m.gguf is ignored: repetition_penalty" in caplog.text
    assert load_text(file, generation_config="vllm").default_sampling == {}
    assert load_text(file, default_sampling={"min_p": 0.1}).default_sampling == {"min_p": 0.1, **advice}
    (tmp_path / "own").mkdir()
    byte_level().save(str(tmp_path / "own" / "tokenizer.json"))
    assert load_text(file, tokenizer=str(tmp_path / "own")).default_sampling == advice, "whatever the tokenizer"


def test_where_default_sampling_comes_from(folder: Path, tmp_path: Path) -> None:
    write(folder, generation_config={"temperature": 0.3, "top_k": 9})
    assert load_text(folder, default_sampling={"top_p": 0.5}).default_sampling == {
        "temperature": 0.3,
        "top_k": 9,
        "top_p": 0.5,
    }
    assert load_text(folder, default_sampling={"top_p": 0.5}, generation_config="vllm").default_sampling == {}
    changed = load_text(folder, override_generation_config='{"temperature": 0.8, "min_p": 0.1}').default_sampling
    assert changed == {"temperature": 0.8, "top_k": 9, "min_p": 0.1}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.7}')
    assert load_text(folder, generation_config=str(tmp_path)).default_sampling == {"top_p": 0.7}
    for options, problem in (
        ({"generation_config": "nowhere"}, "--generation-config nowhere has no generation_config.json"),
        ({"override_generation_config": '{"temperature": -1}'}, "--override-generation-config: temperature must be"),
        (
            {"override_generation_config": '{"max_new_tokens": 1}'},
            "has 'max_new_tokens'; it can set temperature, top_p",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_text(folder, **options)


def test_an_overridden_end_of_sequence(folder: Path) -> None:
    write(folder, config={"eos_token_id": 1})
    assert 3 in load_text(folder, hf_overrides='{"eos_token_id": [3]}').eos_ids


def test_a_module_with_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "a" * 300}]))
    with pytest.raises(ConfigError, match="File name too long"):
        read_pooling_config(tmp_path)
