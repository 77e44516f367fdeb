"""TLS on the gateway's port: the server's context and a client's, each from --ssl-certfile and its fellows.

The launcher makes the server's once before anything starts, so that files that do not fit end the start.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings

PEM_END = "-----END CERTIFICATE-----"
REQUIREMENTS = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)
"""Values of --ssl-cert-reqs."""


class ClientFiles(NamedTuple):
    """A client's PEM files: its certificate (certfile) and key, which may be in the same file, and the authorities that
    it trusts (ca_certs). Each may be None."""

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    def check(self, scheme: str) -> None:
        """SettingsError for a file that would not be used."""
        for flag, path in zip(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"), self, strict=True):
            if path is not None and scheme != "https":
                raise SettingsError(f"{path}: the service speaks plain HTTP", flag)
        if self.keyfile is not None and self.certfile is None:
            raise SettingsError(f"{self.keyfile}: needs --ssl-certfile", "--ssl-keyfile")


def server_context(gateway: GatewaySettings) -> ssl.SSLContext | None:
    """The context of --ssl-certfile, --ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs; None without TLS. With CA
    certificates clients must have one that they signed, unless --ssl-cert-reqs says less. SettingsError for files that
    cannot be read or do not fit."""
    if gateway.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, gateway.ssl_certfile, gateway.ssl_keyfile)
    if gateway.ssl_ca_certs is not None:
        _load_authorities(context, gateway.ssl_ca_certs)
        required = gateway.ssl_cert_reqs
        context.verify_mode = ssl.CERT_REQUIRED if required is None else REQUIREMENTS[required]
    return context


def read_certificate(gateway: GatewaySettings) -> str | None:
    """The service's own certificate, as PEM; None without TLS."""
    if gateway.ssl_certfile is None:
        return None
    return Path(gateway.ssl_certfile).read_text(encoding="utf-8").partition(PEM_END)[0] + PEM_END


def client_context(certificate: str | None, files: ClientFiles = ClientFiles()) -> ssl.SSLContext:
    """A context that trusts the authorities of the files alone, if they have some; else this certificate (PEM) alone,
    under any name: that of a service on this machine, reached by its address; None: what the machine trusts. It shows
    the certificate of the files. SettingsError for files that cannot be read or do not fit."""
    context = _trusting(certificate, files.ca_certs)
    if files.certfile is not None:
        _load_certificate(context, files.certfile, files.keyfile)
    return context


def _trusting(certificate: str | None, ca_certs: str | None) -> ssl.SSLContext:
    if ca_certs is None and certificate is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_certs is not None:
        _load_authorities(context, ca_certs)
    else:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts it without its issuer
        context.load_verify_locations(cadata=certificate)
    return context


def _load_authorities(context: ssl.SSLContext, ca_certs: str) -> None:
    _check_readable(ca_certs, "--ssl-ca-certs")
    try:
        context.load_verify_locations(ca_certs)
    except ssl.SSLError as error:
        raise SettingsError(f"{ca_certs} holds no certificate in PEM", "--ssl-ca-certs") from error


def _load_certificate(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    _check_readable(certfile, "--ssl-certfile")
    if keyfile is not None:
        _check_readable(keyfile, "--ssl-keyfile")
    key, flag = (keyfile, "--ssl-keyfile") if keyfile is not None else (certfile, "--ssl-certfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certfile)
    except ssl.SSLError as error:
        raise SettingsError(f"{certfile} holds no certificate in PEM", "--ssl-certfile") from error
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except _EncryptedKeyError as error:
        raise SettingsError(f"{key} is encrypted; give a key without a password", flag) from error
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise SettingsError(f"{key} is not the key of the certificate in {certfile}", flag) from error
        raise SettingsError(f"{key} holds no private key in PEM that fits ({error.reason})", flag) from error


def _check_readable(path: str, flag: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", flag) from error


class _EncryptedKeyError(Exception):
    """The key has a password, which ssl would ask the terminal for."""


def _no_password() -> str:
    raise _EncryptedKeyError
