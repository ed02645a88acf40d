"""Certificates and node keys for tests of a SuperLink without a gate."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Who signs."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    file: Path


def new_authority(folder: Path, name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = blank(subject, subject, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    certificate = builder.sign(key, hashes.SHA384())
    file = folder / f"{name}.crt"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(key, certificate, file)


def certify(folder: Path, name: str, by: Authority) -> tuple[Path, Path]:
    """A certificate for a host of this name on loopback, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        blank(subject, by.certificate.subject, key).add_extension(names, critical=False).sign(by.key, hashes.SHA384())
    )
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(private(key, serialization.PrivateFormat.PKCS8))
    return files


def blank(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )


def node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A SuperNode's private and public key, as `ssh-keygen -t ecdsa -b 384` writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    files = folder / name, folder / f"{name}.pub"
    files[0].write_bytes(private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    files[1].write_bytes(public + b"\n")
    return files


def private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
