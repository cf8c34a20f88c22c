"""Small vocabularies of every kind, generated for the tests of octavo/text. They contain what real files do."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Once upon a time there was a little girl named Lily. She loved to play outside.",
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all!",
    "Grüße aus Köln; naïve café, déjà vu. 12345 67890 in 2024.",
    "日本語のテキスト、中文文本。Привет, мир! 👋🏽 emoji 👨‍👩‍👧",
    "def main():\n    return {'a': [1, 2, 3]}\n\n\tprint('tabs')  \n",
] * 4

# As many as the corpus yields: with more merges, their order matters more.
SENTENCEPIECE_SIZE = {"bpe": 480, "unigram": 350}

SAMPLES = [
    "",
    " ",
    "Hello world",
    "  leading and   inner spaces ",
    "Once upon a time, 123456 little foxes doesn't DOESN'T",
    "naïve café e\u0301 日本語 👨‍👩‍👧 \U0010ffff",
    "tabs\tand\r\nlines\n\n\nend",
    "a\x00b\x07",
    "▁literal mark",
    "<s> in text </s><|end|> after",
]


# Each is hard for tokenizers in its own way; runs are long enough to matter and short enough for every test.
TORTURE = [
    *SAMPLES,
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 🇩🇪🇫🇷 ☺️☺︎ 1️⃣",
    "שלום עולם! مرحبا بالعالم؟ \u202eabc\u202c \u2067עברית\u2069 فارسی‌زبان",
    "汉字漢字かなカナ한국어 조선말 ㄱㄴㄷ ㄅㄆㄇ 𠮷𠀀 龥龦 ・ー「」。、！？：；",
    "e\u0301 é a\u0308\u0323 ạ̈ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢ ไม่ได้ हिन्दी বাংলা தமிழ் កម្ពុជា",
    "\x00\x01\x1b[31m\x7f\x85\u200b\u2028\u2029\ufeff\ufffd\uffff\ufdd0 \u00a0\u3000\u2003|",
    "ﬁ ﬂ Ⅻ ½ ² ٣ ४ 一二三 １２３ ℌ ſ 'ſ 'S 'LL y'ALL'VE I'm i'M Ǆ ǅ ǆ İ ı ẞ",
    "1 12 123 1234 12345 123456 1234567 1,234,567.89 0x1F 1e-9 2024-02-29T23:59:60Z ٠١٢٣٤٥",
    "a" * 2000,
    " " * 2000 + "x",
    "\n" * 700 + " \r\n\t" * 300,
    "ab" * 900 + "é" * 900 + "日" * 900 + "👋" * 300,
    "7" * 1000 + "." * 1000 + "=-" * 500,
    "<|im_start|>system\n<|im_end|><|endoftext|><|eot_id|><s></s><bos><unk>[INST][/INST]<｜User｜><think></think>",
    "<|im_start |><|im_end|<|>|><0x41><0x0A>[PAD151935]<unused3> <|IM_END|> \\u003c|im_end|\\u003e &lt;s&gt;",
    "▁▁a▁ ▁b Ġ Ċ ĉ Â ¡ ¿ \u0120hello ##ing </w> @@",
    "if (x<=0) {\n\t\treturn a[i]->b?.c ?? `d${e}`; // №1\r\n}\n\n\n#include <stdio.h>\n  \n   \n",
    "https://exämple.org/a/b_c-d?e=f&g=%20#h me@mail.example 3.14€ $5 50% C++ C# .NET",
]


def random_texts(seed: int, num: int) -> list[str]:
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = "aabcdeehlnoot  \n\t.,'▁éß日本👋1290<|>/s"
    return ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(num)]


def byte_level() -> tokenizers.Tokenizer:
    """A GPT-2-like tokenizer, with special tokens and with added tokens that a careless decoder garbles."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("  <two words>", normalized=False)])
    return tokenizer


def gguf_of_byte_level(tokenizer: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Return the metadata that a converter writes for it."""
    stored = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    kinds = {t["content"]: 3 if t["special"] else 4 for t in stored["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_model(kind: str, folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Return a real model, trained by the sentencepiece package: `kind` is "bpe" or "unigram"."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=SENTENCEPIECE_SIZE[kind],
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        user_defined_symbols=["<|end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def gguf_of_sentencepiece(model: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) == "<|end|>" else 1

    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def marked_bpe() -> tokenizers.Tokenizer:
    """Make the tokenizer that transformers makes of a SentencePiece BPE model: ▁ for spaces, byte fallback, one space stripped at the start."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlnot.é日", "▁▁"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokens = ["[UNK]", "[SEP]", "hello", "##lo", "wor", "##ld", "a", ".", ",", "##", "é"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def suffix_bpe() -> tokenizers.Tokenizer:
    tokens = ["a", "b</w>", "hello</w>", "é</w>", ".</w>", "<end>"]
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def write_gguf_metadata(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with no tensors."""
    body = b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        case _:
            raise TypeError(type(value))
