"""Certificates for tests: an authority, and what it signs, as PEM files."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LATER = datetime.datetime(2126, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Issued:
    """A certificate and its key, as files."""

    certfile: str
    keyfile: str


class Authority:
    """A CA whose files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(self._name, self._key.public_key(), is_ca=True)
        self.certfile = str(self._written(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM)))

    def issue(self, name: str, password: bytes | None = None, address: str | None = None) -> Issued:
        """A certificate for `name`, and for an IP address; its key is encrypted with the password."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), is_ca=False, address=address)
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        return Issued(
            str(self._written(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))),
            str(self._written(f"{name}.key", pem)),
        )

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool, address: str | None = None
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW)
            .not_valid_after(LATER)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _written(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(data)
        return path
