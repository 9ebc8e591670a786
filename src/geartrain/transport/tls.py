"""What a process shows and trusts where its connections over TCP are to be under TLS
(native/transport/security/tls.h)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from geartrain.errors import ArgumentError

#: The environment's names for `TLS`, in the order of its fields; the last one may be missing.
VARIABLES = ("GEARTRAIN_TLS_CERT", "GEARTRAIN_TLS_KEY", "GEARTRAIN_TLS_CA", "GEARTRAIN_TLS_NAME")


@dataclass(frozen=True)
class TLS:
    """PEM files: TLS 1.3, in which both sides show a certificate that `ca` signed.

    Args:
        certificate: this side's; with the authorities between it and `ca` after it, if there are any.
        key: the certificate's, not encrypted.
        ca: whoever signs the certificates of peers.
        name: what peers' certificates must be for, both ways. Without one, the side that connects checks for the host
            that it dialled, and the side that listens takes every certificate of `ca`. No wildcards.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    name: str = ""

    @staticmethod
    def of_environment() -> TLS | None:
        """That of GEARTRAIN_TLS_CERT, _KEY, _CA and, if it is to be, _NAME; None without.

        Raises:
            ArgumentError: some are set, and others are not.
        """
        values = [os.environ.get(name, "") for name in VARIABLES]
        if not any(values):
            return None
        missing = [name for name, value in zip(VARIABLES[:3], values, strict=False) if not value]
        if missing:
            raise ArgumentError(
                f"TLS needs a certificate, its key and the peers' authority; {', '.join(missing)} is not set"
            )
        return TLS(*values)

    def options(self) -> dict[str, str]:
        """What the native layer wants to know."""
        return {
            "tls_certificate": str(Path(self.certificate)),
            "tls_key": str(Path(self.key)),
            "tls_ca": str(Path(self.ca)),
            "tls_name": self.name,
        }
