"""A certificate for `localhost` that nobody else has signed, for tests of TLS."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

LONG = 180.0
_WISH = """[req]
distinguished_name = whose
x509_extensions = more
prompt = no
[whose]
CN = localhost
[more]
subjectAltName = DNS:localhost
basicConstraints = critical, CA:TRUE
"""
"""A configuration of its own: that of the machine may be missing."""


def a_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of the certificate and of its key; the test is skipped where nothing can make them."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    action, chain, key = folder / "action.cnf", folder / "cert.pem", folder / "key.pem"
    action.write_text(_WISH)
    words = f"req -x509 -config {action} -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {chain}"
    subprocess.run([openssl, *words.split()], check=True, capture_output=True, timeout=LONG)
    return chain, key
