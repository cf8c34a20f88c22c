"""How byte-level BPE vocabularies of GGUF files cut a text into words before merging: by name, as `tokenizer.ggml.pre` says.
Knows nothing of files or ids. The patterns are those of each model's own tokenizer.json, or agree with it."""

from dataclasses import dataclass, field

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Words:
    """Each pattern cuts what the one before left: its matches, and what lies between them, become words of their own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    nfc: bool = False  # the text is composed first, as the model's own tokenizer does (llama.cpp leaves it as it is)
    adds_bos: bool = False  # where the file does not say
    names: tuple[str, ...] = field(default=())


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}+", not_word: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{not_word}|{_TAIL}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _o200k(contraction: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\x{B5}À-ÖØ-öø-ƺƼ-ƿ\x{1C4}-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\x{3F5}Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ\x{2102}\x{2107}\x{210A}-\x{2113}"
    r"\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-"
    r"\x{213F}\x{2145}-\x{2149}ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-"
    r"\x{FF3A}\x{FF41}-\x{FF5A}𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _TAIL
)

_ALL = (
    Words((_GPT2,), names=("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "exaone4", "jais", "trillion", "granite-docling")),
    Words((_GPT2,), nfc=True, names=("mpt", "olmo")),
    Words((r"\p{N}", _GPT2), names=("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2")),
    Words((r"\p{N}", _GPT2), nfc=True, names=("command-r",)),
    Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"), names=("falcon",)),
    Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), names=("default",)),
    Words((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True,
          names=("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    Words((_cl100k(r"\p{N}{1,3}"),), names=("dbrx", "smaug-bpe", "chatglm-bpe")),
    Words((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, names=("glm4", "glm5")),
    Words((_cl100k(r"\p{N}"),), nfc=True, names=("qwen2", "deepseek-r1-qwen", "megrez")),
    Words((_cl100k(r"\p{N}"),), names=("stablelm2", "hunyuan", "grok-2", "solar-open")),
    Words((_cl100k(r"\p{N}", r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True, names=("qwen35",)),
    Words((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
          names=("deepseek-llm",)),
    Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"), names=("deepseek-coder",)),
    Words((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3), names=("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    Words((_o200k("", r"\p{N}"),), ignore_merges=True, adds_bos=True, names=("tekken",)),
    Words((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),), names=("gpt-4o", "llama4", "kanana2")),
    Words((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),), nfc=True, names=("minimax-m2",)),
    Words((r" ?[^(\s|.,!?…。，、।۔،)]+",), names=("bloom", "poro-chat", "gpt3-finnish")),
)  # fmt: skip

_BY_NAME = {name: words for words in _ALL for name in words.names}


def words_named(name: str) -> Words:
    """A wrong guess here would answer with quietly wrong tokens, so an unknown name is refused."""
    if name not in _BY_NAME:
        raise ConfigError(
            f"the GGUF vocabulary is cut into words by {name!r}, which is not supported "
            f"(supported: {', '.join(sorted(_BY_NAME))}); give --tokenizer a folder with the model's tokenizer.json"
        )
    return _BY_NAME[name]


def pre_tokenizer(words: Words) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer(words: Words) -> normalizers.Normalizer | None:
    return normalizers.NFC() if words.nfc else None
