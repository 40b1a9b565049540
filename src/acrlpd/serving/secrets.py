"""The files that a server keeps to itself: the key that clients must send, and the private key of its certificate."""

import ssl
import stat
from pathlib import Path


def read_api_key(path: Path) -> str:
    """The key that clients must send: the one line of a file that others cannot read."""
    _check_private(path, "--api_key_file")
    try:
        key = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api_key_file {path} cannot be read: {error}") from error
    if not key:
        raise ValueError(f"--api_key_file: {path} is empty")
    if len(key.splitlines()) > 1:
        raise ValueError(f"--api_key_file: {path} must have one line, the key; found {len(key.splitlines())}")
    return key


def create_tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What encrypts the connections: a certificate (with those that lead to its root) and its private key, as PEM."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--tls_cert", "--tls_key") if key is None else ("--tls_key", "--tls_cert")
        raise ValueError(f"{given} needs {missing}: a certificate and its private key belong together")
    _check_private(key, "--tls_key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password function OpenSSL would ask for the passphrase in the terminal.
        context.load_cert_chain(cert.expanduser(), key.expanduser(), password=lambda: "")
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise ValueError(
            f"--tls_cert {cert} and --tls_key {key} cannot be used: {error}. Expected PEM files: a certificate, and "
            "its private key without a passphrase"
        ) from error
    return context


def _check_private(path: Path, option: str) -> None:
    try:
        mode = path.expanduser().stat().st_mode
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(
            f"{option}: every user of this machine can read or write {path} (mode {stat.S_IMODE(mode):o}); "
            f"make it private with: chmod 600 {path}"
        )
