"""Capability report of this machine: whether each feature is ok, missing or broken, with details and the remedy."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import geartrain._native as _native
import geartrain.device.cuda_ipc as cuda_ipc
import geartrain.device.kernels as kernels
import geartrain.device.pinned_memory as pinning
import geartrain.tools.cross_memory as cross_memory
from geartrain.core.shared_files import leftovers, segments_directory
from geartrain.errors import ArgumentError, GeartrainError
from geartrain.tools.testing import Hosts
from geartrain.transport.connection import viable
from geartrain.transport.one_sided import nixl

#: Docker gives containers 64 MB of /dev/shm unless it is told otherwise.
SMALL_BYTES = 64 << 20

# Optional packages: the module to import, and the extra that installs it.
OPTIONAL = {
    "torch": ("torch", "torch"),
    "typer, rich (command line)": ("typer", "cli"),
    "matplotlib (plots)": ("matplotlib", "plot"),
    "prometheus-client (metrics)": ("prometheus_client", "metrics"),
    "minari": ("minari", "minari"),
    "h5py (D4RL files)": ("h5py", "hdf5"),
    "crc32c (RLDS files)": ("crc32c", "rlds"),
    "array_record (RLDS files)": ("array_record", "rlds"),
    "pyarrow (LeRobot datasets)": ("pyarrow", "lerobot"),
    "av (videos of LeRobot datasets)": ("av", "lerobot"),
    "gymnasium, mujoco (demo)": ("mujoco", "demo"),
}

#: Characters of a reason in the place of a remedy: with the longest name, it fits 80 columns.
_SHORT = 38
State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One capability.

    Attributes:
        what: its name.
        state: "ok"; "missing": this machine does not have it, and nothing else needs it; "broken": it exists or is set,
            but does not work.
        because: details: the finding and its cause.
        remedy: what to install or change, in a few words; "" if the state is "ok".
    """

    what: str
    state: State
    because: str
    remedy: str = ""


def about() -> str:
    """This machine and Python, in a line."""
    python = f"Python {platform.python_version()}"
    version = importlib.metadata.version("geartrain")
    return f"geartrain {version}, {python}, {platform.machine()}, cores for this process: {_native.available_cores()}"


def summary(findings: Sequence[Finding]) -> str:
    """How many are ok, missing and broken."""
    counted = {state: sum(each.state == state for each in findings) for state in get_args(State)}
    return f"{counted['ok']} ok, {counted['missing']} missing (all optional), {counted['broken']} broken"


def examine() -> list[Finding]:
    """All capabilities of this machine, in a second or two.

    Imports optional packages to check that they load, and creates two emulated hosts for a moment.
    """
    return [
        _copies(),
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


def _copies() -> Finding:
    what, kernel = "streaming copies", _native.copy_kernel()
    because = f"large batches are copied with {kernel}"
    return Finding(what, "missing", because, "AVX2 or newer") if kernel == "memcpy" else Finding(what, "ok", because)


def shared_memory() -> Finding:
    """The directory of segments: what chose it, its file system, its size, its free space, and what to do about it."""
    what = "shared memory"
    elsewhere = "set GEARTRAIN_DIR to a directory of a larger file system, for all processes of the job"
    try:
        directory = segments_directory()
    except ArgumentError as error:
        return Finding(what, "broken", str(error), "set GEARTRAIN_DIR to an absolute path")
    chosen = "GEARTRAIN_DIR" if os.environ.get("GEARTRAIN_DIR") else "the default"
    if not directory.is_dir():
        because = f"{directory} ({chosen}) is no directory; {elsewhere}"
        return Finding(what, "broken", because, f"no directory {directory}: set GEARTRAIN_DIR")
    usage = shutil.disk_usage(directory)
    kind = _file_system(directory)
    segments = leftovers("geartrain*", directory)
    text = (
        f"segments live in {directory} ({chosen}, {kind}): {usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f}"
        f" GB, {len(segments)} files of geartrain in it"
    )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        because = f"{text}; this user may not write there: {elsewhere}"
        return Finding(what, "broken", because, f"{directory} is not writable: set GEARTRAIN_DIR")
    if usage.total <= SMALL_BYTES:
        text += "; no more than the 64 MiB that containers get by default: docker run --shm-size=16g, or --ipc=host, "
        text += f"or {elsewhere}"
        return Finding(what, "broken", text, "too small: docker run --shm-size=16g")
    if usage.free <= usage.total // 10:
        text += f"; nearly full: remove what dead runs left (`geartrain inspect` lists it), enlarge it, or {elsewhere}"
    if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
        text += "; on a disk: writes go to it, and a GPU cannot read segments in place"
    if usage.free <= SMALL_BYTES:
        return Finding(what, "broken", text, "full: geartrain inspect, then remove")
    return Finding(what, "ok", text)


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
    remedy = "set shmem_enabled to advise"
    try:
        there = _native.has_huge_pages(str(segments_directory()))
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except (GeartrainError, OSError) as error:
        return Finding(what, "missing", str(error), remedy)
    why = f"shmem_enabled is {setting[setting.find('[') + 1 : setting.find(']')]}"
    if there:
        return Finding(what, "ok", f"{why}; segments that are reserved ask for them page by page")
    because = (
        f"{why}, and the kernel gave none: they need a directory in memory, Linux 6.1, free memory that lies together, "
        "and a setting other than deny; draws from large stores are slower without"
    )
    return Finding(what, "missing", because, remedy)


def _locked_memory() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.0f} MB"
    return Finding(
        "locked memory", "ok", f"RLIMIT_MEMLOCK is {text} (some drivers enforce it when segments are pinned)"
    )


