"""TLS of workers and server: the server's certificate, given or made here, and how a worker checks it. No torch."""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError

_DAYS = "3650"


@dataclass(frozen=True)
class Tls:
    """A TLS context and a fingerprint: of the server's certificate, or the one that a worker requires."""

    context: ssl.SSLContext
    fingerprint: str | None = None


def fingerprint(certificate: bytes) -> str:
    """The SHA-256 fingerprint of a certificate in DER form.

    >>> fingerprint(b"")
    'sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def server_tls(certificate: Path, key: Path) -> Tls:
    """Load a server's certificate and key from PEM files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # workers do not resume TLS sessions, and expect nothing but frames
    try:
        context.load_cert_chain(certificate, key)
        text = certificate.read_text()
        start = text.index(ssl.PEM_HEADER)  # a chain begins with the server's own certificate
        der = ssl.PEM_cert_to_DER_cert(text[start : text.index(ssl.PEM_FOOTER, start) + len(ssl.PEM_FOOTER)])
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise UserError(f"TLS: {certificate} and {key} are not a certificate and its key ({reason})") from None
    return Tls(context, fingerprint(der))


def make_certificate(folder: Path, name: str = "paceline") -> tuple[Path, Path]:
    """Create a key and a self-signed certificate with the command openssl, unless the folder has them already."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    if certificate.exists() and key.exists():
        return certificate, key
    if shutil.which("openssl") is None:
        raise UserError("TLS: the command openssl is not here: install it, or give your own certificate and key")
    folder.mkdir(parents=True, exist_ok=True)
    key.touch(mode=0o600)
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(key), "-out", str(certificate), "-days", _DAYS, "-subj", f"/CN={name}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"TLS: openssl made no certificate in {folder} ({last})")
    return certificate, key


def worker_tls(expected: str | None = None, authorities: Path | None = None) -> Tls:
    """Require a fingerprint, or a certificate that `authorities` signed for the server's name.

    With neither, the token protects the connection: both ends include the certificate in their proofs, so a man in the
    middle cannot use another one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if authorities is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return Tls(context, normal_fingerprint(expected) if expected is not None else None)
    try:
        context.load_verify_locations(authorities)
    except (OSError, ValueError) as error:
        raise UserError(f"TLS: {authorities} holds no certificates of authorities ({error})") from None
    return Tls(context)


def normal_fingerprint(text: str) -> str:
    """Convert a fingerprint to the form of `fingerprint`; colons and capitals are allowed.

    >>> normal_fingerprint("SHA256:" + "AB:" * 31 + "AB") == "sha256:" + 32 * "ab"
    True
    """
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise UserError(f"TLS: fingerprint '{text}': write sha256: and the 64 digits that the server showed")
    return f"sha256:{digits}"
