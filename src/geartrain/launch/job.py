"""`Job` and `Role`: the description of a job and its processes, from Python or from a TOML file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args

from geartrain.core.arguments import (
    FLAG,
    Options,
    check_choice,
    check_keywords,
    check_path,
    check_real,
    check_text,
    check_type,
    check_whole,
    checked,
    did_you_mean,
    leave_out,
    optional,
    shown,
)
from geartrain.core.shared_files import Trust
from geartrain.errors import ArgumentError, GeartrainError, MissingDependencyError
from geartrain.launch.role_hosts import HostTerms, check_classes, check_terms, class_names, resolve_hosts
from geartrain.store.tasked import Output

#: Target of a process: "module:function", "file.py:function", the function itself, or a command as a list of words.
Target = str | Callable[..., Any] | Sequence[str]
Kind = Literal["learner", "agent", "actor", "worker", "reducer", "other"]
Keep = Literal["never", "on_failure", "always"]
#: Targets of the processes of `actors`, `workers` and `reducers`.
ACT, WORK = "geartrain.launch.actor_role:act", "geartrain.launch.worker_role:work"
REDUCE = "geartrain.launch.reducer_role:reduce"
#: Kinds whose processes serve others: they must not end by themselves, and are stopped last.
SERVERS = ("agent", "reducer")
#: Exit code of a process that no restart can mend (EX_CONFIG of sysexits.h): the job ends.
UNUSABLE = 78

#: 31 years: no clock or wait overflows.
_LONGEST_S = 1e9
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


_OPTIONAL_THREADS = checked(lambda what, value: optional(check_whole, what, value, 1, 2**31))


def _checked_word(what: str, value: Any) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ArgumentError(f"{what} is a plain word, found {shown(value)}")
    return value


@dataclass(frozen=True)
class Role(Options):
    """Processes of a job that run the same code.

    `learners`, `agents`, `actors`, `workers` and `reducers` make the usual roles.

    Attributes:
        name: name of the role; its processes are NAME-0, NAME-1, ...
        run: "module:function", "file.py:function", a function of a module, or a command as a list of words. A function
            is called with its `Context` and `args`; a command gets the context from `launch.context()`.
        processes: number of processes on each of its hosts.
        kind: "learner": ranks, with torchrun's environment variables; the job ends when all have returned. "agent",
            "reducer": must not return, and are stopped last. "actor", "worker", "other": may return when they are done.
        args: keyword arguments of the function; values that JSON can hold.
        max_restarts: restarts of all its processes together, on each host. Learners are restarted together.
        threads: threads that OpenMP, and so torch, may use in each process; None does not limit them.
        env: further environment variables.
        hosts: hosts that run it: "all", "first" (host 0), ranges such as "0-3,6-", classes of `Job.hosts`, or a list of
            host numbers. Hosts without learners have no store; `Context.store` is then a `RemoteStore` of a learners'
            host.
        silent_s: heartbeat timeout in seconds: a process that does not report for so long is killed and counts as dead.
            None for no timeout.
        cpus: cores of each process to request from Slurm, Kubernetes or Ray; by default `threads`. The launcher itself
            enforces none of these three.
        gpus: GPUs of each process to request.
        memory_gb: memory of each process to request; by default the scheduler decides.
    """

    name: str = field(metadata=checked(_checked_word))
    run: Target
    processes: int = field(default=1, metadata=checked(check_whole, 1, 2**31))
    kind: Kind = field(default="other", metadata=checked(check_choice, get_args(Kind)))
    args: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = field(default=0, metadata=checked(check_whole, 0, 2**31))
    threads: int | None = field(default=1, metadata=_OPTIONAL_THREADS)
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: HostTerms = "all"
    silent_s: float | None = field(default=None, metadata=checked(check_real, None, _LONGEST_S, above=0))
    cpus: float | None = field(default=None, metadata=checked(check_real, None, 1e9, above=0))
    gpus: int = field(default=0, metadata=checked(check_whole, 0, 10**9))
    memory_gb: float | None = field(default=None, metadata=checked(check_real, None, 1e9, above=0))

    ABOUT = "role '{0.name!s:.80}': "

    def __post_init__(self) -> None:
        super().__post_init__()
        about = f"role {self.name!r}"
        object.__setattr__(self, "hosts", check_terms(about, self.hosts))
        for what, given in (("env", self.env), ("args", self.args)):
            check_type(f"{about}: {what} is a table of names and values", given, Mapping)
        object.__setattr__(self, "run", target_of(about, self.run))
        if not all(isinstance(value, str) for value in [*self.env, *self.env.values()]):
            raise ArgumentError(f"{about}: env holds strings, found {dict(self.env)}")
        args = {name: target_of(about, value) if callable(value) else value for name, value in self.args.items()}
        try:
            json.dumps(args)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{about}: args must be what JSON can hold: {error}") from None
        if args and not isinstance(self.run, str):
            raise ArgumentError(f"{about}: a command takes no args; put them among its words, or into env")
        object.__setattr__(self, "args", args)


def learners(run: Target, processes: int = 1, *, name: str = "learner", **options: Any) -> Role:
    """Role of the ranks that train, with torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    A rank's death ends the job. With `max_restarts` all ranks of the host are killed and restarted instead (one host
    only).

    Args:
        run: as for `Role`.
        processes: number of ranks on each host.
        name: name of the role.
        options: as for `Role`.
    """
    check_keywords("launch.learners", options, Role)
    return Role(name, run, processes, "learner", **options)


def agents(run: Target, processes: int = 1, *, name: str = "agent", max_restarts: int = 3, **options: Any) -> Role:
    """Role of inference servers for actors (`Context.node`, `rpc.batched`). They serve until `Context.stopping`.

    Args:
        run: as for `Role`.
        processes: number of processes on each host.
        name: name of the role.
        max_restarts: restarts of all of them together, on each host.
        options: as for `Role`.
    """
    check_keywords("launch.agents", options, Role)
    return Role(name, run, processes, "agent", max_restarts=max_restarts, **options)


def actors(
    environments: Target,
    policy: Target,
    processes: int = 1,
    *,
    name: str = "actor",
    seed: int = 0,
    publish_every: int | None = None,
    overlap: int = 0,
    priority: float | None = None,
    steps: int | None = None,
    max_restarts: int = 10,
    **options: Any,
) -> Role:
    """Role of processes that step environments and write episodes into the job's store.

    Args:
        environments: function that is called in each process with its `ActorContext`; returns what `environments_of`
            takes.
        policy: the same for the policy. The context's `job` is the process's `launch.Context`.
        processes: number of processes on each host.
        name: name of the role.
        seed: process i uses seed + i * 1,000, and another seed after each restart.
        publish_every, overlap, priority: as for `Store.recorder`.
        steps: steps of each process, after which it returns; by default it acts until the job ends.
        max_restarts: restarts of all of them together, on each host.
        options: as for `Role`.

    Raises:
        ArgumentError: `environments` or `policy` is a command instead of a function.
    """
    check_keywords("launch.actors", options, Role)
    about = f"role {name!r}"
    args = {
        "environments": target_of(about, environments),
        "policy": target_of(about, policy),
        "seed": seed,
        "publish_every": publish_every,
        "overlap": overlap,
        "priority": priority,
        "steps": steps,
    }
    if not all(isinstance(args[each], str) for each in ("environments", "policy")):
        raise ArgumentError(f"{about}: environments and policy are functions, not commands")
    return Role(name, ACT, processes, "actor", args=args, max_restarts=max_restarts, **options)


def workers(
    task: str,
    run: Target,
    processes: int = 1,
    *,
    name: str = "",
    rows: int | None = None,
    max_items: int | None = None,
    of: str | None = None,
    concurrency: int | None = None,
    store: str = "",
    output: Output = "torch",
    args: Mapping[str, Any] | None = None,
    max_restarts: int = 10,
    **options: Any,
) -> Role:
    """Role of processes that claim rows of a task, and call a function with each claim.

    The function returns the fields to put, by name, or None if it has put, dropped or released the rows itself. A class
    is instantiated once in each process, and its instance is called. An `async` function, or `async` `__call__`, runs
    with many claims at a time in one event loop. Processes end when no row can become due any more.

    If the function raises, the rows are due again. docs/launch.md says what repeated errors do.

    Args:
        task: name of the task; not the store's last one.
        run: function or class, as for `Role`.
        processes: number of processes on each host.
        name: name of the role; the task's name by default.
        rows, max_items, of: limits of a claim, as `n`, `max_items` and `of` of `Store.claims`.
        concurrency: claims at a time in each process, for an `async` function; 64 by default.
        store: name of the store; the job's by default.
        output: "torch" reads tensors, "numpy" arrays.
        args: keyword arguments of the function after the claim, or of the class; values that JSON can hold.
        max_restarts: restarts of all of them together, on each host.
        options: as for `Role`.

    Raises:
        ArgumentError: `run` is a command, or a limit is not above zero.

    Examples:
        >>> from geartrain import launch
        >>> role = launch.workers("reward", "grpo:reward", 2, rows=32)  # grpo.py has: def reward(claim): ...
        >>> role.name, role.kind, role.processes
        ('reward', 'worker', 2)
    """
    check_keywords("launch.workers", options, Role)
    name = name or check_text("the name of a task", task)
    about = f"role {name!r}"
    for what, value in (("rows", rows), ("max_items", max_items), ("concurrency", concurrency)):
        optional(check_whole, f"{about}: {what}", value, 1, 2**31)
    optional(check_text, f"{about}: of", of)
    if max_items is None:
        leave_out(f"{about}: of= is the axis that max_items counts, which is missing", of=of)
    check_choice(f"{about}: output", output, get_args(Output))
    check_text(f"{about}: store", store, empty=True)
    target = target_of(about, run)
    check_type(f"{about}: run is a function or class that is called with claims of {task!r}, no command", target, str)
    given = {
        "task": task,
        "run": target,
        "args": dict(args or {}),
        "rows": rows,
        "max_items": max_items,
        "of": of,
        "concurrency": concurrency,
        "store": store,
        "output": output,
    }
    return Role(name, WORK, processes, "worker", args=given, max_restarts=max_restarts, **options)


def reducers(
    processes: int = 1,
    *,
    name: str = "reducer",
    window_bytes: int = 16 << 20,
    threads: int = 1,
    max_restarts: int = 3,
    **options: Any,
) -> Role:
    """Role of reducers for the learners' all-reduces, on hosts with or without learners.

    The learners start once all reducers are there, and find their addresses in GEARTRAIN_REDUCERS. DDP uses them with
    the backend "geartrain", or through `geartrain_autoload` (docs/collectives-torch.md).

    Args:
        processes: number of processes on each host.
        name: name of the role.
        window_bytes: how far a rank may run ahead of its results.
        threads: threads of each process, 1 to 64, each with a share of its own.
        max_restarts: restarts of all of them together, on each host. Existing groups do not find a restarted one.
        options: as for `Role`.
    """
    check_keywords("launch.reducers", options, Role)
    check_whole(f"role {name!r}: window_bytes", window_bytes, 1, 2**48)
    check_whole(f"role {name!r}: threads", threads, 1, 64)
    args = {"window_bytes": window_bytes, "threads": threads}
    return Role(name, REDUCE, processes, "reducer", args=args, max_restarts=max_restarts, **options)


@dataclass(frozen=True)
class Job(Options):
    """A job: its name and its roles.

    Attributes:
        name: a plain word, also the name of the store and the weights. A host runs one job of a name at a time.
        roles: roles of different names; at most one of learners. Without learners the job ends when all roles but
            agents have ended.
        timeout_s: time limit in seconds, after which the job is stopped with `JobTimeoutError`; None for no limit.
        stop_s: time for processes to end after SIGTERM, in seconds; then they are killed.
        keep_store: whether the store stays when the job is over, for the next start to adopt its rows: "never",
            "on_failure" (a death or the time limit, not Ctrl-C) or "always".
        directory: working directory of the processes, where modules are found; the current one by default.
        trust: who may write to the job's store and weights besides this user, as for `Store.create`. Programs of other
            users join the store with it.
        hosts: classes of hosts for roles to name, such as {"trainers": "0-1", "simulators": "2-"}.
        serve_stores: each host with learners serves its store to the others (`Context.stores`). On by itself if roles
            run on hosts without learners.
        shared_memory_gb: memory that the job's stores, weights and messages take in /dev/shm of a host, for schedulers
            that limit it: a number for all hosts, or by hosts as roles name them, such as {"trainers": 20,
            "simulators": 1}.

    Examples:
        >>> from geartrain import launch
        >>> job = launch.Job(
        ...     "pendulum",
        ...     [
        ...         launch.learners("pendulum:learn", 2, args={"steps": 1000}),
        ...         launch.agents("pendulum:serve"),
        ...         launch.actors("pendulum:environments", "pendulum:policy", 4),
        ...         launch.reducers(2),
        ...         launch.Role("logger", ["python", "log.py"]),
        ...     ],
        ...     timeout_s=3600,
        ... )
        >>> [f"{role.name} x {role.processes}" for role in job.roles]
        ['learner x 2', 'agent x 1', 'actor x 4', 'reducer x 2', 'logger x 1']
    """

    name: str = field(metadata=checked(_checked_word))
    roles: Sequence[Role]
    timeout_s: float | None = field(default=None, metadata=checked(check_real, None, _LONGEST_S, above=0))
    stop_s: float = field(default=10.0, metadata=checked(check_real, None, _LONGEST_S, above=0))
    keep_store: Keep = field(default="on_failure", metadata=checked(check_choice, get_args(Keep)))
    directory: str = field(default="", metadata=checked(check_text, empty=True))
    trust: Trust = field(default="user", metadata=checked(check_choice, get_args(Trust)))
    hosts: Mapping[str, HostTerms] = field(default_factory=dict)
    serve_stores: bool = field(default=False, metadata=FLAG)
    shared_memory_gb: float | Mapping[str, float] | None = None

    ABOUT = "job '{0.name!s:.80}': "

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.roles, Sequence) or not all(isinstance(role, Role) for role in self.roles):
            raise ArgumentError(
                f"job {self.name!r}: roles is a list of what learners, agents, actors, workers and Role make, found "
                f"{shown(self.roles)}"
            )
        object.__setattr__(self, "roles", tuple(self.roles))
        names = [role.name for role in self.roles]
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"job {self.name!r}: roles of different names are needed, found {names}")
        if sum(role.kind == "learner" for role in self.roles) > 1:
            raise ArgumentError(
                f"job {self.name!r}: there is at most one role of learners, because ranks are numbered through"
            )
        if all(role.kind in SERVERS for role in self.roles):
            raise ArgumentError(
                f"job {self.name!r}: agents and reducers never end by themselves: add learners, actors or another role"
            )
        if self.learner is None and any(role.kind == "reducer" for role in self.roles):
            raise ArgumentError(f"job {self.name!r}: reducers sum what learners send, and there are no learners")
        object.__setattr__(self, "hosts", check_classes(f"job {self.name!r}", self.hosts))
        by_user = [(f"role {role.name!r}", str(role.hosts)) for role in self.roles]
        shared = check_shared_memory(f"job {self.name!r}", self.shared_memory_gb)
        for user, terms in [*by_user, *((f"job {self.name!r}: shared_memory_gb", each) for each in shared)]:
            if unknown := [each for each in class_names(terms) if each not in self.hosts]:
                raise ArgumentError(
                    f"{user}: there is no class of hosts {unknown[0]!r}; the job defines "
                    f"{', '.join(sorted(self.hosts)) or 'none'} (hosts){did_you_mean(unknown, self.hosts)}"
                )
        if self.serve_stores and self.learner is None:
            raise ArgumentError(f"job {self.name!r}: serve_stores serves the stores of learners, and there are none")
        directory = check_path(f"job {self.name!r}: directory", self.directory or ".")
        object.__setattr__(self, "directory", str(directory.resolve()))

    @property
    def learner(self) -> Role | None:
        """Role whose processes are ranks."""
        return next((role for role in self.roles if role.kind == "learner"), None)

    def hosts_of(self, role: Role, hosts: int) -> tuple[int, ...]:
        """Numbers of the hosts that run a role.

        Args:
            role: the role.
            hosts: number of hosts of the job.

        Raises:
            ArgumentError: the role names a host that is not there.
        """
        classes = {name: str(terms) for name, terms in self.hosts.items()}
        return resolve_hosts(f"role {role.name!r}", str(role.hosts), classes, hosts)


# --- from a file ------------------------------------------------------------------------------------------------------


def load(description: str) -> Job:
    r"""Loads the job that a description names.

    Args:
        description: a TOML file; or "module:name" or "file.py:name" of a `Job` or of a function that returns one.
            Without a name it is `job`.

    Raises:
        ArgumentError: there is no such job, or it is invalid. The message says where.

    Examples:
        >>> import pathlib, tempfile
        >>> from geartrain import launch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "hello.toml")
        ...     _ = path.write_text('name = "hello"\n[role.greeter]\nrun = ["echo", "hello"]\n')
        ...     launch.load(str(path)).name
        'hello'
    """
    check_text("the description of a job", description)
    if description.endswith(".toml"):
        return _from_toml(Path(description))
    where, _, name = description.partition(":")
    if not where.strip() or where.startswith(".") or ("/" in where and not where.endswith(".py")):
        raise ArgumentError(f"a job is a TOML file, module:name or file.py:name, found {description!r}")
    try:
        found = find(f"{where}:{name or 'job'}", str(Path(where).parent) if where.endswith(".py") else ".")
        if callable(found) and not isinstance(found, Job):
            found = found()
    except GeartrainError:
        raise
    except Exception as error:  # whatever the user's own module raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(
            f"{description} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error
    return check_type(f"{description} must be a geartrain.launch.Job", found, Job)


#: Tables of a description, each a role of that name and kind.
_TABLES = ("learner", "agent", "actor", "reducer")


def _from_toml(path: Path) -> Job:
    try:
        tables = _toml().loads(path.read_text())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of a job: its lists and tables are nested too deeply") from None
    roles: list[Role] = []
    others = tables.pop("role", {})
    check_type(f"{path}: role is the tables [role.NAME]", others, dict)
    for kind in _TABLES:
        table = tables.pop(kind, None)
        if table is not None:
            roles.append(_role(path, kind, kind, table))
    for name, table in others.items():
        kind = table.get("kind", "other") if isinstance(table, dict) else "other"
        roles.append(_role(path, f"role.{name}", kind, table))
    known = {each.name for each in fields(Job)} - {"roles"}
    unknown = sorted(set(tables) - known)
    if unknown:
        raise ArgumentError(
            f"{path}: {', '.join(unknown)} is unknown; possible are {', '.join(sorted(known))}, and the "
            "tables learner, agent, actor, reducer and "
            f"role.NAME{did_you_mean(unknown, [*known, *_TABLES])}"
        )
    if "name" not in tables:
        raise ArgumentError(f"{path}: a job needs a name")
    job = Job(roles=roles, **{"directory": str(path.parent), **tables})
    return replace(job, directory=str((path.parent / tables.get("directory", ".")).resolve()))


def _role(path: Path, table_name: str, kind: str, table: Any) -> Role:
    """The role of a table: [learner], [agent], [actor], [reducer], or [role.NAME], which may say its kind or task."""
    check_type(f"{path}: [{table_name}] is a table", table, dict)
    works = "task" in table and table_name.startswith("role.")
    if works and table.get("kind", "worker") != "worker":
        raise ArgumentError(
            f"{path}: [{table_name}] has a task, so its kind is 'worker', found {shown(table['kind'])}: leave out kind"
        )
    known = {each.name for each in fields(Role)} - {"name", "kind"}
    acts = kind == "actor" and "run" not in table
    if kind == "reducer":
        known = (known | {"window_bytes", "threads"}) - {"run", "args"}
    elif acts:
        known = (known | {"environments", "policy", "seed", "publish_every", "overlap", "priority", "steps"}) - {
            "run",
            "args",
        }
        missing = {"environments", "policy"} - set(table)
        if missing:
            raise ArgumentError(f"{path}: [{table_name}] needs environments and policy, or run; found {sorted(table)}")
    elif "run" not in table:
        raise ArgumentError(f"{path}: [{table_name}] needs run")
    if works:
        known |= {"task", "rows", "max_items", "of", "concurrency", "store", "output"}
    options: dict[str, Any] = dict(table)
    name = table_name
    if table_name.startswith("role."):
        name = table_name.removeprefix("role.")
        known = known | {"kind"}
        options.pop("kind", None)
    unknown = sorted(set(table) - known)
    if unknown:
        raise ArgumentError(
            f"{path}: {', '.join(unknown)} is unknown in [{table_name}]; possible are "
            f"{', '.join(sorted(known))}{did_you_mean(unknown, known)}"
        )
    options["name"] = name
    if kind == "reducer":
        return reducers(**options)
    if acts:
        return actors(**options)
    if works:
        return workers(**options)
    if kind == "agent":
        return agents(**options)
    return Role(**({"kind": kind, "max_restarts": 10 if kind == "actor" else 0} | options))


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise MissingDependencyError("reading TOML needs tomli on Python 3.10: pip install 'geartrain[cli]'") from None


# --- targets ----------------------------------------------------------------------------------------------------------


def target_of(about: str, given: Any) -> str | list[str]:
    """A target as a string or a list of words."""
    if isinstance(given, str):
        if ":" not in given:
            raise ArgumentError(
                f"{about}: {given!r} names no function: it is module:function or file.py:function, and a command is a "
                "list of words"
            )
        return given
    if isinstance(given, Sequence):
        words = list(given)
        if not words or not all(isinstance(word, str) for word in words):
            raise ArgumentError(f"{about}: a command is a list of words, found {given!r}")
        return words
    name = getattr(given, "__qualname__", "")
    if not callable(given) or "<" in name or not name:
        raise ArgumentError(f"{about}: a new process must find the function by its name in a module, found {given!r}")
    if given.__module__ == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise ArgumentError(f"{about}: {name} is in no file that a new process could import")
        return f"{Path(file).resolve()}:{name}"
    return f"{given.__module__}:{name}"


def find(target: str, directory: str = ".") -> Any:
    """The object that a target names.

    Raises:
        ArgumentError: there is no such module, file or name.
    """
    where, _, name = target.rpartition(":")
    module = _file_module(Path(directory) / Path(where).name, where) if where.endswith(".py") else _module(where)
    found: Any = module
    for word in name.split("."):
        if not hasattr(found, word):
            raise ArgumentError(f"{where} has no {name}")
        found = getattr(found, word)
    return found


def find_or_exit(target: str) -> Any:
    """As `find`, in a process of a job. If there is no such object, the process ends as `exit_unusable`."""
    try:
        return find(target)
    except ArgumentError as error:
        exit_unusable(error)


def exit_unusable(error: Exception) -> NoReturn:
    """Ends this process of a job by an error that no restart can mend, so that the job ends with it."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.exit(UNUSABLE)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        raise ArgumentError(f"there is no module {name!r}; looked in {', '.join(sys.path[:3])}, ...") from None