def _tls() -> Finding:
    what = "TLS over TCP"
    reason = _native.tls_not_viable()
    if reason:
        return Finding(what, "missing", reason, "install OpenSSL 3")
    return Finding(
        what,
        "ok",
        "OpenSSL 3 found; enabled where certificates are given (docs/transport.md); a connection has "
        f"{_native.tls_lanes(0)} lanes, encrypted or decrypted by as many threads as have a core to themselves",
    )


def _install(extra: str) -> str:
    return f"pip install 'geartrain[{extra}]'"


def _short(reason: str) -> str:
    """The beginning of a reason, which stands among the details in full."""
    return textwrap.shorten(reason, _SHORT, placeholder=" ...")


def _load(what: str, module: str, extra: str) -> ModuleType | Finding:
    """An optional package's module, or why there is none: it is not installed, or its import fails, however it does."""
    try:
        if importlib.util.find_spec(module) is None:
            return Finding(what, "missing", f"{module} is not installed", _install(extra))
        return importlib.import_module(module)
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(what, "broken", f"import {module} fails: {told}", _short(told))


def _packages() -> list[Finding]:
    findings = []
    for what, (module, extra) in OPTIONAL.items():
        loaded = _load(what, module, extra)
        if not isinstance(loaded, Finding):
            version = getattr(loaded, "__version__", "") or importlib.metadata.version(module.replace("_", "-"))
            loaded = Finding(what, "ok", f"version {version}")
        findings.append(loaded)
    return findings


def _gpu_packages(what: str, *modules: str) -> Finding | None:
    """What is wrong with the packages that a capability of GPUs needs, or that there is no GPU."""
    for module in modules:
        loaded = _load(what, module, "gpu")
        if isinstance(loaded, Finding):
            return loaded
    import torch

    if not torch.cuda.is_available():
        return Finding(what, "missing", f"torch {torch.__version__} finds no CUDA device", "a CUDA GPU")
    return None


def _gpu() -> Finding:
    what = "GPU"
    missing = _gpu_packages(what, "torch")
    if missing is not None:
        return missing
    import torch

    return Finding(what, "ok", torch.cuda.get_device_name(0))


def _gpu_selection() -> Finding:
    what = "selection on a GPU"
    if kernels.why_not_viable() is None:
        how = "Triton's interpreter, for tests" if kernels.interpreting() else "Triton kernels"
        return Finding(what, "ok", f"{how}, triton {importlib.metadata.version('triton')}")
    return _instead(_gpu_packages(what, "torch", "triton"), "rows are chosen on the CPU")


def _cuda_ipc() -> Finding:
    what = "tensors GPU to GPU (cuda_ipc)"
    missing = _gpu_packages(what, "torch")
    if missing is None and (reason := cuda_ipc.why_not()) is not None:
        missing = Finding(what, "broken", reason, _short(reason))
    if missing is not None:
        return _instead(missing, "tensors on GPUs are sent through host memory")
    return Finding(what, "ok", "on this side; each pair of GPUs is probed on first use (`node.connections()`)")


