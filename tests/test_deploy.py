"""deploy/: Dockerfiles and scripts pass their linters, the unit passes systemd's, and every name, path, flag and metric in these files is one
that exists. `make try-images` runs the Dockerfiles' steps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from octavo.cli.flags import Parser, add_config_flags, add_settings_file
from octavo.cli.settings import unknown_variables
from octavo.weights.sources.default_model import SMOLLM2

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("docker/Dockerfile.c*[ua]"))
SCRIPTS = [*sorted(DEPLOY.glob("docker/steps/*.sh")), *sorted((ROOT / "scripts").glob("*.sh"))]
UNIT = DEPLOY / "systemd" / "octavo.service"


def tool(name: str) -> str:
    """A linter of the environment that runs the tests, else the system's."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def output_of(command: list[str]) -> str:
    """Both streams, of a command that must end with 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# ── images ──────────────────────────────────────────────────────────────────────────────────────────


def test_linters_find_nothing_in_dockerfiles_and_scripts(tmp_path: Path) -> None:
    assert len(DOCKERFILES) == 2 and len(SCRIPTS) >= 5
    assert output_of([tool("hadolint"), *map(str, DOCKERFILES)]) == ""
    assert output_of([tool("shellcheck"), *map(str, SCRIPTS)]) == ""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && sudo ls\n")
    assert subprocess.run([tool("hadolint"), str(bad)], capture_output=True).returncode != 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_only_steps_that_are_tried_and_is_not_roots(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    kind = path.suffix[1:]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = [line for line in lines if line.startswith("RUN")]
    assert steps == [
        'RUN ["/steps/tools.sh"]',
        f'RUN ["/steps/install.sh", "{kind}"]',
        f'RUN ["/steps/runtime.sh", "{kind}"]',
    ]
    tried = (ROOT / "scripts" / "try_images.sh").read_text()
    for step in ("/steps/tools.sh", '/steps/install.sh "$kind"', '/steps/runtime.sh "$kind"'):
        assert f"{step}\n" in tried
    final = lines[[number for number, line in enumerate(lines) if line.startswith("FROM")][-1] :]
    user = next(line for line in final if line.startswith("USER"))
    uid = re.search(r"--uid (\d+)", (DEPLOY / "docker/steps/runtime.sh").read_text())
    assert uid and user == f"USER {uid[1]}:{uid[1]}" and int(uid[1]) > 0
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in copied.split():
            assert source == "dist/" or (ROOT / source).stat().st_mode & 0o111, f"{source} is missing or not executable"
    # The model's name in try_images.sh, and variables that Octavo would not know.
    assert SMOLLM2.file_name in tried
    assert unknown_variables(dict(re.findall(r"(OCTAVO_\w+)=(\S+)", text))) == {}


def test_an_install_refuses_the_other_build_of_torch(tmp_path: Path) -> None:
    """install.sh against stand-ins for the environment's commands: the check itself is real."""
    script = (DEPLOY / "docker/steps/install.sh").read_text()
    place = tmp_path / "opt"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text('#!/bin/sh\n[ "$1" = -c ] && echo cuda\nexit 0\n')
    (place / "bin" / "python").chmod(0o755)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    changed = script.replace("/opt/octavo", str(place))
    done = subprocess.run(
        ["sh", "-c", changed, "install.sh", "cpu"], env={"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "torch is a cuda build, and this is the cpu image" in done.stderr


# ── compose, Prometheus, Grafana ────────────────────────────────────────────────────────────────────


def test_compose_names_what_exists_and_opens_no_port_to_others() -> None:
    compose = load("compose.yaml")
    gpu = load("compose.cuda.yaml")
    assert gpu["services"].keys() <= compose["services"].keys()
    octavo = compose["services"]["octavo"]
    for built in (octavo["build"], gpu["services"]["octavo"]["build"]):
        assert (ROOT / built["dockerfile"]).exists()
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert "latest" not in service["image"] and ":" in service["image"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"], source
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
    variables = dict.fromkeys(octavo["environment"], "x")
    assert unknown_variables(variables) == {}
    assert octavo["environment"]["OCTAVO_API_KEY_FILE"] == "/run/secrets/api-key"


def test_prometheus_scrapes_octavo_and_alerts_on_metrics_that_exist() -> None:
    from scripts.reference import metrics_page

    known = set(re.findall(r"^\| `((?:vllm:|octavo:|http_)\w+)`", "\n".join(metrics_page()), re.MULTILINE))
    config = load("prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert (job["metrics_path"], job["static_configs"][0]["targets"]) == ("/metrics", ["octavo:8000"])
    assert job["authorization"]["credentials_file"] == "/run/secrets/api-key"
    for file in config["rule_files"]:
        assert (DEPLOY / "prometheus" / Path(file).name).exists()
    rules = [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]
    named = {name for rule in rules for name in re.findall(r"\b(?:vllm:|octavo:|http_)\w+", rule["expr"])}
    assert len(named) >= 4
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= known
    jobs = {job for rule in rules for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == {job["job_name"] for job in config["scrape_configs"]}


def test_grafana_finds_its_source_and_its_board() -> None:
    compose = load("compose.yaml")["services"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert source["type"] == "prometheus" and host in compose
    assert any(each.endswith(f":{port}") for each in compose[host]["ports"])
    (provider,) = load("grafana/provisioning/dashboards/octavo.yml")["providers"]
    mounts = [volume.split(":")[1] for volume in compose["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/octavo.json" in mounts and "/etc/grafana/provisioning" in mounts


# ── systemd ─────────────────────────────────────────────────────────────────────────────────────────


def unit_values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_the_unit_starts_octavo_with_flags_that_exist() -> None:
    (command,) = unit_values("ExecStart")
    words = command.split()
    parser = Parser()
    add_settings_file(parser)
    add_config_flags(parser)
    known = parser._option_string_actions
    assert words[1] == "serve" and {word for word in words if word.startswith("--")} <= known.keys()
    variables = {pair.split("=")[0]: "x" for line in unit_values("Environment") for pair in line.split()}
    assert unknown_variables(variables) == {}


def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    for kind in ("cpu", "cuda"):
        (tmp_path / kind / "octavo.service.d").mkdir(parents=True)
        unit = tmp_path / kind / UNIT.name
        unit.write_text(UNIT.read_text().replace("/opt/octavo/bin/octavo", "/bin/true"))
        if kind == "cuda":
            shutil.copy(DEPLOY / "systemd/octavo.service.d/cuda.conf", tmp_path / kind / "octavo.service.d")
        assert output_of([analyze, "verify", "--man=no", str(unit)]) == ""
    security = [analyze, "security", "--offline=true", "--threshold=20", "--no-pager"]  # 2.0 of 10
    if "--offline" in output_of([analyze, "--help"]):
        output_of([*security, str(tmp_path / "cpu" / UNIT.name)])
        (tmp_path / "open.service").write_text("[Service]\nExecStart=/bin/true\n")
        assert subprocess.run([*security, str(tmp_path / "open.service")], capture_output=True).returncode != 0
