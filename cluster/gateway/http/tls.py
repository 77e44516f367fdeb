"""TLS on the gateway's port: the server's context from --ssl-certfile and its fellows, and one for clients on this
machine.

The launcher makes the server's once before anything starts, so that files that do not fit end the start.
"""

import ssl
from pathlib import Path

from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings

PEM_END = "-----END CERTIFICATE-----"


def server_context(gateway: GatewaySettings) -> ssl.SSLContext | None:
    """The context of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs; None without TLS. With CA certificates clients
    must have one that they signed. SettingsError for files that cannot be read or do not fit."""
    if gateway.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, gateway.ssl_certfile, gateway.ssl_keyfile)
    if gateway.ssl_ca_certs is not None:
        _check_readable(gateway.ssl_ca_certs, "--ssl-ca-certs")
        try:
            context.load_verify_locations(gateway.ssl_ca_certs)
        except ssl.SSLError as error:
            raise SettingsError(f"{gateway.ssl_ca_certs} holds no certificate in PEM", "--ssl-ca-certs") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def read_certificate(gateway: GatewaySettings) -> str | None:
    """The service's own certificate, as PEM; None without TLS."""
    if gateway.ssl_certfile is None:
        return None
    return Path(gateway.ssl_certfile).read_text(encoding="utf-8").partition(PEM_END)[0] + PEM_END


def client_context(certificate: str | None) -> ssl.SSLContext:
    """A context that trusts this certificate (PEM) alone, under any name: that of a service on this machine, reached by
    its address. None: one that trusts what the machine trusts."""
    if certificate is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts it without its issuer
    context.load_verify_locations(cadata=certificate)
    return context


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
