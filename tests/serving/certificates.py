"""Certificates for tests: an authority that nobody trusts but the test, and files as `acrlpd serve` reads them."""

import dataclasses
import ssl
from pathlib import Path

import trustme


@dataclasses.dataclass(frozen=True)
class Certificates:
    """The files of a server at 127.0.0.1, and the authority that its clients must trust."""

    cert: Path
    key: Path
    authority: Path

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority))


def make_certificates(folder: Path) -> Certificates:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = Certificates(folder / "cert.pem", folder / "key.pem", folder / "authority.pem")
    authority.cert_pem.write_to_path(str(files.authority))
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(str(files.cert), append=number > 0)
    issued.private_key_pem.write_to_path(str(files.key))
    files.key.chmod(0o600)
    return files
