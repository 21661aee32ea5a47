"""Make the certificate by which the processes of a local Ray authenticate each other.

Some of Ray's ports execute code that they are sent, and one port of each replica listens on every interface. With
mutual TLS, only processes that have the key can connect. It is made at the start and never leaves the folder.
"""

import datetime
import ipaddress
from pathlib import Path

VALID = datetime.timedelta(days=3650)


def write_certificate(folder: Path) -> dict[str, str]:
    """Write a self-signed certificate for this machine and its key; return Ray's environment variables for them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lorasrv")])
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = {"key": folder / "key.pem", "certificate": folder / "certificate.pem"}
    paths["key"].touch(mode=0o600)
    paths["key"].write_bytes(private)
    paths["certificate"].write_bytes(certificate.public_bytes(pem))
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(paths["certificate"]),
        "RAY_TLS_SERVER_KEY": str(paths["key"]),
        "RAY_TLS_CA_CERT": str(paths["certificate"]),
    }
