"""Certificates for tests, made by openssl: an authority, and those it signs."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """PEM files. `authority` signed the server's and the client's certificates."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make certificates for 127.0.0.1, valid for a day."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: nothing makes certificates here")
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]

    def make(name: str, *options: str) -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        command = [*request, "-subj", f"/CN={name}", "-out", str(certificate), "-keyout", str(key), *options]
        subprocess.run(command, check=True, capture_output=True)
        return certificate, key

    authority, authority_key = make("authority", "-addext", "keyUsage=critical,keyCertSign")
    signed = ["-CA", str(authority), "-CAkey", str(authority_key), "-addext", "basicConstraints=critical,CA:FALSE"]
    server, server_key = make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    client, client_key = make("client", *signed)
    return Certificates(authority, server, server_key, client, client_key)
