"""Capability report of this machine: each feature viable, or not viable with the reason."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import geartrain._native as _native
import geartrain.device.cuda_ipc as cuda_ipc
import geartrain.device.kernels as kernels
import geartrain.device.pinned_memory as pinning
import geartrain.tools.cross_memory as cross_memory
import geartrain.transport.nixl as nixl
from geartrain.core.shared_files import segments_directory, shared_files
from geartrain.errors import ArgumentError, GeartrainError, SchemaError
from geartrain.tools.testing import Hosts
from geartrain.transport.connection import viable
from geartrain.transport.tls import THREADS_VARIABLE

#: Docker gives containers 64 MB of /dev/shm unless it is told otherwise.
SMALL_BYTES = 64 << 20

# Optional packages: the module to import, and the extra that installs it.
OPTIONAL = {
    "torch": ("torch", "torch"),
    "typer, rich (command line)": ("typer", "cli"),
    "matplotlib (plots)": ("matplotlib", "plot"),
    "minari": ("minari", "minari"),
    "h5py (D4RL files)": ("h5py", "hdf5"),
    "tfrecord (RLDS files)": ("tfrecord", "rlds"),
    "array_record (RLDS files)": ("array_record", "rlds"),
    "pyarrow (LeRobot datasets)": ("pyarrow", "lerobot"),
    "av (videos of LeRobot datasets)": ("av", "lerobot"),
    "gymnasium, mujoco (demo)": ("mujoco", "demo"),
}


@dataclass(frozen=True)
class Finding:
    """One capability: whether it is usable, and its details or what is missing."""

    what: str
    viable: bool
    because: str


def examine() -> list[Finding]:
    """All capabilities, in a second or two.

    Imports optional packages to check that they load, and creates two emulated hosts for a moment.
    """
    return [
        _machine(),
        _copies(),
        draws(),
        shared_memory(),
        _huge_pages(),
        _locked_memory(),
        _tls(),
        *_packages(),
        _gpu(),
        _gpu_selection(),
        _cuda_ipc(),
        _nixl(),
        _gpu_fetch(),
        collectives_within_host(),
        collectives_waits(),
        _gloo(),
        _deepspeed(),
        _hosts(),
    ]


def _machine() -> Finding:
    cores = _native.available_cores()
    return Finding(
        "machine",
        True,
        f"{platform.machine()}, cores for this process: {cores}, Python {platform.python_version()}",
    )


def _copies() -> Finding:
    kernel = _native.copy_kernel()
    return Finding("streaming copies", kernel != "memcpy", f"large batches are copied with {kernel}")


def draws() -> Finding:
    """The form of prioritized draws: the fastest one here, measured now, or what GEARTRAIN_DESCENT names."""
    what = "prioritized draws"
    rows = 1 << 21  # too many for most caches: what is measured is waiting for memory
    candidates = _native.Candidates(np.arange(1, rows + 1, dtype=np.uint32))
    numbers = np.arange(1 << 15, dtype=np.uint32)
    try:
        for step in range(4):
            candidates.draw(True, 0, step, 0, numbers, 0, None)
    except SchemaError as error:  # of the variable
        return Finding(what, False, str(error))
    form, in_flight, because, measured = _native.draw_tuning()
    told = "; ".join(f"{other} {count}: {ns:.0f} ns" for other, count, ns in measured)
    why = f"{form}, {in_flight} searches in flight ({because}{f': {told} a draw' if told else ''})"
    return Finding(what, True, f"{why}; GEARTRAIN_DESCENT=avx2:32 names another")


def shared_memory() -> Finding:
    """The directory of segments: what chose it, its file system, its size, its free space, and what to do about it."""
    what = "shared memory"
    elsewhere = "set GEARTRAIN_DIR to a directory of a larger file system, for all processes of the job"
    try:
        directory = segments_directory()
    except ArgumentError as error:
        return Finding(what, False, str(error))
    chosen = "GEARTRAIN_DIR" if os.environ.get("GEARTRAIN_DIR") else "the default"
    if not directory.is_dir():
        return Finding(what, False, f"{directory} ({chosen}) is no directory; {elsewhere}")
    usage = shutil.disk_usage(directory)
    kind = _file_system(directory)
    segments = shared_files("geartrain*", directory)
    text = (
        f"segments live in {directory} ({chosen}, {kind}): {usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f}"
        f" GB, {len(segments)} files of geartrain in it"
    )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Finding(what, False, f"{text}; this user may not write there: {elsewhere}")
    if usage.total <= SMALL_BYTES:
        text += "; no more than the 64 MiB that containers get by default: docker run --shm-size=16g, or --ipc=host, "
        text += f"or {elsewhere}"
        return Finding(what, False, text)
    if usage.free <= usage.total // 10:
        text += f"; nearly full: remove what dead runs left (`geartrain inspect` lists it), enlarge it, or {elsewhere}"
    if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
        text += "; on a disk: writes go to it, and a GPU cannot read segments in place"
    return Finding(what, True, text)


def _file_system(directory: Path) -> str:
    """The type of the file system that a directory is on, as the kernel calls it."""
    best, kind = -1, "an unknown file system"
    found = directory.resolve()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mounted = Path(before.split()[4].encode().decode("unicode_escape"))
            if found.is_relative_to(mounted) and len(mounted.parts) >= best:
                best, kind = len(mounted.parts), after.split()[0]
    return kind


def _huge_pages() -> Finding:
    """Whether the kernel would allocate a segment in huge pages now, found by doing so, and what to change if not."""
    what = "huge pages for segments"
    try:
        viable = _native.has_huge_pages(str(segments_directory()))
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except (GeartrainError, OSError) as error:
        return Finding(what, False, str(error))
    why = f"shmem_enabled is {setting[setting.find('[') + 1 : setting.find(']')]}"
    if viable:
        return Finding(what, True, f"{why}; segments that are reserved ask for them page by page")
    return Finding(
        what,
        False,
        f"{why}, and the kernel gave none: they need a directory in memory, Linux 6.1, free memory that lies together, "
        "and a setting other than deny; draws from large stores are slower without",
    )


def _locked_memory() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.0f} MB"
    return Finding(
        "locked memory", True, f"RLIMIT_MEMLOCK is {text} (some drivers enforce it when segments are pinned)"
    )


def _tls() -> Finding:
    what = "TLS over TCP"
    reason = _native.tls_not_viable()
    how = "OpenSSL 3 found; enabled where certificates are given (docs/transport.md); "
    asked = os.environ.get(THREADS_VARIABLE, "")
    if asked:
        how += f"{asked} threads encrypt or decrypt a connection's lanes ({THREADS_VARIABLE})"
    else:
        most = _native.tls_lanes(0)
        how += f"a connection has {most} lanes, encrypted or decrypted by as many threads as have a core to themselves"
    return Finding(what, not reason, reason or how)


def _packages() -> list[Finding]:
    findings = []
    for what, (module, extra) in OPTIONAL.items():
        try:
            loaded = importlib.import_module(module)
            version = getattr(loaded, "__version__", "") or importlib.metadata.version(module)
            findings.append(Finding(what, True, f"version {version}"))
        except ImportError as error:
            findings.append(Finding(what, False, f"{error}; pip install 'geartrain[{extra}]'"))
    return findings


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("GPU", False, "torch is not installed")
    if not torch.cuda.is_available():
        return Finding("GPU", False, f"torch {torch.__version__} finds no CUDA device")
    return Finding("GPU", True, torch.cuda.get_device_name(0))


def _gpu_selection() -> Finding:
    reason = kernels.why_not_viable()
    if reason is not None:
        return Finding("selection on a GPU", False, f"{reason}; rows are chosen on the CPU")
    how = "Triton's interpreter, for tests" if kernels.interpreting() else "Triton kernels"
    return Finding("selection on a GPU", True, f"{how}, triton {importlib.metadata.version('triton')}")


def _cuda_ipc() -> Finding:
    what = "tensors from GPU to GPU (cuda_ipc)"
    reason = cuda_ipc.why_not()
    if reason is not None:
        return Finding(what, False, f"{reason}; tensors on GPUs are sent through host memory")
    return Finding(what, True, "on this side; each pair of GPUs is probed on first use (`node.connections()`)")


def _nixl() -> Finding:
    what = "RDMA, GPUDirect (nixl)"
    reason = nixl.why_not()
    if reason is not None:
        return Finding(what, False, reason)
    return Finding(what, True, f"{nixl.describe()}; UCX chooses devices itself (docs/devices.md)")


def _gpu_fetch() -> Finding:
    what = "batches on a GPU"
    reason = kernels.why_not_viable()
    if reason is None and kernels.interpreting():
        reason = "TRITON_INTERPRET is set"
    if reason is not None:
        return Finding(what, False, f"{reason}; batches stay in host memory")
    known = pinning.about()
    return Finding(
        what,
        True,
        f"gathered from pinned segments or staged; {known['pinned_bytes'] / 1e9:.1f} GB of this host are pinned, the "
        f"limit is {known['limit_bytes'] / 1e9:.1f} GB ({pinning.LIMIT_VARIABLE})",
    )


def collectives_within_host() -> Finding:
    """Whether ranks of one host read each other's memory, or rings alone carry their bytes, and why."""
    what = "collectives within a host"
    reason = cross_memory.why_not()
    if reason is not None:
        return Finding(what, False, f"{reason}; all bytes between ranks of one host go through rings in shared memory")
    return Finding(
        what,
        True,
        "ranks of one user read what is gathered, exchanged or broadcast from the owner's memory (process_vm_readv); "
        "what is reduced goes through rings in shared memory, or is read from 64 KB on where that is found faster "
        '(with a core for each rank; Group.counters()["read_operations"] counts), from 4 MB on with four ranks or more '
        "for each core, or as Group(least_read_bytes=) says; between ranks that are denied it all goes through rings",
    )


