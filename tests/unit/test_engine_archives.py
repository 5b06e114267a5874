"""Archives that clients upload: bounded for each tenant, however many are on their way."""

import base64
import hashlib
from pathlib import Path

import pytest

from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.server.shipped_archives import ShippedArchives
from poise.service.wire.views import FilePiece, FileReceived

SIZE = 1000


def send(archives: ShippedArchives, text: bytes, offset: int, end: int, tenant: str = "t") -> FileReceived:
    """Send a piece of an archive."""
    piece = FilePiece(offset=offset, total=len(text), data=base64.b64encode(text[offset:end]).decode())
    return archives.receive(tenant, hashlib.sha256(text).hexdigest(), piece, set)


def test_tenant_cannot_begin_many_archives_and_let_all_of_them_grow(tmp_path: Path) -> None:
    archives = ShippedArchives(tmp_path, most=SIZE, tenant_most=2 * SIZE)
    texts = [bytes([number]) * SIZE for number in range(10)]
    for text in texts:
        assert send(archives, text, 0, 1) == FileReceived(received=1, complete=False)
    assert send(archives, texts[0], 1, SIZE).complete
    for text in texts[1:]:
        with pytest.raises(RequestRefusedError) as refused:
            send(archives, text, 1, SIZE)
        assert refused.value.fault is RefusalCode.QUOTA
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) <= 2 * SIZE


def test_what_one_tenant_keeps_is_no_concern_of_another(tmp_path: Path) -> None:
    archives = ShippedArchives(tmp_path, most=SIZE, tenant_most=SIZE)
    assert send(archives, b"x" * SIZE, 0, SIZE).complete
    with pytest.raises(RequestRefusedError, match="tenant t keeps"):
        send(archives, b"y" * SIZE, 0, SIZE)
    assert send(archives, b"y" * SIZE, 0, SIZE, tenant="other").complete
