"""`octavo run`: a server is started for a conversation, found by the next one, and stopped after it."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.supervisor.runtime_dir import running_servers
from octavo.weights.sources.source import resolve
from tests.e2e.servers import Server

pytestmark = pytest.mark.model


def octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_server_is_started_for_one_answer_and_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_KV_CACHE_MEMORY_BYTES", "128M")
    before = {record.pid for record in running_servers()}
    link = tmp_path / "linked.gguf"  # a name that no other server has
    link.symlink_to(resolve("").path)
    ran = octavo("run", str(link), "Name the capital of France.", "--temperature", "0")
    assert ran.returncode == 0 and "Paris" in ran.stdout, ran.stderr
    assert "starting a server for" in ran.stderr
    assert {record.pid for record in running_servers()} <= before, "it was stopped"


def test_a_conversation_that_is_killed_leaves_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when its terminal is closed."""
    monkeypatch.setenv("OCTAVO_KV_CACHE_MEMORY_BYTES", "128M")
    link = tmp_path / "orphaned.gguf"
    link.symlink_to(resolve("").path)
    command = [sys.executable, "-m", "octavo.cli.main", "run", str(link), "--max-tokens", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"Hello.\n")
        running.stdin.flush()
        assert running.stdout.readline(), "it has answered"
        (record,) = [record for record in running_servers() if record.model == "orphaned"]
        ended = os.pidfd_open(record.pid)
        running.kill()
    assert select.select([ended], [], [], 60)[0], "the server has ended"
    os.close(ended)


def test_a_server_that_runs_is_used(server: Server) -> None:
    records = [record for record in running_servers() if record.url == server.base + "/v1"]
    assert [record.model for record in records] == ["SmolLM2-135M-Instruct"]
    note = resolve("").note
    assert "often wrong" in note and [line for line in server.lines if line.endswith(note)], "a newcomer reads it"
    assert server.base in octavo("ps").stdout
    ran = octavo("run", "SmolLM2-135M-Instruct", "Name the capital of France.", "--temperature", "0")
    assert "Paris" in ran.stdout and "starting" not in ran.stderr
