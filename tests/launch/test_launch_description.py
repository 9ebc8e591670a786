"""Descriptions of jobs: TOML and Python, mistakes in them, places of processes, the table."""

from __future__ import annotations

import io

import launched
import pytest
from launch_jobs import LINGER, TESTS

from geartrain import launch
from geartrain.errors import ArgumentError
from geartrain.launch.hosts import host_position
from geartrain.launch.placed_role import place

pytestmark = pytest.mark.usefixtures("preloaded_children")


def test_a_toml_file_says_what_python_says(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        """
name = "both"
timeout_s = 60
keep_store = "never"

[learner]
run = "launched:learn"
processes = 2
args = { steps = 5 }

[agent]
run = "launched:serve"

[actor]
environments = "launched:environments"
policy = "launched:remote_policy"
processes = 3
publish_every = 4

[role.watcher]
run = ["python", "watch.py"]
env = { A = "b" }

[role.judge]
task = "reward"
run = "launched_tasks:Judge"
rows = 32
processes = 2
args = { factor = 2 }

[role.answer]
kind = "worker"
task = "answer"
run = "launched_tasks:answer"
max_items = 65536
of = "tokens"
concurrency = 32
store = "other"
output = "numpy"
max_restarts = 3
"""
    )
    assert launch.load(str(path)) == launch.Job(
        "both",
        [
            launch.learners("launched:learn", 2, args={"steps": 5}),
            launch.agents("launched:serve"),
            launch.actors("launched:environments", "launched:remote_policy", 3, publish_every=4),
            launch.Role("watcher", ["python", "watch.py"], env={"A": "b"}),
            launch.workers("reward", "launched_tasks:Judge", 2, name="judge", rows=32, args={"factor": 2}),
            launch.workers(
                "answer",
                "launched_tasks:answer",
                max_items=65536,
                of="tokens",
                concurrency=32,
                store="other",
                output="numpy",
                max_restarts=3,
            ),
        ],
        timeout_s=60,
        keep_store="never",
        directory=str(tmp_path),
    )
    assert launch.load("launched:job") is launched.job
    assert launch.load(f"{TESTS}/launched.py").name == "launched"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("name = 'x'\n[lerner]\nrun = 'a:b'", "lerner is unknown"),
        ("name = 'x'\n[learner]\nrun = 'a:b'\nranks = 2", r"ranks is unknown in \[learner\]; possible are args, cpus"),
        ("name = 'x'\n[learner]\nprocesses = 2", r"\[learner\] needs run"),
        ("name = 'x'\n[actor]\npolicy = 'a:b'", "needs environments and policy"),
        ("name = 'x'\n[learner]\nrun = 'train.py'", "names no function"),
        ("name = 'x'\n[learner]\nrun = 'a:b'\nprocesses = 0", "processes must be at least 1, found 0"),
        ("[learner]\nrun = 'a:b'", "a job needs a name"),
        ("name = 'x'\n[agent]\nrun = 'a:b'", "agents and reducers never end"),
        ("name = 'x y'\n[learner]\nrun = 'a:b'", "a plain word"),
        ("name = 'x'\n[learner]\nrun = ['a']\nargs = {b = 1}", "a command takes no args"),
        ("name = 'x'\n[role.a]\ntask = 'b'\nkind = 'actor'\nrun = 'a:b'", "so its kind is 'worker', found 'actor'"),
        ("name = 'x'\n[role.a]\ntask = 'b'\nrow = 3\nrun = 'a:b'", r"row is unknown in .*did you mean 'rows'"),
        ("name = 'x'\n[role.a]\ntask = 'b'", r"\[role.a\] needs run"),
        ("name = 'x'\n[role.a]\nrows = 3\nrun = 'a:b'", r"rows is unknown in \[role.a\]"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_description_that_is_wrong_says_where(tmp_path, lines, complaint):
    path = tmp_path / "wrong.toml"
    path.write_text(lines)
    with pytest.raises(ArgumentError, match=complaint):
        launch.load(str(path))


def test_targets_that_nobody_finds_are_refused(tmp_path):
    for wrong, complaint in (
        ("nowhere.toml", "[Nn]o (such )?file"),
        ("/no/such/path", "is a TOML file, module:name or file.py:name"),
        ("nowhere_at_all:job", "no module 'nowhere_at_all'"),
        ("launched:nothing", "has no nothing"),
        ("launched:FIELDS", "must be a geartrain.launch.Job, found"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            launch.load(wrong)
    with pytest.raises(ArgumentError, match="must find the function by its name"):
        launch.learners(lambda context: None)
    with pytest.raises(ArgumentError, match="what JSON can hold"):
        launch.learners(launched.learn, args={"x": object()})


def test_a_place_is_what_torchrun_or_slurm_says():
    torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert host_position(torchrun) == launch.HostPosition(1, 3, "host0", 29500, 29501, True)
    slurm = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[03-06]",
        "SLURM_JOB_ID": "1007",
    }
    assert host_position(slurm) == launch.HostPosition(2, 4, "gpu03", 29514, 29515)
    assert host_position({}) == launch.HostPosition()
    assert host_position({}, hosts=2, host=1, master="a:7") == launch.HostPosition(1, 2, "a", 7, 8)
    with pytest.raises(ArgumentError, match="--nproc-per-node 1"):
        host_position({**torchrun, "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(ArgumentError, match="go together"):
        host_position({}, hosts=2, host=1)
    with pytest.raises(ArgumentError, match="numbered from 0"):
        host_position({}, hosts=2, host=2, master="a:7")


def test_several_hosts_need_a_secret_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("GEARTRAIN_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    position = host_position({}, hosts=2, host=0, master="127.0.0.1:7")
    with pytest.raises(ArgumentError, match="needs a secret"):
        launch.run(launch.Job("x", [LINGER]), position=position, live=False)
    assert not list(tmp_path.iterdir())


def test_the_table_shows_what_there_is(job, tmp_path):
    rich = pytest.importorskip("rich.console")
    from geartrain.launch.display import JobView, table_of
    from geartrain.launch.job_process import JobProcess
    from geartrain.launch.metrics import ProcessMetrics

    made = job(launch.learners(launched.learn), launch.actors(launched.environments, launched.local_policy, 2))
    processes = [
        JobProcess(made, placed, local, 0, launch.HostPosition(), tmp_path)
        for placed in place(made, 1)
        for local in range(placed.processes)
    ]
    zero = dict.fromkeys(("steps", "samples", "rows", "wait_s"), 0.0)
    seen = [
        ProcessMetrics(
            {**zero, "steps": 9}, {**zero, "steps": 12.5, "samples": 3200, "wait_s": 0.25}, 41, {"loss": 0.125}
        ),
        ProcessMetrics({**zero, "steps": 9}, {**zero, "steps": 700, "rows": 30, "wait_s": 0.1}, 39, {"return": 20.0}),
        ProcessMetrics({**zero, "steps": 9}, {**zero, "steps": 500, "rows": 20, "wait_s": 0.3}, 40, {"return": 22.0}),
    ]
    console = rich.Console(width=100, record=True, file=io.StringIO())
    console.print(table_of("mine", JobView(61.0, processes, seen, {"actor": 1}, 41, None)))
    shown = [line.split() for line in console.export_text().splitlines()]
    assert shown[0] == ["mine,", "1:01,", "weights", "41"]
    assert ["learner", "0/1", "12.5", "3,200", "25%", "41", "loss", "0.125"] in shown
    assert ["actor", "0/2", "1", "1,200", "50", "20%", "39", "2", "return", "21"] in shown


def test_a_toml_file_places_roles_on_hosts_and_classes_of_hosts(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        """
name = "placed"
[hosts]
trainers = "0-1"
simulators = "2-"
[learner]
run = "launched:learn"
hosts = "trainers"
processes = 2
[reducer]
hosts = [4]
window_bytes = 1048576
threads = 4
[actor]
environments = "launched:environments"
policy = "launched:local_policy"
[role.simulator]
kind = "actor"
environments = "launched:environments"
policy = "launched:local_policy"
hosts = "simulators, 1"
processes = 3
"""
    )
    job = launch.load(str(path))
    assert job == launch.Job(
        "placed",
        [
            launch.learners("launched:learn", 2, hosts="trainers"),
            launch.actors("launched:environments", "launched:local_policy"),
            launch.reducers(hosts=[4], window_bytes=1 << 20, threads=4),
            launch.actors("launched:environments", "launched:local_policy", 3, name="simulator", hosts="simulators,1"),
        ],
        directory=str(tmp_path),
        hosts={"trainers": "0-1", "simulators": "2-"},
    )
    placed = {each.role.name: each for each in place(job, 5)}
    assert {name: each.hosts for name, each in placed.items()} == {
        "learner": (0, 1),
        "actor": (0, 1, 2, 3, 4),
        "reducer": (4,),
        "simulator": (1, 2, 3, 4),
        "store": (0, 1),
    }
    assert [placed["simulator"].number(host, 1) for host in (1, 2, 3, 4)] == [1, 4, 7, 10]
    assert (placed["simulator"].processes, placed["learner"].number(1, 0)) == (12, 2)
    assert "store" not in {each.role.name for each in place(launch.Job("x", [launch.learners("a:b")]), 3)}


@pytest.mark.parametrize(
    ("hosts", "complaint"),
    [
        ("3-1", "hosts 3-1 ends before it begins"),
        ("2..4", "found '2..4'"),
        ("", "found ''"),
        (2, "or a list of host numbers, found 2"),
        ([0, -1], "a list of host numbers, from 0 on"),
        ([], "a list of host numbers"),
        ("nobody", "no class of hosts 'nobody'; the job defines few, many"),
        ("few", None),
    ],
)
def test_hosts_that_are_wrong_are_refused_where_they_are_said(hosts, complaint):
    def make():
        role = launch.Role("a", "a:b", hosts=hosts)
        return launch.Job("x", [role], hosts={"few": "0", "many": "1-"})

    if complaint is None:
        assert make().hosts_of(make().roles[0], 4) == (0,)
        return
    with pytest.raises(ArgumentError, match=complaint):
        make()


@pytest.mark.parametrize(
    ("roles", "classes", "complaint"),
    [
        (
            [launch.learners("a:b", hosts="0-3")],
            {},
            "role 'learner' is to run on hosts 0-3, and this job has hosts 0 to 2",
        ),
        ([launch.learners("a:b", hosts="most")], {"most": "3-"}, r"class 'most'\) is to run on hosts 3-"),
        ([launch.learners("a:b", hosts="first"), launch.agents("a:b", hosts="1")], {}, "no role runs on host 2 of 3"),
        ([launch.learners("a:b", max_restarts=1)], {}, "on one host only"),
        ([launch.learners("a:b", hosts="first"), launch.Role("store", "a:b")], {}, "choose another name"),
        (
            [launch.learners("a:b", hosts="0-1"), launch.workers("reward", "a:b", hosts="2")],
            {},
            r"no process does the task 'reward' for the store of host 1: .*processes or hosts of role 'reward'",
        ),
        (
            [
                launch.learners("a:b"),
                launch.workers("ref", "a:b", hosts="first"),
                launch.workers("ref", "a:b", name="more", hosts="1"),
            ],
            {},
            r"no process does the task 'ref' for the store of host 2: .*'ref', 'more'",
        ),
        ([launch.Role("a", "a:b"), launch.reducers()], {}, "there are no learners"),
        ([launch.Role("a", "a:b")], {"all": "0"}, "has a plain word as its name, found 'all'"),
        ([launch.Role("a", "a:b")], {"one": "two", "two": "0"}, "is made of host numbers, found two"),
        ([launch.Role("a", "a:b")], 3, "how many there are is said when the job is launched"),
    ],
)
def test_placements_that_cannot_be_are_refused_before_anything_starts(roles, classes, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        place(launch.Job("x", roles, hosts=classes), 3)


def test_every_store_of_a_job_has_a_process_for_each_task():
    """Workers of hosts without learners are dealt to the stores in turn; one host has its own."""
    roles = [
        launch.learners("a:b", hosts="0-2"),
        launch.workers("reward", "a:b", hosts="1"),
        launch.workers("reward", "a:b", 2, name="away", hosts="3"),
    ]
    with pytest.raises(ArgumentError, match="'reward' for the store of host 2:"):
        place(launch.Job("x", roles), 4)
    roles[-1] = launch.workers("reward", "a:b", 3, name="away", hosts="3")
    assert place(launch.Job("x", roles), 4)[-1].role.name == "store"
    other = launch.workers("reward", "a:b", hosts="3", store="mine")
    assert place(launch.Job("x", [roles[0], other]), 4), "a store of its own host"


def test_no_store_is_served_where_nobody_asked_for_it():
    with pytest.raises(ArgumentError, match=r"no process serves the stores of the job 'alone' .*serve_stores=True"):
        launch.Context().stores()
    assert [each.role.name for each in place(launch.Job("x", [launch.learners("a:b")], serve_stores=True), 2)] == [
        "learner",
        "store",
    ]
    with pytest.raises(ArgumentError, match="there are none"):
        launch.Job("x", [launch.Role("a", "a:b")], serve_stores=True)
    with pytest.raises(ArgumentError, match="serve_stores is True or False, found 1"):
        launch.Job("x", [launch.learners("a:b")], serve_stores=1)


@pytest.mark.parametrize("what", ["timeout_s", "stop_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, 0])
def test_times_that_are_no_times_are_refused(what: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"{what} must be a finite number above 0"):
        launch.Job("x", [launch.learners("x:learn")], **{what: value})