def _instead(finding: Finding | None, instead: str) -> Finding:
    """The finding, with what happens without the capability."""
    assert finding is not None
    return replace(finding, because=f"{finding.because}; {instead}")


def _nixl() -> Finding:
    what = "RDMA, GPUDirect (nixl)"
    reason = nixl.why_not()
    if reason is None:
        return Finding(what, "ok", f"{nixl.describe()}; UCX chooses devices itself (docs/devices.md)")
    if not nixl.installed():
        return Finding(what, "missing", reason, _install("nixl"))
    return Finding(what, "broken", reason, _short(reason))


def _gpu_fetch() -> Finding:
    what = "batches on a GPU"
    missing = _gpu_packages(what, "torch", "triton")
    if missing is None and kernels.interpreting():
        missing = Finding(what, "missing", "TRITON_INTERPRET is set", "unset TRITON_INTERPRET")
    if missing is not None:
        return _instead(missing, "batches stay in host memory")
    known = pinning.about()
    return Finding(
        what,
        "ok",
        f"gathered from pinned segments or staged; {known['pinned_bytes'] / 1e9:.1f} GB of this host are pinned, the "
        f"limit is {known['limit_bytes'] / 1e9:.1f} GB (DeviceOptions(pin_limit_bytes=))",
    )


def collectives_within_host() -> Finding:
    """Whether ranks of one host read each other's memory, or rings alone carry their bytes, and why."""
    what = "collectives within a host"
    reason = cross_memory.why_not()
    if reason is not None:
        because = f"{reason}; all bytes between ranks of one host go through rings in shared memory"
        return Finding(what, "missing", because, "process_vm_readv; see --verbose")
    return Finding(
        what,
        "ok",
        "ranks of one user read what is gathered, exchanged or broadcast from the owner's memory (process_vm_readv); "
        "what is reduced goes through rings in shared memory, or is read from 4 MB on with four ranks or more for each "
        "core, or as GroupOptions(least_read_bytes=) says; between ranks that are denied it all goes through rings",
    )


def collectives_waits() -> Finding:
    """What a wait of collectives does where ranks share memory: busy-waits for how long, and when to say otherwise."""
    what = "waits of collectives"
    cores = _native.available_cores()
    return Finding(
        what,
        "ok",
        "between ranks of one host they poll for 50 us and then sleep, at once while others use the cores; "
        f"with more than {cores} ranks here they offer their core while they poll. For ranks that own a core "
        "each: GroupOptions(spin_us=1e6); 0 never polls",
    )


def _gloo() -> Finding:
    what = "one replay over many ranks"
    loaded = _load(what, "torch", "torch")
    if isinstance(loaded, Finding):
        return loaded
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        because = f"torch {torch.__version__} was built without torch.distributed"
        return Finding(what, "missing", because, "a torch with torch.distributed")
    if not dist.is_gloo_available():
        because = f"torch {torch.__version__} was built without Gloo, which jobs on CPUs start with"
        return Finding(what, "missing", because, "a torch with Gloo")
    missing = {name: why for name, why in viable().items() if why is not None}
    if "tcp" in missing:
        return Finding(what, "ok", f"ranks exchange messages by Gloo only: tcp: {missing['tcp']}")
    within = "TCP" if "shm" in missing else "shared memory"
    reason = f" (shared memory: {missing['shm']})" if "shm" in missing else ""
    return Finding(
        what, "ok", f"messages by {within} within a host{reason}, TCP across; torch {torch.__version__} has Gloo"
    )


def _deepspeed() -> Finding:
    what = "DeepSpeed (pipelines, ZeRO)"
    try:
        # Not imported: that takes seconds, prints a page and looks for compilers.
        return Finding(what, "ok", f"version {importlib.metadata.version('deepspeed')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(what, "missing", "deepspeed is not installed", _install("deepspeed"))


def _hosts() -> Finding:
    what = "emulated hosts (bench, tests)"
    reason = Hosts.viable()
    if reason is None:
        return Finding(what, "ok", "network namespaces, with shaped links")
    return Finding(what, "missing", reason, "root, ip and tc; see --verbose")
