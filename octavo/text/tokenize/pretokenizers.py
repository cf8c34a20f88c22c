"""Patterns that cut a text into words before BPE merges, by the name in a GGUF file's `tokenizer.ggml.pre`. They are those of
each model's own tokenizer.json, or equivalent."""

from dataclasses import dataclass, field

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Words:
    """How to cut a text. Each pattern is applied to the words of the one before: its matches, and the text between them, become
    separate words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is not split, whatever the merges say
    nfc: bool = False  # apply NFC first, as the model's own tokenizer does (llama.cpp does not)
    adds_bos: bool = False  # default if the file does not specify it
    names: tuple[str, ...] = field(default=())


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NOT_WORD = r"[^\s\p{L}\p{N}]+[\r\n]*"


def _cl100k(
    digits: str,
    letters: str = r"\p{L}+",
    not_word: str = _NOT_WORD,
    contraction: str = _CONTRACTION + "|",
    tail: str = _TAIL,
) -> str:
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{not_word}|{tail}"


def _o200k(contraction: str, digits: str, *, but: str = "", not_word: str = r"[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """`but`: a set operation that removes letters from both cases."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return (
        rf"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?{not_word}|{_TAIL}"
    )


_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\x{B5}À-ÖØ-öø-ƺƼ-ƿ\x{1C4}-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\x{3F5}Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ\x{2102}\x{2107}\x{210A}-\x{2113}"
    r"\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-"
    r"\x{213F}\x{2145}-\x{2149}ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-"
    r"\x{FF3A}\x{FF41}-\x{FF5A}𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


def _deepseek_v3(not_word: str, tail: str = _TAIL) -> str:
    return (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?"
        rf"{not_word}|{tail}"
    )


_DEEPSEEK_V3 = _deepseek_v3(r"[\p{P}\p{S}]+[\r\n]*")
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Three names group digits in threes from the right. Their own patterns look ahead to the number's end from every group, which
# takes minutes for a long number. Here the end is found once: first the number is cut out, then the one or two digits before
# the groups of three.
_THREES = r"(?<!\d)\d{0,2}\K(?:\d{3})++(?!\d)"
# Runs of spaces in the sizes for which the vocabulary has tokens.
_JAIS_SPACES = "|".join([rf"\s{{{size}}}(?!\S)" for size in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")])
_ASIAN = r"[一-鿿㐀-䶿\x{F900}-\x{FAFF}぀-ゟ゠-ヿ･-ﾟ\x{2F00}-\x{2FDF}เ-\x{E7F}\x{E80}-\x{EFF}ក-\x{17FF}က-႟ꩠ-ꩿꧠ-\x{A9FF}가-\x{D7AF}ᄀ-ᇿ]+"

_ALL = (
    Words((_GPT2,), names=("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code",
                           "roberta-bpe", "modern-bert", "gigachat", "exaone4", "jais", "trillion", "granite-docling",
                           "a.x-4.0", "mellum")),
    Words((_GPT2,), nfc=True, names=("mpt", "olmo")),
    Words((r"\p{N}", _GPT2), names=("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2")),
    Words((r"\p{N}", _GPT2), nfc=True, names=("command-r",)),
    Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"), names=("falcon",)),
    Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), names=("default",)),
    Words((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True,
          names=("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")),
    Words((_cl100k(r"\p{N}{1,3}"),), names=("dbrx", "smaug-bpe")),
    Words((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, names=("glm4", "glm5", "chatglm-bpe")),
    Words((_cl100k(r"\p{N}{1,3}", tail=rf"\s*[\r\n]+|{_JAIS_SPACES}|\s"),), names=("jais-2",)),
    Words((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True, names=("minicpm5",)),
    Words((_cl100k(r"\p{N}"),), nfc=True, names=("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2")),
    Words((_cl100k(r"\p{N}"),), names=("stablelm2", "hunyuan", "grok-2", "solar-open")),
    Words((r"\n+", _cl100k(r"\p{N}")), names=("laguna",)),
    Words((_cl100k(r"\p{N}", contraction=""),), names=("ufakzeka",)),
    Words((_cl100k(r"\p{N}", r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True, names=("qwen35",)),
    Words((_cl100k(r"\p{N}", not_word=r"[^\s\p{L}\p{N}\r\n]+"),), names=("seed-coder",)),
    Words((_cl100k(r"\p{N}", tail=r"\s*[\r\n]|\s+(?!\S)|\s+"),), names=("bailingmoe", "bailingmoe2", "llada-moe")),
    Words((_cl100k(r"\p{N}", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"[^\s\p{L}\p{N}]+[\r\n/]?",
                   tail=r"\s*[\r\n]|\s+(?!\S)|\s+"),), names=("exaone-moe",)),
    Words((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
          names=("deepseek-llm",)),
    Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"), names=("deepseek-coder",)),
    Words((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3), names=("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    Words((r"\p{N}{1,3}", _CJK, _deepseek_v3(r"[\p{P}\p{S}]+", r"[\r\n]|\s+(?!\S)|\s+"), r"\p{N}"), names=("spark2_5",)),
    Words((r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})*+\z)|\p{N}{1,3}", _ASIAN, _DEEPSEEK_V3), names=("afmoe",)),
    Words((_o200k("", r"\p{N}"),), ignore_merges=True, adds_bos=True, names=("tekken",)),
    Words((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),), ignore_merges=True, names=("gpt-4o", "llama4", "kanana2", "talkie")),
    Words((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),), ignore_merges=True, names=("granite-embed-multi-97m",)),
    Words((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),), nfc=True, names=("minimax-m2",)),
    Words((r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})++\z)", _o200k(_CONTRACTION + "?", r"\p{N}{1,3}")),
          names=("tiny_aya", "cohere2moe")),
    Words((r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK, _o200k(_CONTRACTION + "?", r"\p{N}")),
          ignore_merges=True, names=("youtu",)),
    Words((r"\p{Han}+|" + _o200k(_CONTRACTION + "?", r"\p{N}{1,3}", but=r"&&[^\p{Han}]", not_word=_NOT_WORD),),
          ignore_merges=True, names=("kimi-k2",)),
    Words((_BLOOM,), names=("bloom", "poro-chat", "gpt3-finnish")),
    Words((_BLOOM, r"\p{N}"), names=("viking",)),
    Words((r"\p{N}+", _THREES + r"(?:\D++\d{0,2}(?=(?:\d{3})*+(?!\d)))*+", r"\d{3}(?=\d{3})"), names=("superbpe",)),
    Words((r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
          adds_bos=True, names=("chameleon",)),
)  # fmt: skip

_BY_NAME = {name: words for words in _ALL for name in words.names}


def words_named(name: str) -> Words:
    """Return the patterns of that name. An unknown name is an error: a wrong guess would silently give wrong tokens."""
    if name not in _BY_NAME:
        raise ConfigError(
            f"the GGUF vocabulary uses the pre-tokenizer {name!r}, which is not supported "
            f"(supported: {', '.join(sorted(_BY_NAME))}); give --tokenizer a folder with the model's tokenizer.json"
        )
    return _BY_NAME[name]


def pre_tokenizer(words: Words) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer(words: Words) -> normalizers.Normalizer | None:
    return normalizers.NFC() if words.nfc else None