def collectives_waits() -> Finding:
    """What a wait of collectives does where ranks share memory: busy-waits for how long, and when to say otherwise."""
    what = "waits of collectives"
    cores = _native.available_cores()
    variable = "GEARTRAIN_ALLREDUCE_SPIN_US"
    given = os.environ.get(variable, "").strip()
    if not given:
        return Finding(
            what,
            True,
            "between ranks of one host they poll for 50 us and then sleep, at once while others use the cores; "
            f"with more than {cores} ranks here they offer their core while they poll. For ranks that own a core "
            f"each: {variable}=1e6 or Group(spin_us=1e6); 0 never polls",
        )
    try:
        from geartrain.collectives.torch_backend.options import BackendOptions
    except ImportError as error:
        return Finding(what, False, f"{variable} is for torch.distributed: {error}; pip install 'geartrain[torch]'")
    try:
        spin_us = BackendOptions.from_environment({variable: given}).spin_us
    except ValueError as error:
        return Finding(what, False, str(error))
    polls = f"poll for {spin_us:g} us before they sleep" if spin_us else "never poll"
    return Finding(
        what,
        True,
        f"ranks of torch.distributed {polls} ({variable}), also with more than {cores} ranks here and beside others, "
        "where it is better not set; groups in Python and C have their own spin_us",
    )


