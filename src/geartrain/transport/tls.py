"""TLS options: the certificate, key and certificate authority of a process (native/transport/security/tls.h)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from geartrain.core.arguments import check_path, check_text
from geartrain.errors import ArgumentError

#: Environment variables of `TLS`, in the order of its fields; the last one is optional.
VARIABLES = ("GEARTRAIN_TLS_CERT", "GEARTRAIN_TLS_KEY", "GEARTRAIN_TLS_CA", "GEARTRAIN_TLS_NAME")


@dataclass(frozen=True)
class TLS:
    """PEM files for mutual TLS 1.3: each side shows a certificate that `ca` signed.

    Args:
        certificate: this side's, followed by intermediate certificates, if there are any.
        key: the certificate's, not encrypted.
        ca: the authority that signs the certificates of peers.
        name: that peers' certificates must be for, in both directions. Without one, the connecting side checks for the
            host that it connected to, and the listening side accepts every certificate of `ca`. No wildcards.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    name: str = ""

    @staticmethod
    def of_environment() -> TLS | None:
        """From GEARTRAIN_TLS_CERT, _KEY, _CA and optionally _NAME; None where none of them is set.

        Raises:
            ArgumentError: only some of them are set.
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
        """Options of the native layer. Raises `ArgumentError` for what is no path, or no name."""
        return {
            "tls_certificate": str(check_path("the certificate of TLS", self.certificate)),
            "tls_key": str(check_path("the key of TLS", self.key)),
            "tls_ca": str(check_path("the authority of TLS", self.ca)),
            "tls_name": check_text("the name of TLS", self.name, empty=True),
        }
