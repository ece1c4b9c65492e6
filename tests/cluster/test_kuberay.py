"""The files for Kubernetes: built by kustomize, and checked by the schemas of Kubernetes and by Ray's autoscaler.

The schema of KubeRay's own fields is in no package, so those are checked only as far as Ray itself reads them.
"""

import json
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import validate_config

from serve_app.cli.check import check_file
from serve_app.config.model import ModelArgs
from tests.support.readme_blocks import ROOT

KUBERAY = ROOT / "cluster" / "kuberay"
KUBERNETES = "1.34"
CONFIGS = {"gpu": "production", "cpu": "development"}

Json = dict[str, Any]

overlays = pytest.mark.parametrize("overlay", CONFIGS)


@cache
def built(overlay: str) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, which has kustomize")
    command = [kubectl, "kustomize", str(KUBERAY / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources(overlay: str) -> list[Json]:
    return list(yaml.safe_load_all(built(overlay)))


def rayservice(overlay: str) -> Json:
    (found,) = [resource for resource in resources(overlay) if resource["kind"] == "RayService"]
    return found


def groups(overlay: str) -> list[Json]:
    cluster = rayservice(overlay)["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@overlays
def test_kubernetes_takes_every_resource(overlay: str) -> None:
    for resource in resources(overlay):
        if resource["kind"] != "RayService":
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@overlays
def test_kubernetes_takes_every_pod(overlay: str) -> None:
    for group in groups(overlay):
        template = group["template"]
        metadata = {"name": "pod", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@overlays
def test_a_pod_runs_as_nobody_special_and_has_what_it_mounts(overlay: str) -> None:
    for group in groups(overlay):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}
        assert container["image"] == f"registry.example.com/roundhouse:{overlay}"


@overlays
def test_the_autoscaler_of_ray_reads_the_groups(overlay: str) -> None:
    service = rayservice(overlay)
    cluster = {"metadata": {"name": "roundhouse", "namespace": "default"}, "spec": service["spec"]["rayClusterConfig"]}
    config = _derive_autoscaling_config_from_ray_cr(json.loads(json.dumps(cluster)))
    validate_config(config)
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert (types["ingress"]["min_workers"], types["ingress"]["max_workers"]) == (2, 4)
    assert types[overlay]["resources"].get("GPU", 0) == (2 if overlay == "gpu" else 0)


@overlays
def test_the_service_runs_the_configuration_that_is_checked(overlay: str) -> None:
    path = ROOT / "cluster" / "serve" / f"{CONFIGS[overlay]}.yaml"
    assert rayservice(overlay)["spec"]["serveConfigV2"] == path.read_text(encoding="utf-8")


@overlays
def test_a_pod_of_the_models_has_room_for_the_largest_replica(overlay: str) -> None:
    apps = check_file(ROOT / "cluster" / "serve" / f"{CONFIGS[overlay]}.yaml").apps.values()
    models = [args for args in apps if isinstance(args, ModelArgs)]
    (container,) = groups(overlay)[-1]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert int(limits.get("nvidia.com/gpu", 0)) >= max(args.gpus_per_replica for args in models)
    assert int(limits["cpu"]) >= max(args.cpus_per_replica for args in models)


@overlays
def test_ray_asks_for_a_token_and_runs_in_the_version_that_is_pinned(overlay: str) -> None:
    cluster = rayservice(overlay)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


@overlays
def test_a_pod_that_ends_has_longer_than_its_requests(overlay: str) -> None:
    apps = check_file(ROOT / "cluster" / "serve" / f"{CONFIGS[overlay]}.yaml").apps.values()
    longest = max(args.graceful_shutdown_timeout_s for args in apps)
    for group in groups(overlay)[1:]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= longest + 60
    assert rayservice(overlay)["spec"]["rayClusterDeletionDelaySeconds"] >= longest + 60


@overlays
def test_what_reaches_the_pods_selects_them(overlay: str) -> None:
    found = {resource["kind"]: resource["spec"] for resource in resources(overlay)}
    (labels,) = {tuple(group["template"]["metadata"]["labels"].items()) for group in groups(overlay)}
    assert found["NetworkPolicy"]["podSelector"]["matchLabels"] == dict(labels)
    assert found["Service"]["selector"] == dict(labels)
    (backend,) = [path["backend"]["service"] for path in found["Ingress"]["rules"][0]["http"]["paths"]]
    # KubeRay names the service of a RayService so.
    assert backend == {"name": f"{rayservice(overlay)['metadata']['name']}-serve-svc", "port": {"number": 8000}}