def _gloo() -> Finding:
    what = "one replay over many ranks"
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return Finding(what, False, f"{error}; pip install 'geartrain[torch]'")
    if not dist.is_available():
        return Finding(what, False, f"torch {torch.__version__} was built without torch.distributed")
    if not dist.is_gloo_available():
        return Finding(what, False, f"torch {torch.__version__} was built without Gloo, which jobs on CPUs start with")
    missing = {name: why for name, why in viable().items() if why is not None}
    if "tcp" in missing:
        return Finding(what, True, f"ranks exchange messages by Gloo only: tcp: {missing['tcp']}")
    within = "TCP" if "shm" in missing else "shared memory"
    reason = f" (shared memory: {missing['shm']})" if "shm" in missing else ""
    return Finding(
        what, True, f"messages by {within} within a host{reason}, TCP across; torch {torch.__version__} has Gloo"
    )


def _deepspeed() -> Finding:
    what = "DeepSpeed (pipelines, ZeRO)"
    try:
        # Not imported: that takes seconds, prints a page and looks for compilers.
        return Finding(what, True, f"version {importlib.metadata.version('deepspeed')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(what, False, "it is not installed; pip install 'geartrain[deepspeed]'")


def _hosts() -> Finding:
    reason = Hosts.viable()
    return Finding(
        "emulated hosts (bench ranks, tests)",
        reason is None,
        "network namespaces, with shaped links" if reason is None else reason,
    )
