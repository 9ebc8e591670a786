"""TLS options: the certificate, private key and certificate authority of a process.

native/transport/security/tls.h implements TLS for connections.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from geartrain.core.arguments import check_path, check_text, check_whole, optional
from geartrain.errors import ArgumentError

#: Environment variables of `TLS`, in the order of its fields; the last one is optional.
VARIABLES = ("GEARTRAIN_TLS_CERT", "GEARTRAIN_TLS_KEY", "GEARTRAIN_TLS_CA", "GEARTRAIN_TLS_NAME")
#: Upper limit: a connection has no more lanes.
MOST_THREADS = 16


@dataclass(frozen=True)
class TLS:
    """PEM files for mutual TLS 1.3: each side shows a certificate that `ca` signed.

    Args:
        certificate: this side's certificate, followed by intermediate ones if there are any.
        key: private key of the certificate, not encrypted.
        ca: authority that signs the certificates of peers.
        name: name that peers' certificates must have, in both directions; no wildcards. By default the connecting side
            checks for the host that it connected to, and the listening side accepts every certificate of `ca`.
        threads: threads that encrypt or decrypt the lanes of a connection (messages of 1.25 MiB and more), 1 to 16.
            None: one for each 2.5 MB of a message, up to half of the cores.

    Examples:
        >>> tls = TLS("node.pem", "node.key", "ca.pem")  # for listen(..., tls=tls) and connect(..., tls=tls)
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    name: str = ""
    threads: int | None = None

    @staticmethod
    def of_environment() -> TLS | None:
        """Reads GEARTRAIN_TLS_CERT, _KEY, _CA, and optionally _NAME.

        Returns:
            The files; None if none of the first three is set.

        Raises:
            ArgumentError: only some of the first three are set.
        """
        values = [os.environ.get(name, "") for name in VARIABLES]
        if not any(values):
            return None
        missing = [name for name, value in zip(VARIABLES[:3], values, strict=False) if not value]
        if missing:
            raise ArgumentError(
                f"TLS needs a certificate, its key and the peers' authority; {', '.join(missing)} is not set"
            )
        certificate, key, ca, name = values
        return TLS(certificate, key, ca, name)

    def options(self) -> dict[str, Any]:
        """Internal: options of the native layer.

        Raises:
            ArgumentError: a path, the name or the number of threads is invalid.
        """
        return {
            "tls_certificate": str(check_path("the certificate of TLS", self.certificate)),
            "tls_key": str(check_path("the key of TLS", self.key)),
            "tls_ca": str(check_path("the authority of TLS", self.ca)),
            "tls_name": check_text("the name of TLS", self.name, empty=True),
            "tls_threads": optional(check_whole, "the threads of TLS", self.threads, 1, MOST_THREADS) or 0,
        }
