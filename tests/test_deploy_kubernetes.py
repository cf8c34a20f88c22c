"""deploy/kubernetes: every overlay renders, keeps to the schemas of Kubernetes, and names flags, metrics, probes and files that exist."""

import functools
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from octavo.cli.settings import unknown_variables
from tests.test_deploy import tool

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ["base", "overlays/gpu", "overlays/replicas", "overlays/kuberay"]
Manifest = dict[str, Any]


@functools.cache
def render(name: str) -> str:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(FOLDER / name)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


def manifests(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all(render(name)))


def one(name: str, kind: str) -> Manifest:
    (found,) = [manifest for manifest in manifests(name) if manifest["kind"] == kind]
    return found


def pods(name: str) -> list[Manifest]:
    """The specs of all pods that an overlay makes."""
    templates = []
    for manifest in manifests(name):
        if manifest["kind"] == "Deployment":
            templates.append(manifest["spec"]["template"])
        elif manifest["kind"] == "RayCluster":
            templates.append(manifest["spec"]["headGroupSpec"]["template"])
            templates += [group["template"] for group in manifest["spec"]["workerGroupSpecs"]]
    return [template["spec"] for template in templates]


def server(name: str) -> Manifest:
    (found,) = [each for pod in pods(name) for each in pod["containers"] if each["name"] == "octavo"]
    return found


def test_all_overlays_are_tried() -> None:
    found = {str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("kustomization.yaml")}
    assert found == set(OVERLAYS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_manifests_keep_to_the_schemas(name: str) -> None:
    try:
        validate = importlib.import_module("kubernetes_validate")
    except ImportError:
        pytest.skip("kubernetes-validate is not installed (22 MB): pip install octavo[kubernetes]")
    for manifest in manifests(name):
        if manifest["apiVersion"] != "ray.io/v1":  # its schema comes with the operator
            validate.validate(manifest, validate.latest_version(), strict=True)
    for pod in pods(name):  # also those inside a RayCluster
        meta = {"name": "octavo"}
        validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}, validate.latest_version(), strict=True
        )
    broken = manifests(name)[0] | {"metdata": {}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_are_flags_that_exist(name: str) -> None:
    settings = one(name, "ConfigMap")["data"]
    variables = {**settings, **{each["name"]: "" for each in server(name)["env"] if each["name"].startswith("OCTAVO_")}}
    assert not unknown_variables(variables)
    assert unknown_variables({"OCTAVO_NO_SUCH_FLAG": "1"})
    (reference,) = [each["configMapRef"]["name"] for each in server(name)["envFrom"]]
    assert reference == one(name, "ConfigMap")["metadata"]["name"], "the generated name has a hash"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_may_finish_its_streams(name: str) -> None:
    container, shutdown = server(name), float(one(name, "ConfigMap")["data"]["OCTAVO_SHUTDOWN_TIMEOUT"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = [pod["terminationGracePeriodSeconds"] for pod in pods(name) if container in pod["containers"]]
    assert grace[0] > shutdown + pause + 10
    budget = one(name, "PodDisruptionBudget")["spec"]
    assert ("minAvailable" in budget) != ("maxUnavailable" in budget)


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_ask_endpoints_that_need_no_key(name: str) -> None:
    container = server(name)
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/health/ready",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert container["readinessProbe"]["httpGet"]["port"] == "http" and ports == {"http": 8000}
    assert one(name, "Service")["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_no_rights_and_all_have_requests(name: str) -> None:
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["image"].startswith("octavo:"), "the image is set"
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
    assert "api-key" not in str([manifest for manifest in manifests(name) if manifest["kind"] == "Secret"])


def test_a_service_finds_its_pods() -> None:
    for name in OVERLAYS[:3]:
        labels = one(name, "Deployment")["spec"]["template"]["metadata"]["labels"]
        for selector in (
            one(name, "Service")["spec"]["selector"],
            one(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
            one(name, "Deployment")["spec"]["selector"]["matchLabels"],
        ):
            assert selector and selector.items() <= labels.items()
    by_ray = {"ray.io/cluster": one("overlays/kuberay", "RayCluster")["metadata"]["name"], "ray.io/node-type": "head"}
    assert one("overlays/kuberay", "Service")["spec"]["selector"] == by_ray


def test_the_server_of_a_ray_cluster_places_its_replicas_there() -> None:
    name = "overlays/kuberay"
    settings = one(name, "ConfigMap")["data"]
    assert settings["OCTAVO_DISTRIBUTED_EXECUTOR_BACKEND"] == "ray" and settings["OCTAVO_SHUTDOWN_TIMEOUT"]
    (group,) = one(name, "RayCluster")["spec"]["workerGroupSpecs"]
    assert int(settings["OCTAVO_DATA_PARALLEL_SIZE"]) == group["replicas"], "a replica for each node"
    environment = {each["name"]: each.get("value", "") for each in server(name)["env"]}
    assert environment["OCTAVO_RAY_ADDRESS"] == "$(POD_IP):6379" and list(environment).index("POD_IP") < list(
        environment
    ).index("OCTAVO_RAY_ADDRESS"), "a variable that uses another comes after it"
    containers = [each for pod in pods(name) for each in pod["containers"]]
    for container in containers:
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" in variables
    for container in (each for each in containers if each["name"].startswith("ray-")):
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert int(variables["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 600, "streams go on without the head"
    driver, head = server(name), next(each for each in containers if each["name"] == "ray-head")
    for path in ("/tmp/ray", "/dev/shm"):  # the placer is a driver of the head's node
        (mine,) = [each["name"] for each in driver["volumeMounts"] if each["mountPath"] == path]
        assert mine in [each["name"] for each in head["volumeMounts"] if each["mountPath"] == path]


def test_a_gpu_is_asked_for_once() -> None:
    resources = server("overlays/gpu")["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert server("overlays/gpu")["image"] == "octavo:cuda" and server("base")["image"] == "octavo:cpu"


def test_the_autoscaler_follows_metrics_that_octavo_has() -> None:
    scaler = one("overlays/replicas", "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == one("overlays/replicas", "Deployment")["metadata"]["name"]
    assert "replicas" not in one("overlays/replicas", "Deployment")["spec"]
    text = (FOLDER / "overlays" / "replicas" / "autoscaler.yaml").read_text()
    rules = dict(re.findall(r"metricsQuery: '\w+\(([a-z_:]+)\{|name: \{as: (\w+)\}", text))
    queries, names = {query for query in rules if query}, set(re.findall(r"name: \{as: (\w+)\}", text))
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert len(queries) == 2 and all(f"`{query}`" in known for query in queries)
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == names
    assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300
