"""User-space network switch with delay and loss: a child process between the TAP devices of emulated hosts.

`native/testing/network_switch.cc` forwards the frames and describes a link. This module opens the devices, starts the
process and sends it requests. The devices disappear when the switch process ends, for any reason. The switch ends when
the process that started it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from geartrain.core.lifetime import on_error
from geartrain.errors import GeartrainError

#: Ethernet frames of this size keep the switch at a few tens of thousands a second.
MTU = 9000
#: Frames that a device queues for the switch.
QUEUE_FRAMES = 4000
ANSWER_S = 60.0
#: Above the processes whose frames it forwards: a late switch would emulate another network.
NICENESS = -10

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


class SwitchError(GeartrainError):
    """The switch does not start, ended, or does not answer."""


def address_of(i: int) -> str:
    """The Ethernet address of host i."""
    return f"02:67:74:00:{i >> 8:02x}:{i & 255:02x}"


def open_tap(name: str) -> int:
    """A new TAP device in the caller's network; a read of the descriptor returns a frame that it sends.

    Raises:
        OSError: there is no /dev/net/tun, or no permission.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(tap)
        raise
    return tap


class Switch:
    """A running switch. It ends with `close`, or with this process.

    Args:
        ports: descriptors of TAP devices, one for each host. The switch takes them, and they are closed in this
            process.
        rates: bytes a second to each host; 0 for no limit. The hosts' own kernels limit what they send.
        sites: the site of each host; delay and loss are between hosts of different sites.
        delay_s: one way.
        loss: loss probability of a frame.
        queue_s: the longest wait in front of the link to a host; frames that would wait longer are dropped.
        burst_bytes: bytes that an idle link passes at once.

    Raises:
        SwitchError: it does not start; carries its output.
    """

    def __init__(
        self,
        ports: Sequence[int],
        *,
        rates: Sequence[float],
        sites: Sequence[int],
        delay_s: float = 0.0,
        loss: float = 0.0,
        queue_s: float = 0.05,
        burst_bytes: int = 70_000,
        seed: int = 1,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        arguments = [list(ports), list(rates), list(sites), delay_s, loss, queue_s, burst_bytes, seed]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "geartrain.tools.testing.network_switch", json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                pass_fds=ports,
                start_new_session=True,
            )
        finally:
            for port in ports:
                os.close(port)
        with on_error(self.close):
            self._ask("counters")  # once it answers, it forwards

    def counters(self) -> dict[str, int]:
        """Bytes that arrived and were delivered; frames that queues dropped, that were lost, that failed."""
        return {str(name): int(value) for name, value in json.loads(self._ask("counters")).items()}

    def plug(self, i: int) -> None:
        """Joins host i again."""
        self._ask(f"plug {i}")

    def delay(self, delay_s: float) -> None:
        """Delays frames between sites by so much from now on, one way."""
        self._ask(f"delay {round(delay_s * 1e9)}")

    def unplug(self, i: int) -> None:
        """Disconnects host i."""
        self._ask(f"unplug {i}")

    def close(self) -> None:
        """Ends it. Idempotent."""
        process = self._process
        process.kill()
        process.wait(ANSWER_S)
        for stream in (process.stdin, process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of words that it did not live to read
                    stream.close()

    def _ask(self, words: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(words.encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError):
            raise SwitchError(f"the switch ended: {self._last_words()}") from None
        ends_s = time.monotonic() + ANSWER_S
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, ends_s - time.monotonic()))[0]:
                raise SwitchError(f"the switch did not answer {words!r} within {ANSWER_S:g} s")
            more = os.read(stdout.fileno(), 4096)
            if not more:
                raise SwitchError(f"the switch ended: {self._last_words()}")
            answer += more
        text = answer.decode().strip()
        if text.startswith("what"):
            raise SwitchError(f"the switch does not understand {words!r}")
        return text

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def main(arguments: Sequence[Any]) -> None:
    """Main function of the child."""
    import geartrain._native as _native

    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    ports, rates, sites, delay_s, loss, queue_s, burst_bytes, seed = arguments
    for port in ports:
        os.set_blocking(port, False)
    _native.run_switch(ports, rates, sites, delay_s, loss, queue_s, burst_bytes, seed, 0, 1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
