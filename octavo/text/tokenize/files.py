"""Where a folder has its vocabulary."""

from pathlib import Path

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TEKKEN_FILE, QWEN_FILE = "tekken.json", "qwen.tiktoken"
NAMES = ("tokenizer.json", *SENTENCEPIECE_FILES, TEKKEN_FILE, QWEN_FILE)


def vocabulary_file(folder: Path) -> Path | None:
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)
