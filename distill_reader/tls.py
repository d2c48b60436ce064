"""TLS of clients: certificates are checked, and errors of it name the remedy."""

import socket
import ssl

from distill_reader.errors import UsageError

_MISMATCHES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_OUT_OF_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that checks certificates.

    Args:
        ca_file: certificates in PEM to check against; None: those of the system.

    Raises:
        UsageError: the file cannot be read, or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise UsageError(f"ca_file: {ca_file}: {error}; expected certificates in PEM") from error


def trusted_certificates(context: ssl.SSLContext) -> bytes | None:
    """Return the certificates that a context checks against, in PEM; None: unknown."""
    found = context.get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode() or None


def start_tls(
    sock: socket.socket, context: ssl.SSLContext, name: str, endpoint: str
) -> ssl.SSLSocket:
    """Return a connected socket that speaks TLS from here on. It owns `sock`.

    Args:
        name: whose certificate is expected.
        endpoint: for errors.

    Raises:
        UsageError: it is another's certificate, of an authority that is not trusted, or no TLS.
        OSError: the connection ended, or took too long.
    """
    try:
        return context.wrap_socket(sock, server_hostname=name)
    except ssl.SSLError as error:
        if (meaning := meaning_of(error, name, endpoint)) is not None:
            raise meaning from error
        raise


def meaning_of(error: BaseException, name: str, endpoint: str) -> UsageError | None:
    """Return what is wrong about a server's certificate or protocol; None: something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
        if error.verify_code in _MISMATCHES:
            remedy = (
                "use a name that the certificate has, in the endpoint or as the header Host "
                "(set_teacher_access)"
            )
        elif error.verify_code in _OUT_OF_TIME:
            remedy = (
                "renew it there, or its authority's (here: set_teacher_access(ca_file=...), edl "
                "register --ca_file), or set this host's clock"
            )
        else:
            remedy = (
                "if an authority of your own has signed it, name that one's certificate: "
                "set_teacher_access(ca_file=...), edl register --ca_file"
            )
        return UsageError(
            f"{endpoint}: its certificate is not trusted as {name}: {reason}; {remedy}"
        )
    if isinstance(error, ssl.SSLError) and error.reason in (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
    ):
        return UsageError(
            f"{endpoint}: no TLS is spoken there ({error.reason}): use http:// or grpc://, or the "
            "ingress's port for TLS"
        )
    return None
