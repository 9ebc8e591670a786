"""Job description: roles and their processes, from Python or from a TOML file."""

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
from typing import Any, Literal, get_args

from geartrain.core.shared_files import Trust, check_trust
from geartrain.errors import ArgumentError, GeartrainError, MissingDependencyError

#: What a process runs: "module:function", "file.py:function", the function itself, or a command as a list of words.
Target = str | Callable[..., Any] | Sequence[str]
Kind = Literal["learner", "agent", "actor", "other"]
Keep = Literal["never", "on_failure", "always"]
#: What the processes of `actors` run.
ACT = "geartrain.launch.actor_role:act"

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Role:
    """Processes of a job that do the same. `learners`, `agents`, `actors` make the usual ones.

    Attributes:
        name: of the role; its processes are NAME-0, NAME-1, ...
        run: what they run: "module:function", "file.py:function", a function of a module, or a command (a list of
            words). A function is called with its `Context` and `args`; a command gets it by `launch.context()`.
        processes: how many, on each host.
        kind: "learner": ranks, with torchrun's environment variables; the job is over when all have returned.
            "agent": must not end by itself, and is stopped last. "actor", "other": may return when they are done.
        args: further arguments of the function, by name: what JSON can hold.
        max_restarts: of all its processes together, on each host. Learners die and start again together.
        threads: that OpenMP, and so torch, may use in each process; None leaves it alone.
        env: further environment variables.
        hosts: "all", or "first" for processes on host 0 only.
        silent_s: heartbeat timeout: a process that has not reported for so long is killed, and counts as dead; it first
            reports when it gets its context. None for no timeout.
    """

    name: str
    run: Target
    processes: int = 1
    kind: Kind = "other"
    args: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 0
    threads: int | None = 1
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: Literal["all", "first"] = "all"
    silent_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _WORD.fullmatch(self.name):
            raise ArgumentError(f"a role's name is a plain word, found {self.name!r}")
        about = f"role {self.name!r}"
        if self.kind not in get_args(Kind):
            raise ArgumentError(f"{about}: kind is one of {', '.join(get_args(Kind))}, found {self.kind!r}")
        if self.hosts not in ("all", "first") or (self.kind == "learner" and self.hosts != "all"):
            raise ArgumentError(f"{about}: hosts is 'all' or, but for learners, 'first', found {self.hosts!r}")
        _whole(about, "processes", self.processes, 1)
        _whole(about, "max_restarts", self.max_restarts, 0)
        if self.threads is not None:
            _whole(about, "threads", self.threads, 1)
        if self.silent_s is not None:
            _seconds(about, "silent_s", self.silent_s)
        for what, given in (("env", self.env), ("args", self.args)):
            if not isinstance(given, Mapping):
                raise ArgumentError(f"{about}: {what} is a table of names and values, found {given!r}")
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
    """The ranks that train, with torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    With `max_restarts` a rank's death has all ranks of the host killed and started again (one host only); with 0, the
    default, it ends the job. `options`: as for `Role`.
    """
    return Role(name, run, processes, "learner", **options)


def agents(run: Target, processes: int = 1, *, name: str = "agent", max_restarts: int = 3, **options: Any) -> Role:
    """Inference servers of actors (`Context.node`, `rpc.batched`); they serve until `Context.stopping`."""
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
    priority: float = 1.0,
    steps: int | None = None,
    max_restarts: int = 10,
    **options: Any,
) -> Role:
    """Processes that step environments and write episodes into the job's store, as `ActorPool`'s do.

    Args:
        environments: called in each process with its `ActorContext`; returns what `environments_of` takes.
        policy: the same for the policy. The context's `job` is the process's `launch.Context`.
        processes: how many, on each host.
        name: of the role.
        seed: process i uses seed + i * 1,000, and another one after each restart.
        publish_every, overlap, priority: as for `Store.recorder`.
        steps: of each process, after which it returns; by default it acts until the job ends.
        max_restarts: of all of them together, on each host.
        options: as for `Role`.
    """
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


