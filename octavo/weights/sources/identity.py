"""A checksum of a model's files that takes milliseconds: sizes, headers and samples of the weights, all of the small files.
Knows nothing of torch, formats or what the files mean."""

import hashlib
from pathlib import Path

from octavo.weights.sources.folder import CONFIG
from octavo.weights.sources.source import ModelSource

_DIGITS = 16
_HEAD = 64 * 2**10  # bytes of a large file that are read from its beginning, and from its end
_NUM_SAMPLES, _SAMPLE = 256, 1024  # and evenly between them: a matrix of a few megabytes is met in any file
_SMALL = 64 * 2**20  # read whole
# Of a folder: tokenizer, template, and the sampling its makers advise.
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
    """Of what the numbers are computed from. `is_dummy`: random weights, the same for every start."""
    if source.kind == "gguf":
        return _digest([source.path])
    weights = [] if is_dummy else sorted(source.path.glob("*.safetensors"))
    return _digest([source.path / CONFIG, *weights]) + ("-dummy" if is_dummy else "")


def words_identity(source: ModelSource, tokenizer: str, chat_template: str) -> str:
    """Of what makes tokens of a text and a text of tokens. `tokenizer`, `chat_template`: files named in place of the model's."""
    paths = _words_of(source.path)
    for named in (tokenizer, chat_template):
        paths += _words_of(Path(named).expanduser()) if named else []
    return _digest(paths)


def _words_of(path: Path) -> list[Path]:
    return sorted({found for kind in _WORDS for found in path.glob(kind)}) if path.is_dir() else [path]


def _digest(paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        if path.is_file():
            size = path.stat().st_size
            # The name of what a person passed is the person's own; inside a folder it says which file this is.
            whole.update(f"{path.suffix} {size}\n".encode())
            with path.open("rb") as file:
                for offset, length in _pieces(size):
                    file.seek(offset)
                    whole.update(file.read(length))
    return whole.hexdigest()[:_DIGITS]


def _pieces(size: int) -> list[tuple[int, int]]:
    if size <= 2 * _HEAD or size <= _SMALL // 8:
        return [(0, size)]
    step = max(1, (size - 2 * _HEAD) // _NUM_SAMPLES)
    samples = [(_HEAD + number * step, _SAMPLE) for number in range(_NUM_SAMPLES)]
    return [(0, _HEAD), *samples, (size - _HEAD, _HEAD)]
