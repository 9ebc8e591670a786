"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deadlines import patience

from geartrain import _native
from geartrain.transport.tls import TLS, VARIABLES

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


def why_not() -> str | None:
    """Why there can be none."""
    if shutil.which("openssl") is None:
        return "there is no openssl command to make certificates with"
    return _native.tls_not_viable() or None


class Authority:
    """Signs certificates, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._make("ca", "-addext", "basicConstraints=critical,CA:TRUE")

    def sign(self, file: str, names: str, name: str = "") -> TLS:
        """A certificate for `names`, such as "IP:127.0.0.1,DNS:learner"; peers are to show one for `name`."""
        ca = ("-CA", str(self.folder / "ca.pem"), "-CAkey", str(self.folder / "ca.key"))
        leaf = ("-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE")
        self._make(file, *ca, *leaf)
        return TLS(self.folder / f"{file}.pem", self.folder / f"{file}.key", self.folder / "ca.pem", name)

    def _make(self, file: str, *more: str) -> None:
        out = ("-keyout", str(self.folder / f"{file}.key"), "-out", str(self.folder / f"{file}.pem"))
        command = ["openssl", "req", "-x509", "-config", "/dev/null", "-subj", f"/CN={file}", *_KEY, *out, *more]
        subprocess.run(command, check=True, capture_output=True, timeout=patience(60))


def environment(tls: TLS) -> dict[str, str]:
    """What a process is started with to use it."""
    return dict(zip(VARIABLES, (str(tls.certificate), str(tls.key), str(tls.ca), tls.name), strict=True))
