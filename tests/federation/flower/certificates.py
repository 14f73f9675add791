# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys of a federation on this machine, valid for a day."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

CURVE = ec.SECP384R1()
Key = ec.EllipticCurvePrivateKey


def made(folder: Path, *nodes: str) -> Path:
    """Writes ``ca.pem``, ``host.pem``, ``host.key``, and two files ``<node>`` and ``<node>.pub`` per SuperNode."""
    folder.mkdir()
    authority, host = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    (folder / "ca.pem").write_bytes(certificate("test authority", authority, authority, is_authority=True))
    (folder / "host.pem").write_bytes(certificate("localhost", host, authority, is_authority=False))
    (folder / "host.key").write_bytes(host.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for node in nodes:
        key = ec.generate_private_key(CURVE)
        (folder / node).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (folder / f"{node}.pub").write_bytes(public)
    return folder


def certificate(name: str, key: Key, issuer: Key, is_authority: bool) -> bytes:
    """A certificate for a key, signed by the authority's."""
    now = datetime.now(timezone.utc)
    places = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder()
        .subject_name(called(name))
        .issuer_name(called("test authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
    )
    return built.sign(issuer, SHA256()).public_bytes(Encoding.PEM)


def called(name: str) -> x509.Name:
    """The name of a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
