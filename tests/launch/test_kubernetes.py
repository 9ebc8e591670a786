"""JobSets for Kubernetes: against the published schemas, and their commands in two hosts that stand for pods.

There is no cluster here: that the controller makes Jobs, pods and names as its documentation says is not tested.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from deadlines import patience

from geartrain import launch
from geartrain.errors import ArgumentError
from geartrain.launch.hosts import host_position, own_address
from geartrain.launch.kubernetes import job_set, manifest
from geartrain.tools.testing import namespaces
from geartrain.tools.testing.cluster import Hosts

TESTS = Path(__file__).parents[1] / "support"


def job(name="walker", **options):
    roles = [
        launch.learners("x:learn", 4, hosts="trainers", cpus=2.5, gpus=1, memory_gb=10),
        launch.actors("x:environments", "x:policy", 30, hosts="2-", cpus=0.55, memory_gb=0.5),
    ]
    options = {"shared_memory_gb": {"trainers": 20, "2-": 1}, "hosts": {"trainers": "0-1"}, **options}
    return launch.Job(name, roles, **options)


def made(hosts=5, **options):
    return job_set(job(), "/app/walker.toml", image="registry:5000/walker:1", hosts=hosts, **options)


def pods(found):
    """Per group: name, number of pods, pod specification."""
    groups = found["spec"]["replicatedJobs"]
    jobs = [(each["name"], each["template"]["spec"]) for each in groups]
    return [(name, spec["completions"], spec["template"]["spec"]) for name, spec in jobs]


def test_a_group_of_pods_is_what_consecutive_hosts_need():
    trainers, simulators = pods(made())
    assert (trainers[:2], simulators[:2]) == (("hosts-0-1", 2), ("hosts-2-4", 3))
    # 4 ranks, and the server of the store; 40 GiB of the ranks' and 20 of shared memory.
    needed = {"memory": f"{60 * 1024}Mi", "nvidia.com/gpu": "4"}
    assert trainers[2]["containers"][0]["resources"] == {"requests": {"cpu": "11", **needed}, "limits": needed}
    assert trainers[2]["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{20 * 1024}Mi"}
    needed = {"memory": f"{16 * 1024}Mi"}
    assert simulators[2]["containers"][0]["resources"] == {"requests": {"cpu": "16500m", **needed}, "limits": needed}
    assert simulators[2]["containers"][0]["volumeMounts"][0]["mountPath"] == "/dev/shm"


def test_launchers_find_their_position_in_the_environment_of_their_pods():
    found = []
    for _, count, spec in pods(made()):
        told = {each["name"]: each.get("value", "a secret") for each in spec["containers"][0]["env"]}
        found += [host_position({**told, "JOB_COMPLETION_INDEX": str(index)}) for index in range(count)]
    master = "walker-hosts-0-1-0-0.walker"  # JobSet, group, number of its Job, number of the pod; headless service
    assert found == [launch.HostPosition(i, 5, master, 29500, 29501, name_s=300.0) for i in range(5)]
    assert host_position({"GEARTRAIN_POD": "0/1", "JOB_COMPLETION_INDEX": "0"}) == launch.HostPosition()
    assert host_position({"JOB_COMPLETION_INDEX": "3"}) == launch.HostPosition(), "an Indexed Job of somebody else's"
    for wrong in ("x", "0/2", "0/2@", "0/2@a", "2", "0/x@a:1"):
        with pytest.raises(ArgumentError, match="found"):
            host_position({"GEARTRAIN_POD": wrong, "JOB_COMPLETION_INDEX": "0"})


@pytest.mark.slow
def test_the_jobset_has_the_fields_of_its_schema_and_no_others():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schema = models.JobsetV1alpha2JobSet
    for found in (made(), made(3, namespace="rl", max_restarts=3, secret="s", env={"A": "b"})):
        assert schema.from_dict(copy.deepcopy(found)).to_dict() == found, "the schema's classes drop what they have not"
    unknown = made()
    unknown["spec"]["networks"] = {}
    assert schema.from_dict(copy.deepcopy(unknown)).to_dict() != unknown


def test_the_jobs_in_it_are_valid_for_kubernetes():
    validator = pytest.importorskip("kubernetes_validate")
    for found in (made(), made(3)):
        for name, template in ((each["name"], each["template"]) for each in found["spec"]["replicatedJobs"]):
            described = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **template}
            validator.validate(described, "1.29", strict=True)
            described["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
            with pytest.raises(validator.ValidationError):
                validator.validate(described, "1.29", strict=True)


def test_the_manifest_is_yaml_and_says_what_to_create_first():
    yaml = pytest.importorskip("yaml")
    values = {
        "EMPTY": "",
        "NO": "no",
        "NUMBER": "1e3",
        "DATE": "2026-11-23",
        "QUOTES": "a 'b' \"c\": #d",
        "WIDE": "ü\U0001f600",
    }
    found = made(3, namespace="rl", env=values)
    text = manifest(found)
    assert yaml.safe_load(text) == found
    assert "kubectl create secret generic walker-secret --namespace rl " in text
    alone = launch.Job("One_Job", [launch.learners("x:y")], shared_memory_gb=1)
    text = manifest(job_set(alone, "x.toml", image="i"))
    assert yaml.safe_load(text)["metadata"]["name"] == "one-job"
    assert "SECRET" not in text
    assert "kubectl" not in text, "one host has no others to trust"


def test_what_kubernetes_would_refuse_is_refused_before():
    for wrong in ({"name": "Walker"}, {"name": "-"}, {"name": "x" * 64}, {"namespace": "a.b"}, {"secret": "a b"}):
        with pytest.raises(ArgumentError, match="lower-case letters"):
            made(**wrong)
    with pytest.raises(ArgumentError, match="4 characters too long for the names of its pods"):
        made(name="x" * 47)
    for wrong in ({"env": {"1A": "x"}}, {"env": {"A": "x\ny"}}, {"gpu_resource": "a b"}, {"max_restarts": -1}):
        with pytest.raises(ArgumentError, match="found"):
            made(**wrong)
    for image in ("", " ", "a b", "a\nb"):
        with pytest.raises(ArgumentError, match="image is one line"):
            job_set(job(), "x.toml", image=image, hosts=3)
    with pytest.raises(ArgumentError, match="shared_memory_gb is missing for host 2"):
        job_set(job(shared_memory_gb={"trainers": 20}), "x.toml", image="i", hosts=3)


def test_a_name_that_is_never_known_is_an_error_in_its_time():
    with pytest.raises(ArgumentError, match=r"cannot be reached at 'no-such\.invalid' within 0\.1 s"):
        own_address("no-such.invalid", 0.1)


TOML = """
name = "in-pods"
timeout_s = {limit_s}
directory = "{tests}"
shared_memory_gb = 0.1
[learner]
run = "launched:learn"
args = {{ steps = 20 }}
hosts = "first"
[role.inserter]
kind = "actor"
environments = "launched:environments"
policy = "launched:local_policy"
hosts = "1-"
"""


@pytest.mark.slow
@pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts can be made here: {Hosts.viable()}")
@pytest.mark.timeout(200)
def test_the_commands_of_pods_run_the_job_when_their_names_become_known(tmp_path):
    """Two emulated hosts stand for pods: what a container's command and environment say, run there."""
    description = tmp_path / "job.toml"
    description.write_text(TOML.format(limit_s=patience(100), tests=TESTS))
    described = launch.load(str(description))
    command = (sys.executable, "-m", "geartrain")
    found = job_set(described, str(description), image="i", hosts=2, env={"OMP_NUM_THREADS": "1"}, command=command)
    with Hosts(2) as hosts:
        launchers = []
        for i, (_, count, spec) in reversed(list(enumerate(pods(found)))):  # the last one first: host 0 has no name yet
            assert count == 1
            container = spec["containers"][0]
            told = {each["name"]: each.get("value", "a secret") for each in container["env"]}
            argv = [*container["command"][:-1], str(tmp_path / f"logs{i}")]
            said = (tmp_path / f"said{i}").open("w")
            launcher = hosts.popen(i, argv, env={**told, "JOB_COMPLETION_INDEX": "0"}, stdout=said, stderr=said)
            launchers.append(launcher)
        name = "in-pods-host-0-0-0.in-pods"
        assert told["GEARTRAIN_POD"] == f"0/2@{name}:29500"
        with (namespaces.SHM / hosts.name / "hosts").open("a") as known:  # what the headless service's DNS does
            known.write(f"{hosts.address(0)} {name}\n")
        codes = [each.wait(patience(100)) for each in launchers]
    assert codes == [0, 0], [(tmp_path / f"said{i}").read_text() for i in range(2)]
    learner, actor = (json.loads((tmp_path / f"logs{i}" / "summary.json").read_text())["processes"] for i in range(2))
    assert learner["learner-0"]["steps"] == 20
    assert actor["inserter-0"]["rows"] > 0


def test_dollars_are_those_that_were_given():
    found = made(env={"PRICE": "$(HOME) $$5"}, command=["sh", "$(X)"])
    for _, _, pod in pods(found):
        container = pod["containers"][0]
        assert {"name": "PRICE", "value": "$$(HOME) $$$$5"} in container["env"]
        assert container["command"][:2] == ["sh", "$$(X)"]
