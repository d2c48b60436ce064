"""An authority of one's own, and the certificate of a server."""

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """Certificates of one's own, and a server's certificate for `localhost` and `teachers.test`."""

    ca_file: str
    chain_file: str
    key_file: str

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain_file, self.key_file)
        return context

    def credentials(self) -> grpc.ServerCredentials:
        pair = Path(self.key_file).read_bytes(), Path(self.chain_file).read_bytes()
        return grpc.ssl_server_credentials([pair])


def make_authority(folder: Path, *, is_over: bool = False) -> Authority:
    """`is_over`: the server's certificate has expired."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of a test")])

    def builder(name: x509.Name, public_key: Any, hours: int = 24) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(hours=hours))
            .add_extension(  # Python 3.13 wants it, as the two of the authority
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
        )

    signs = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip

    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .add_extension(signs, critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.DNSName("teachers.test")]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "teachers.test")])
    server = (
        builder(subject, key.public_key(), -1 if is_over else 24)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = {
        "ca.pem": ca.public_bytes(pem),
        "server.pem": server.public_bytes(pem),
        "key.pem": key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Authority(*(str(folder / name) for name in files))
