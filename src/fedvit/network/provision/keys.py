"""Certificates for a study's server, and keys with which its sites sign their requests."""

import base64
import datetime
import hashlib
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedvit.core.errors import UserError

VALID = datetime.timedelta(days=5 * 365)
LOCAL = "localhost"  # the name under which the proxy checks the SuperLink beside it
LONGEST_PUBLIC_KEY = 2000  # bytes
PEM = serialization.Encoding.PEM


def write_certificates(folder: Path, study: str, host: str) -> None:
    """Write ca.crt, ca.key, server.crt and server.key for a server that sites reach under this name or IP address."""
    authority, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"FedViT study {study}"[:64])])
    root = (
        _blank(issuer, issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    names = [_name_of(host), x509.DNSName(LOCAL), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = (
        _blank(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])]), issuer, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    for name, certificate, secret in (("ca", root, authority), ("server", server, key)):
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(PEM))
        write_secret(folder / f"{name}.key", _private(secret, serialization.PrivateFormat.PKCS8))


def _blank(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # for a site whose clock is behind
        .not_valid_after(now + VALID)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def write_secret(file: Path, content: bytes) -> None:
    """Write a new file that only its owner can read at any moment."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)


def write_node_key(private: Path, public: Path, name: str) -> None:
    """Write a new key pair for the SuperNode of this site, as `ssh-keygen -t ecdsa -b 384` would."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, _private(key, serialization.PrivateFormat.OpenSSH))
    shown = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_text(f"{shown.decode()} {name}\n")


def read_public_key(file: Path) -> tuple[str, str, str]:
    """Return the text of a site's public key, the name of the site and the key's fingerprint."""
    try:
        content = file.read_bytes()[: LONGEST_PUBLIC_KEY + 1]
        kind, blob, name = content.decode("ascii").split()
        key = serialization.load_ssh_public_key(f"{kind} {blob}".encode())
    except OSError as problem:
        raise UserError(f"{file} cannot be read: {problem.strerror}") from problem
    except (ValueError, UnsupportedAlgorithm) as problem:
        raise UserError(
            f"{file} is not the public key of a site: expected the file NAME.pub that `fedvit provision --site` wrote"
        ) from problem
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(f"{file}: expected an ECDSA key on the curve P-384, found {kind}")
    return f"{kind} {blob}", name, ssh_fingerprint(blob)


def ssh_fingerprint(blob: str) -> str:
    """Return the fingerprint of a public key as `ssh-keygen -lf` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(blob)).digest()).decode().rstrip("=")


def certificate_fingerprint(file: Path) -> str:
    """Return the fingerprint of a certificate as `openssl x509 -noout -fingerprint -sha256` prints it."""
    return x509.load_pem_x509_certificate(file.read_bytes()).fingerprint(hashes.SHA256()).hex(":").upper()
