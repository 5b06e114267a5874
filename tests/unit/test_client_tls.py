"""Which certificates of a server a client and an agent believe, given a file."""

import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from poise.scheduler.model.errors import RequestError
from poise.service.client.connection import tls_context


@pytest.fixture
def issued(tmp_path: Path) -> Path:
    """A folder with a certificate of an authority, `leaf.crt`, its key, and the authority's own, `ca.crt`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (tmp_path / "names").write_text("subjectAltName=DNS:poise.test\nbasicConstraints=CA:FALSE\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for words in (
        ("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority"),
        ("req", *key, "-keyout", "leaf.key", "-out", "leaf.csr", "-subj", "/CN=poise.test"),
        ("x509", "-req", "-in", "leaf.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names",
         "-out", "leaf.crt"),
    ):  # fmt: skip
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return tmp_path


def believes(issued: Path, trusted: str, host: str) -> bool:
    """Shake hands in memory; say whether the client believes the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued / "leaf.crt", issued / "leaf.key")
    trusting = tls_context(issued / trusted)
    assert isinstance(trusting, ssl.SSLContext)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(up, down, server_side=True)
    client = trusting.wrap_bio(down, up, server_hostname=host)
    try:
        for _ in range(2):
            for each in (client, server):
                with suppress(ssl.SSLWantReadError):
                    each.do_handshake()
    except ssl.SSLError:
        return False
    return client.version() is not None


@pytest.mark.parametrize("trusted", ["leaf.crt", "ca.crt"])
def test_a_server_s_own_certificate_or_its_authority_s_is_believed_for_its_name_alone(issued: Path, trusted: str) -> None:
    assert believes(issued, trusted, "poise.test")
    assert not believes(issued, trusted, "elsewhere.test")


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no certificates can be read from it"):
        tls_context(tmp_path / "none.pem")
