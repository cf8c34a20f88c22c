"""What the placer says where there is no Ray, or no cluster."""

import socket
import sys

import pytest

from octavo.cluster.placer import RayCluster, _brief, _check_answers, _running_here
from octavo.errors import ConfigError


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'octavo\[ray\]'"):
        RayCluster("127.0.0.1:1", 1)


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":6379", "host:name", "ray://host:10001x"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT of a Ray head"):
        _check_answers(address)


def test_an_address_at_which_nothing_answers_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        _check_answers(address)
    for wrong in (address, "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {wrong}"):
            _check_answers(wrong)


def test_the_cluster_of_this_machine_is_found_if_it_still_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert _running_here() == ""
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address + "\n")
        assert _running_here() == address
    assert _running_here() == "", "the file outlives the cluster"


def test_rays_many_lines_become_one() -> None:
    said = "The actor died.\n  File x\nModuleNotFoundError: No module named 'octavo'\nmore"
    assert _brief(RuntimeError(said)) == "The actor died. ModuleNotFoundError: No module named 'octavo'"
    assert _brief(RuntimeError("")) == "RuntimeError"
