"""The process that reads the headers of adapters: its answers, and what happens when it ends or hangs."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.weights.adapters import reader_process
from octavo.weights.adapters.adapter_file import open_adapter
from octavo.weights.adapters.reader_process import AdapterReader
from tests.adapters import write_model, write_peft


@pytest.fixture
def reader() -> Iterator[AdapterReader]:
    reader = AdapterReader()
    yield reader
    reader.close()
    assert reader.process_id is None


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("adapter")
    write_peft(place / "poet", write_model(place / "model", 64), rank=8, seed=1)
    return str(place / "poet")


def test_one_process_reads_and_refuses(reader: AdapterReader, adapter: str, tmp_path: Path) -> None:
    assert reader.process_id is None, "nothing is started before the first adapter"
    assert reader.num_weights(adapter, 8) == open_adapter(adapter).num_weights > 0
    process = reader.process_id
    assert process is not None and process != os.getpid()
    with pytest.raises(ConfigError, match="has rank 8; the limit is 4"):
        reader.num_weights(adapter, 4)
    missing = str(tmp_path / "no\nsuch \u2026 folder")
    with pytest.raises(ConfigError) as refused:
        reader.num_weights(missing, 8)
    with pytest.raises(ConfigError) as here:
        open_adapter(missing)
    assert str(refused.value) == str(here.value)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        reader.num_weights(str(tmp_path / "\udc80"), 8)
    assert reader.process_id == process
    assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_that_has_ended_is_replaced(reader: AdapterReader, adapter: str) -> None:
    count = reader.num_weights(adapter, 8)
    first = reader.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert reader.num_weights(adapter, 8) == count and reader.process_id not in (None, first)


def test_a_process_that_hangs_is_ended(reader: AdapterReader, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = reader.num_weights(adapter, 8)
    hung = reader.process_id
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    with monkeypatch.context() as limits:
        limits.setattr(reader_process, "READ_SECONDS", 0.2)
        with pytest.raises(ConfigError, match=r"takes more than 0\.2 s"):
            reader.num_weights(adapter, 8)
    assert reader.process_id is None
    assert reader.num_weights(adapter, 8) == count, "the next one is read by another process"


def test_closing_ends_a_read(reader: AdapterReader, adapter: str) -> None:
    reader.num_weights(adapter, 8)
    process = reader.process_id
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    errors: list[str] = []

    def read() -> None:
        try:
            reader.num_weights(adapter, 8)
        except ConfigError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=read)
    waiting.start()
    started = time.monotonic()
    reader.close()
    waiting.join()
    assert errors and "was ended" in errors[0] and reader.process_id is None
    assert time.monotonic() - started < reader_process.READ_SECONDS / 2
