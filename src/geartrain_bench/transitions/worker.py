"""A replay buffer of another library, timed on request: runs with that environment's Python, without geartrain.

Reads one JSON object a line from stdin and answers each with one on stdout:

    {"do": "setup", "baseline": "sb3", "observation": [17], "dtype": "float32", "action": 6, "steps": 500000,
     "n_envs": 1, "n_step": 1, "window": 0, "fill": true}  -> {"versions": {...}, "bytes": of its arrays}
    {"do": "sample", "batch": 256, "calls": 50}  -> {"seconds": per call, "cpu_seconds": ..., "disturbed": ...}
    {"do": "add", "calls": 100}                  -> the same, one step of all environments a call

A request that fails is answered with {"error": "..."}. The end of stdin or of its parent ends it. Contents are noise;
one step in 200 ends an episode.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any, TextIO

import numpy as np

GAMMA = 0.99
#: Steps whose noise is made before the clock starts; they are added over and over.
PREPARED = 64


class Buffer:
    """Interface of a library's buffer."""

    #: Whether it samples windows of consecutive steps.
    windows = False

    def __init__(self, request: dict[str, Any]) -> None:
        self.shape = tuple(request["observation"])
        self.dtype = np.dtype(request["dtype"])
        self.action: int = request["action"]
        self.n_envs: int = request["n_envs"]
        self.n_step: int = request["n_step"]
        self.window: int = request["window"]
        self.steps: int = request["steps"]
        self.random = np.random.default_rng(0)
        self.versions: dict[str, str] = {}
        if self.window and not self.windows:
            raise ValueError("it samples single transitions, no windows of steps")
        self.make()
        self.noise = [self.prepare(*self.arrays()) for _ in range(PREPARED)]
        self.at = 0
        if request["fill"]:
            self.fill()

    def arrays(self) -> tuple[Any, ...]:
        """One step of all environments: observation, next one, action, reward, terminated."""
        shape = (2, self.n_envs, *self.shape)
        both = self.random.integers(0, 256, shape).astype(self.dtype)
        action = self.random.standard_normal((self.n_envs, self.action)).astype(np.float32)
        reward = self.random.standard_normal(self.n_envs).astype(np.float32)
        return both[0], both[1], action, reward, self.random.random(self.n_envs) < 1 / 200

    def make(self) -> None:
        """Creates the empty buffer, and notes its versions."""
        raise NotImplementedError

    def prepare(self, *step: Any) -> Any:
        """A step as arguments of `store`."""
        return step

    def store(self, step: Any) -> None:
        """Adds a step."""
        raise NotImplementedError

    def sample(self, batch: int) -> None:
        """Samples transitions, and drops them."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Of its arrays."""
        raise NotImplementedError

    def fill(self) -> None:
        """Adds as many steps as there is room for."""
        self.add(-(-self.steps // self.n_envs))

    def add(self, calls: int) -> None:
        """Adds so many steps."""
        for _ in range(calls):
            self.store(self.noise[self.at])
            self.at = (self.at + 1) % PREPARED


class StableBaselines(Buffer):
    """`ReplayBuffer`, and with n_step above 1 `NStepReplayBuffer`."""

    def make(self) -> None:
        """See `Buffer`."""
        import stable_baselines3  # type: ignore[import-not-found, unused-ignore]
        import torch
        from gymnasium import spaces
        from stable_baselines3.common import buffers  # type: ignore[import-not-found, unused-ignore]

        torch.set_num_threads(1)
        self.versions = {"stable-baselines3": stable_baselines3.__version__, "torch": torch.__version__}
        low, high = (0, 255) if self.dtype == np.uint8 else (-np.inf, np.inf)
        observation = spaces.Box(low, high, self.shape, self.dtype.type)  # type: ignore[arg-type, unused-ignore]
        action = spaces.Box(-1, 1, (self.action,), np.float32)
        kind: Any = buffers.ReplayBuffer
        more: dict[str, Any] = {}
        if self.n_step > 1:
            kind, more = buffers.NStepReplayBuffer, {"n_steps": self.n_step, "gamma": GAMMA}
        self.buffer = kind(self.steps, observation, action, "cpu", n_envs=self.n_envs, **more)
        self.infos: list[dict[str, Any]] = [{} for _ in range(self.n_envs)]

    def store(self, step: Any) -> None:
        """See `Buffer`."""
        observation, following, action, reward, ended = step
        self.buffer.add(observation, following, action, reward, ended, self.infos)

    def sample(self, batch: int) -> None:
        """See `Buffer`."""
        self.buffer.sample(batch)

    def nbytes(self) -> int:
        """See `Buffer`."""
        arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        return sum(getattr(self.buffer, name).nbytes for name in arrays)


class Cpprb(Buffer):
    """`ReplayBuffer`, with its `Nstep` above 1."""

    def make(self) -> None:
        """See `Buffer`."""
        from importlib.metadata import version

        import cpprb

        self.versions = {"cpprb": version("cpprb")}
        shown = {"shape": self.shape, "dtype": self.dtype}
        env = {"obs": shown, "next_obs": shown, "act": {"shape": self.action}, "rew": {}, "done": {}}
        more = {"Nstep": {"size": self.n_step, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}}
        self.buffer = cpprb.ReplayBuffer(self.steps, env, **(more if self.n_step > 1 else {}))
        self.width = 2 * int(np.prod(self.shape)) * self.dtype.itemsize + 4 * (self.action + 2)

    def store(self, step: Any) -> None:
        """See `Buffer`."""
        observation, following, action, reward, ended = step
        if self.n_envs == 1:
            observation, following, action, reward, ended = (each[0] for each in step)
        self.buffer.add(obs=observation, next_obs=following, act=action, rew=reward, done=ended)

    def sample(self, batch: int) -> None:
        """See `Buffer`."""
        self.buffer.sample(batch)

    def nbytes(self) -> int:
        """See `Buffer`."""
        return int(self.steps * self.width)


class Torchrl(Buffer):
    """`TensorDictReplayBuffer` over a `LazyTensorStorage`, with a `SliceSampler` for windows; no n-step returns."""

    windows = True

    def make(self) -> None:
        """See `Buffer`."""
        import tensordict
        import torch
        import torchrl
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        if self.n_step > 1:
            raise ValueError("n-step returns are a transform of whole trajectories there")
        torch.set_num_threads(1)
        self.torch = torch
        self.step_bytes: int = 0
        self.versions = {
            "torchrl": torchrl.__version__,
            "tensordict": tensordict.__version__,
            "torch": torch.__version__,
        }
        more: dict[str, Any] = {}
        if self.window:
            from torchrl.data.replay_buffers import SliceSampler

            # The ends of episodes are looked up once, not for each batch.
            more["sampler"] = SliceSampler(
                slice_len=self.window, end_key=("next", "done"), truncated_key=None, cache_values=True
            )
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(self.steps), **more)

    def prepare(self, *step: Any) -> Any:
        """See `Buffer`."""
        from tensordict import TensorDict

        names = ("observation", "next", "action", "reward", "done")
        tensors = {
            name: self.torch.from_numpy(np.ascontiguousarray(each)) for name, each in zip(names, step, strict=True)
        }
        observation = {"observation": tensors.pop("next")}
        following = TensorDict(
            {
                **({} if self.window else observation),
                "reward": tensors.pop("reward"),
                "done": tensors.pop("done").unsqueeze(-1),
            },
            batch_size=[self.n_envs],
        )
        made = TensorDict({**tensors, "next": following}, batch_size=[self.n_envs])
        self.step_bytes = made.bytes() // self.n_envs
        return made

    def store(self, step: Any) -> None:
        """See `Buffer`."""
        self.buffer.extend(step)

    def sample(self, batch: int) -> None:
        """See `Buffer`."""
        self.buffer.sample(batch * max(1, self.window))  # it counts steps

    def nbytes(self) -> int:
        """See `Buffer`."""
        return self.steps * self.step_bytes

    def fill(self) -> None:
        """Many steps a call: one a call takes minutes."""
        many = self.torch.cat(self.noise)
        for _ in range(-(-self.steps // len(many))):
            self.buffer.extend(many)


class Tianshou(Buffer):
    """`VectorReplayBuffer`, whose n-step returns its algorithms make."""

    def make(self) -> None:
        """See `Buffer`."""
        from importlib.metadata import version

        import torch
        from tianshou.data import VectorReplayBuffer  # type: ignore[import-not-found, unused-ignore]

        if self.n_step > 1:
            raise ValueError("n-step returns are made by its algorithms, of single transitions")
        torch.set_num_threads(1)
        self.versions = {"tianshou": version("tianshou")}
        self.buffer = VectorReplayBuffer(self.steps, self.n_envs)

    def prepare(self, *step: Any) -> Any:
        """See `Buffer`."""
        from tianshou.data import Batch

        observation, following, action, reward, ended = step
        more = {"terminated": ended, "truncated": np.zeros(self.n_envs, bool)}
        return Batch(obs=observation, obs_next=following, act=action, rew=reward, **more)

    def store(self, step: Any) -> None:
        """See `Buffer`."""
        self.buffer.add(step)

    def sample(self, batch: int) -> None:
        """See `Buffer`."""
        self.buffer.sample(batch)

    def nbytes(self) -> int:
        """See `Buffer`."""
        if not len(self.buffer):
            self.add(1)
        arrays = list(self.buffer._meta.to_dict(recursive=True).values())
        total = 0
        while arrays:
            one = arrays.pop()
            if isinstance(one, dict):
                arrays += one.values()
            else:
                total += one.nbytes
        return total


class Flashbax(Buffer):
    """Flat buffer, and for windows trajectory buffer, jitted on the CPU; its windows cross ends of episodes."""

    windows = True

    def make(self) -> None:
        """See `Buffer`."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        from importlib.metadata import version

        import flashbax  # type: ignore[import-not-found, unused-ignore]
        import jax

        if self.n_step > 1:
            raise ValueError("it has no n-step returns")
        self.jax, self.flashbax = jax, flashbax
        self.versions = {"flashbax": version("flashbax"), "jax": jax.__version__}
        buffer = self.buffer_of(1)
        one = {
            "obs": jax.numpy.zeros(self.shape, self.dtype),
            "action": jax.numpy.zeros(self.action, np.float32),
            "reward": jax.numpy.zeros((), np.float32),
            "done": jax.numpy.zeros((), bool),
        }
        self.state = buffer.init(one)
        self.add_step = jax.jit(buffer.add, donate_argnums=0)
        self.samplers: dict[int, Any] = {}
        self.key = jax.random.key(0)

    def buffer_of(self, batch: int) -> Any:
        """The library's buffer; its state does not depend on the rows of a batch."""
        each = -(-self.steps // self.n_envs)
        return self.flashbax.make_trajectory_buffer(
            add_batch_size=self.n_envs,
            sample_batch_size=batch,
            sample_sequence_length=self.window or 2,
            period=1,
            min_length_time_axis=self.window or 2,
            max_length_time_axis=each,
        )

    def prepare(self, *step: Any) -> Any:
        """See `Buffer`."""
        observation, _, action, reward, ended = step
        made = {"obs": observation, "action": action, "reward": reward, "done": ended}
        return {name: self.jax.numpy.asarray(array[:, None]) for name, array in made.items()}

    def store(self, step: Any) -> None:
        """See `Buffer`."""
        self.state = self.add_step(self.state, step)
        self.jax.block_until_ready(self.state)

    def sample(self, batch: int) -> None:
        """See `Buffer`."""
        if batch not in self.samplers:
            draw = self.buffer_of(batch).sample

            def one(state: Any, key: Any) -> Any:
                key, this = self.jax.random.split(key)
                return key, draw(state, this).experience

            self.samplers[batch] = self.jax.jit(one)
        self.key, made = self.samplers[batch](self.state, self.key)
        self.jax.block_until_ready(made)

    def nbytes(self) -> int:
        """See `Buffer`."""
        return sum(leaf.nbytes for leaf in self.jax.tree.leaves(self.state.experience))


BUFFERS: dict[str, type[Buffer]] = {
    "sb3": StableBaselines,
    "cpprb": Cpprb,
    "torchrl": Torchrl,
    "torchrl-thp": Torchrl,
    "tianshou": Tianshou,
    "flashbax": Flashbax,
}


def timed(buffer: Buffer, request: dict[str, Any]) -> dict[str, Any]:
    """One lap, after one untimed call."""
    calls = request["calls"]

    def body(n: int) -> None:
        if request["do"] == "add":
            buffer.add(n)
            return
        for _ in range(n):
            buffer.sample(request["batch"])

    body(1)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu_s, began_s = time.process_time(), time.perf_counter()
    body(calls)
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
    disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != switches
    return {"seconds": seconds / calls, "cpu_seconds": cpu_seconds / calls, "disturbed": disturbed}


def serve(answers: TextIO) -> None:
    """Answers requests until stdin closes."""
    buffer: Buffer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "setup":
                buffer = None  # the one before is freed first
                buffer = BUFFERS[request["baseline"]](request)
                answer: dict[str, Any] = {"versions": buffer.versions, "bytes": buffer.nbytes()}
            elif buffer is None:
                raise ValueError("nothing was set up")
            else:
                answer = timed(buffer, request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves on stdin and stdout."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan holds gigabytes
    # Libraries print to stdout; the real one is reserved for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(answers)


if __name__ == "__main__":
    main()