@dataclass(frozen=True)
class Job:
    """A job: its name, which is also its store's and its weights', and its roles.

    Attributes:
        name: a plain word. One job of a name runs on a host at a time.
        roles: of different names; one of learners at most. Without learners the job is over when all but agents are.
        timeout_s: the job is stopped, with `JobTimeoutError`, when it takes longer. None for no limit.
        stop_s: time for processes to end after SIGTERM; then they are killed.
        keep_store: whether the store's segment stays when the job is over, for the next start to adopt its rows:
            "never", "on_failure" (a death or the time limit, not Ctrl-C) or "always".
        directory: where processes run and modules are found; the current one by default.
        trust: who may write to the job's store and weights besides this process's user, as for `Store.create`: programs
            of other users join them so. The processes of the job, and its launcher, open them with it.

    Example:
        >>> from geartrain import launch
        >>> job = launch.Job(
        ...     "pendulum",
        ...     [
        ...         launch.learners("pendulum:learn", 2, args={"steps": 1000}),
        ...         launch.agents("pendulum:serve"),
        ...         launch.actors("pendulum:environments", "pendulum:policy", 4),
        ...     ],
        ...     timeout_s=3600,
        ... )
        >>> [f"{role.name} x {role.processes}" for role in job.roles]
        ['learner x 2', 'agent x 1', 'actor x 4']
    """

    name: str
    roles: Sequence[Role]
    timeout_s: float | None = None
    stop_s: float = 10.0
    keep_store: Keep = "on_failure"
    directory: str = ""
    trust: Trust = "user"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _WORD.fullmatch(self.name):
            raise ArgumentError(f"a job's name is a plain word, found {self.name!r}")
        object.__setattr__(self, "roles", tuple(self.roles))
        names = [role.name for role in self.roles]
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"job {self.name!r}: roles of different names are needed, found {names}")
        if sum(role.kind == "learner" for role in self.roles) > 1:
            raise ArgumentError(f"job {self.name!r}: there is one role of learners, for ranks are numbered through")
        if all(role.kind == "agent" for role in self.roles):
            raise ArgumentError(f"job {self.name!r}: agents alone never end; there must be learners, actors or others")
        if self.timeout_s is not None:
            _seconds(f"job {self.name!r}", "timeout_s", self.timeout_s)
        _seconds(f"job {self.name!r}", "stop_s", self.stop_s)
        if not isinstance(self.directory, str):
            raise ArgumentError(f"job {self.name!r}: directory is a path as a string, found {self.directory!r}")
        if self.keep_store not in get_args(Keep):
            raise ArgumentError(
                f"job {self.name!r}: keep_store is one of {', '.join(get_args(Keep))}, found {self.keep_store!r}"
            )
        check_trust(self.trust)
        object.__setattr__(self, "directory", str(Path(self.directory or ".").resolve()))

    @property
    def learner(self) -> Role | None:
        """The role whose processes are ranks."""
        return next((role for role in self.roles if role.kind == "learner"), None)


# --- from a file ------------------------------------------------------------------------------------------------------


def load(description: str) -> Job:
    """The job that a description names.

    Args:
        description: a TOML file; "module:name" or "file.py:name", where the name is a `Job` or a function that
            returns one (`job` when left out).

    Raises:
        ArgumentError: there is none, or it is wrong; says where.
    """
    if description.endswith(".toml"):
        return _from_toml(Path(description))
    where, _, name = description.partition(":")
    if not where.strip() or where.startswith("."):
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
    if not isinstance(found, Job):
        raise ArgumentError(f"{description} is {type(found).__name__}, and not a geartrain.launch.Job")
    return found


def _from_toml(path: Path) -> Job:
    try:
        tables = _toml().loads(path.read_text())
    except FileNotFoundError:
        raise ArgumentError(f"there is no file {path}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is not TOML: {error}") from None
    roles: list[Role] = []
    others = tables.pop("role", {})
    if not isinstance(others, dict):
        raise ArgumentError(f"{path}: role is the tables [role.NAME], found {others!r}")
    for kind in ("learner", "agent", "actor"):
        table = tables.pop(kind, None)
        if table is not None:
            roles.append(_role(path, kind, kind, table))
    for name, table in others.items():
        roles.append(_role(path, name, "other", table))
    known = {each.name for each in fields(Job)} - {"roles"}
    unknown = sorted(set(tables) - known)
    if unknown:
        raise ArgumentError(
            f"{path}: {', '.join(unknown)} means nothing here; there are {', '.join(sorted(known))}, and the tables "
            "learner, agent, actor and role.NAME"
        )
    if "name" not in tables:
        raise ArgumentError(f"{path}: a job needs a name")
    job = Job(roles=roles, **{"directory": str(path.parent), **tables})
    return replace(job, directory=str((path.parent / tables.get("directory", ".")).resolve()))


def _role(path: Path, name: str, kind: str, table: Any) -> Role:
    if not isinstance(table, dict):
        raise ArgumentError(f"{path}: [{name}] is a table")
    acting = {"environments", "policy", "seed", "publish_every", "overlap", "priority", "steps"}
    known = {each.name for each in fields(Role)} - {"name"} - (set() if kind == "other" else {"kind"})
    if kind == "actor" and "run" not in table:
        known = (known | acting) - {"run", "args"}
        missing = {"environments", "policy"} - set(table)
        if missing:
            raise ArgumentError(f"{path}: [actor] needs environments and policy, or run; found {sorted(table)}")
    elif "run" not in table:
        raise ArgumentError(f"{path}: [{name}] needs run")
    unknown = sorted(set(table) - known)
    if unknown:
        raise ArgumentError(
            f"{path}: {', '.join(unknown)} means nothing in [{name}]; there are {', '.join(sorted(known))}"
        )
    options = {"name": name, **table}
    if kind == "actor" and "run" not in table:
        return actors(**options)
    if kind == "agent":
        return agents(**options)
    return Role(**({"kind": kind, **options} | ({"max_restarts": 10, **table} if kind == "actor" else {})))


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
    """What a target names.

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


def _seconds(about: str, what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ArgumentError(f"{about}: {what} must be above 0, found {value!r}")


def _whole(about: str, what: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{about}: {what} is a whole number from {least} on, found {value!r}")


__all__ = ["ACT", "Job", "Keep", "Kind", "Role", "Target", "actors", "agents", "find", "learners", "load", "target_of"]
