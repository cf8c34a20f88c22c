"""Checksums of a model's files that take milliseconds: sizes, headers and samples of the weights, all of the small files."""

import hashlib
from pathlib import Path

from octavo.gguf import part_paths
from octavo.weights.sources.folder import CONFIG
from octavo.weights.sources.source import ModelSource

_DIGITS = 16
_HEAD = 64 * 2**10  # bytes read from the beginning of a large file, and from its end
_NUM_SAMPLES, _SAMPLE = 256, 1024  # samples evenly between them, and bytes of each
_SMALL = 64 * 2**20  # a file of at most an eighth of this is read entirely
# In a folder: tokenizer, template, and the makers' default sampling.
_WORDS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "spiece*",
    "*.model",
    "*.tiktoken",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
)


def weights_identity(source: ModelSource, is_dummy: bool) -> str:
    """Checksum of configuration and weights. `is_dummy`: random weights, the same for every start."""
    if source.kind == "gguf":
        return _digest(part_paths(source.path))
    weights = [] if is_dummy else sorted(source.path.glob("*.safetensors"))
    return _digest([source.path / CONFIG, *weights]) + ("-dummy" if is_dummy else "")


def words_identity(source: ModelSource, tokenizer: str, chat_template: str) -> str:
    """Checksum of tokenizer and template files. `tokenizer`, `chat_template`: files given in place of the model's own."""
    paths = _words_of(source.path)
    for named in (tokenizer, chat_template):
        paths += _words_of(Path(named).expanduser()) if named else []
    return _digest(paths)


def _words_of(path: Path) -> list[Path]:
    return sorted({found for kind in _WORDS for found in path.glob(kind)}) if path.is_dir() else [path]


def _digest(paths: list[Path]) -> str:
    checksum = hashlib.sha256()
    for path in paths:
        if path.is_file():
            size = path.stat().st_size
            # Without the name: users name files and folders as they like.
            checksum.update(f"{path.suffix} {size}\n".encode())
            with path.open("rb") as file:
                for offset, length in _pieces(size):
                    file.seek(offset)
                    checksum.update(file.read(length))
    return checksum.hexdigest()[:_DIGITS]


def _pieces(size: int) -> list[tuple[int, int]]:
    if size <= 2 * _HEAD or size <= _SMALL // 8:
        return [(0, size)]
    step = max(1, (size - 2 * _HEAD) // _NUM_SAMPLES)
    samples = [(_HEAD + number * step, _SAMPLE) for number in range(_NUM_SAMPLES)]
    return [(0, _HEAD), *samples, (size - _HEAD, _HEAD)]
