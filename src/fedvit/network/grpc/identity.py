"""The identities of both ends of a connection: certificates, keys and addresses."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from fedvit.core.errors import UserError


@dataclass(frozen=True)
class Identity:
    """This side's certificate and key, and the authority that signs the other side's certificate."""

    cert: Path
    key: Path
    ca: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the certificate, the key and the authority, after checking that they fit together."""
        try:
            self.context(server=True)
            return self.cert.read_bytes(), self.key.read_bytes(), self.ca.read_bytes()
        except ssl.SSLError as problem:
            raise UserError(
                f"{self.cert} and {self.key} are not a certificate and its key, or {self.ca} is not the certificate "
                f"of an authority ({problem.reason or problem})"
            ) from problem
        except OSError as problem:
            raise UserError(f"{problem.filename or self.cert}: {problem.strerror or problem}") from problem

    def context(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)
        context.set_alpn_protocols(["h2"])
        return context


def identity_of(
    address: str, cert: Path | None, key: Path | None, ca: Path | None, *, insecure: bool
) -> Identity | None:
    """Return the certificates, or None with `insecure`, which only loopback addresses allow."""
    host, _ = host_and_port(address)
    if insecure:
        if cert or key or ca:
            raise UserError("--insecure uses no certificates: leave out --cert, --key and --ca")
        if not _is_loopback(host):
            raise UserError(
                f"--insecure is for trials on one machine (127.0.0.1, localhost, ::1), but {host} is not one of its "
                "loopback addresses: give --cert, --key and --ca"
            )
        return None
    if cert is None or key is None or ca is None:
        raise UserError(
            "expected --cert, --key and --ca, this side's files and the other side's authority, or --insecure"
        )
    return Identity(cert, key, ca)


def host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise UserError(f"expected an address HOST:PORT, such as 127.0.0.1:8443, found {address!r}")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
