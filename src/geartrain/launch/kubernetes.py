"""JobSets for Kubernetes: converts a job's description into a manifest for `kubectl apply`.

    geartrain generate kubernetes job.toml --image registry/pendulum:1 --hosts 3 > job.yaml
    kubectl apply -f job.yaml

    JobSet walk                               https://jobset.sigs.k8s.io
      replicatedJob hosts-0-1                 consecutive hosts that run the same roles: an Indexed Job
        pod walk-hosts-0-1-0-0                host 0: one launcher, all processes of the host, its /dev/shm
        pod walk-hosts-0-1-0-1                host 1
      replicatedJob host-2
        pod walk-host-2-0-0                   host 2
      headless service walk                   the pods' names, by which launchers and ranks find host 0

Each pod is one host. The processes of a pod share its /dev/shm, a memory volume, so they share one store. Launchers
read their position from the pod's environment (hosts.py).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from geartrain.core.arguments import check_whole
from geartrain.errors import ArgumentError
from geartrain.launch.hosts import POD, PORT
from geartrain.launch.job import Job
from geartrain.launch.resources import HostResources, host_resources

#: API version of the JobSets.
API_VERSION = "jobset.x-k8s.io/v1alpha2"
#: Added to the job's `stop_s` between SIGTERM and SIGKILL: the launcher closes the store and writes its summary.
GRACE_S = 15
#: Length that Kubernetes adds to a Job's name to name a pod.
_SUFFIX = 6
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def job_set(
    job: Job,
    description: str,
    *,
    image: str,
    hosts: int = 1,
    name: str = "",
    namespace: str = "",
    secret: str = "",
    env: Mapping[str, str] | None = None,
    gpu_resource: str = "nvidia.com/gpu",
    max_restarts: int = 0,
    command: Sequence[str] = ("geartrain",),
) -> dict[str, Any]:
    """A Kubernetes JobSet that runs a job, as nested dicts. `manifest` turns it into YAML.

    Args:
        job: the job that `description` names, for its roles and resources.
        description: as for `launch.load`: a path or module within the image, where the launchers read it.
        image: image of all pods, with geartrain, the job's code and its description.
        hosts: number of pods.
        name: name of the JobSet; by default the job's, in lower case with dashes.
        namespace: namespace of the JobSet; kubectl's by default.
        secret: name of the Secret whose key "secret" is GEARTRAIN_SECRET; NAME-secret by default. For several hosts.
        env: further environment variables of all pods.
        gpu_resource: name of the accelerators in the cluster.
        max_restarts: how often all pods are restarted after a failure, with empty stores.
        command: command that runs `launch` in the image.

    Raises:
        ArgumentError: the job cannot be placed on so many hosts, has no `shared_memory_gb`, or has a name that
            Kubernetes does not allow.

    Examples:
        >>> from geartrain import launch
        >>> job = launch.Job("pendulum", [launch.learners("pendulum:learn", 2)], shared_memory_gb=4)
        >>> job_set(job, "pendulum.toml", image="registry/pendulum:1")["kind"]
        'JobSet'
    """
    name = name or re.sub(r"[^a-z0-9-]", "-", job.name.lower()).strip("-")
    _check_label("the JobSet's name (--name)", name)
    for about, label in (("a namespace", namespace), ("a Secret's name", secret)):
        if label:
            _check_label(about, label)
    _check_words("image", image)
    if not _RESOURCE.fullmatch(gpu_resource):
        raise ArgumentError(f"a resource of Kubernetes is called like nvidia.com/gpu, found {gpu_resource!r}")
    for variable, value in (env or {}).items():
        if not _VARIABLE.fullmatch(variable) or not value.isprintable():
            raise ArgumentError(f"an environment variable is NAME=VALUE on one line, found {variable}={value!r}")
    max_restarts = check_whole("max_restarts", max_restarts, 0, 2**31)
    groups = list(_groups(job, host_resources(job, hosts)))
    master = f"{name}-{groups[0][0]}-0-0.{name}:{PORT}"
    position = f"{hosts}@{master}" if hosts > 1 else f"{hosts}"
    variables: list[dict[str, Any]] = []
    if hosts > 1:
        key = {"name": secret or f"{name}-secret", "key": "secret"}
        variables.append({"name": "GEARTRAIN_SECRET", "valueFrom": {"secretKeyRef": key}})
    variables += [{"name": variable, "value": _literal(value)} for variable, value in (env or {}).items()]
    # Logs of processes go where any image can be written to; the launcher's lines and errors are the pod's log.
    launch = [*command, "launch", description, "--lines", "--folder", f"/tmp/{job.name}"]
    for word in launch:
        _check_words("a command", word)
    replicated = []
    for group, first, count, needed in groups:
        longest = len(f"{name}-{group}-0-{count - 1}") + _SUFFIX
        if longest > 63:
            raise ArgumentError(
                f"the JobSet's name {name!r} is {longest - 63} characters too long for the names of its pods: "
                "shorten it (--name)"
            )
        container = {
            "name": "launcher",
            "image": image,
            "command": [_literal(word) for word in launch],
            "env": [*variables, {"name": POD, "value": f"{first}/{position}"}],
            "resources": _resources(needed, gpu_resource),
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        shared = {"medium": "Memory", "sizeLimit": _mebibytes(needed.shared_memory_gb)}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(job.stop_s) + GRACE_S,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # process 1 then reaps what processes leave behind, and the launcher is none
            "containers": [container],
            "volumes": [{"name": "shared-memory", "emptyDir": shared}],
        }
        roles = ", ".join(f"{role} x {processes}" for role, processes in needed.roles)
        spec = {
            "parallelism": count,
            "completions": count,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a launcher that is started again finds a job that has ended
            "template": {"metadata": {"annotations": {"geartrain-roles": roles}}, "spec": pod},
        }
        replicated.append({"name": group, "replicas": 1, "template": {"spec": spec}})
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    network = {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
    policy = {"failurePolicy": {"maxRestarts": max_restarts}, "successPolicy": {"operator": "All"}}
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"network": network, **policy, "replicatedJobs": replicated},
    }


def manifest(made: Mapping[str, Any]) -> str:
    """YAML of a JobSet, with a comment that lists the cluster's other requirements.

    Args:
        made: what `job_set` returned.

    Examples:
        >>> print(manifest({"kind": "JobSet", "metadata": {"name": "x"}, "spec": {"replicatedJobs": []}}), end="")
        # By `geartrain generate kubernetes`. The cluster needs JobSet: https://jobset.sigs.k8s.io
        kind: JobSet
        metadata:
          name: x
        spec:
          replicatedJobs: []
    """
    lines = ["# By `geartrain generate kubernetes`. The cluster needs JobSet: https://jobset.sigs.k8s.io"]
    keys = re.findall(r'"secretKeyRef": {"name": "([^"]+)", "key": "secret"}', json.dumps(made))
    if keys:
        space = made["metadata"].get("namespace")
        where = f" --namespace {space}" if space else ""
        lines.append("# Launchers and processes of all pods prove to each other that they belong to this job:")
        lines.append(
            f"#   kubectl create secret generic {keys[0]}{where} --from-literal=secret=$(openssl rand -hex 16)"
        )
    return "\n".join([*lines, *_yaml(made)]) + "\n"


def _groups(job: Job, hosts: Sequence[HostResources]) -> Iterator[tuple[str, int, int, HostResources]]:
    """Consecutive hosts with the same needs: name, first host, number of hosts, needs of each."""
    first = 0
    for needed, same in itertools.groupby(hosts):
        count = len(list(same))
        if needed.shared_memory_gb is None:
            raise ArgumentError(
                f"job {job.name!r}: shared_memory_gb is missing for host {first}, and a pod has 64 MiB by "
                "default: set it to the bytes of its stores (`geartrain inspect NAME`) and weights"
            )
        last = first + count - 1
        yield f"host-{first}" if count == 1 else f"hosts-{first}-{last}", first, count, needed
        first += count


def _resources(needed: HostResources, gpu_resource: str) -> dict[str, dict[str, str]]:
    """Requests and limits of a pod: its memory volume counts as its memory; processors are shares and no limit."""
    same: dict[str, str] = {}
    if needed.all_memory_gb is not None:
        same["memory"] = _mebibytes(needed.all_memory_gb)
    if needed.gpus:
        same[gpu_resource] = str(needed.gpus)
    cpus = math.ceil(needed.cpus * 1000)
    requests = {"cpu": f"{cpus}m" if cpus % 1000 else str(cpus // 1000), **same}
    return {"requests": requests, **({"limits": same} if same else {})}


def _mebibytes(gibibytes: float | None) -> str:
    assert gibibytes is not None
    return f"{math.ceil(gibibytes * 1024)}Mi"


def _literal(text: str) -> str:
    """As Kubernetes reads it: $(NAME) in commands and values is a variable's value, and $$ is $."""
    return text.replace("$", "$$")


def _check_label(about: str, label: str) -> None:
    if len(label) > 63 or not _LABEL.fullmatch(label):
        raise ArgumentError(f"{about} is lower-case letters, digits and dashes, 63 at most, found {label!r}")


def _check_words(about: str, text: str) -> None:
    if not text.strip() or not text.isprintable() or (about == "image" and " " in text):
        raise ArgumentError(f"{about} is one line, and not empty, found {text!r}")


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Lines of a table or list of tables, lists, texts, numbers and truths."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(each, Mapping | list) and each:
                yield f"{indent}{_scalar(key)}:"
                yield from _yaml(each, indent + "  ")
            else:
                yield f"{indent}{_scalar(key)}: {_scalar(each)}"
    else:
        for each in value:
            lines = list(_yaml(each, indent + "  ")) if isinstance(each, Mapping | list) and each else None
            if lines is None:
                yield f"{indent}- {_scalar(each)}"
            else:
                yield f"{indent}- {lines[0].lstrip()}"
                yield from lines[1:]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)


__all__ = ["API_VERSION", "job_set", "manifest"]