def _file_module(path: Path, given: str) -> ModuleType:
    path = Path(given) if Path(given).is_absolute() or Path(given).exists() else path
    if not path.is_file():
        raise ArgumentError(f"there is no file {given}")
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    main = sys.modules["__main__"]
    if Path(str(getattr(main, "__file__", None) or "")).resolve() == path.resolve():
        return main
    if path.stem.isidentifier() and path.stem not in sys.modules:
        module = importlib.import_module(path.stem)  # under its own name, so that what it defines can be found again
        if Path(str(module.__file__)).resolve() == path.resolve():
            return module
    known = sys.modules.get(path.stem)
    if known is not None and Path(str(getattr(known, "__file__", ""))).resolve() == path.resolve():
        return known
    raise ArgumentError(f"{path} cannot be imported as {path.stem!r}: another module has that name, or it is no name")


def check_shared_memory(about: str, given: Any) -> dict[str, float]:
    """Shared memory by terms of hosts: a number is that of all.

    Raises:
        ArgumentError: it is neither a number above 0 nor a table of such numbers.
    """
    if given is None:
        return {}
    table = given if isinstance(given, Mapping) else {"all": given}
    checked = {}
    for terms, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ArgumentError(
                f"{about}: shared_memory_gb is a number above 0, or a table of numbers by hosts such as "
                f"{{ trainers = 20, simulators = 1 }}, found {given!r}"
            )
        checked[check_terms(f"{about}: shared_memory_gb", terms)] = float(value)
    return checked


__all__ = [
    "ACT",
    "REDUCE",
    "SERVERS",
    "UNUSABLE",
    "WORK",
    "Job",
    "Keep",
    "Kind",
    "Role",
    "Target",
    "actors",
    "agents",
    "check_shared_memory",
    "exit_unusable",
    "find",
    "find_or_exit",
    "learners",
    "load",
    "reducers",
    "target_of",
    "workers",
]
