"""Files of a tar archive, in one pass over a stream that cannot go back.

The standard library reads the headers; this sees to it that no header makes it read a gigabyte into memory, and that
a damaged header is an error: by itself the library takes one in the middle of an archive for its end.
"""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

_MOST_READ = 1 << 20
_MOST_PADDING = 1 << 24
_CHUNK = 1 << 16


def members(stream: BinaryIO, most: int) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of every plain file, in order; content is good until the next one. TarError if damaged."""
    tape = _Tape(stream)
    with _headers():
        archive = tarfile.TarFile(fileobj=cast(BinaryIO, tape), mode="r")
    for _ in range(most):
        with _headers():
            header = archive.next()
        if header is None:
            tape.check_end()
            return
        content = archive.extractfile(header) if header.isreg() else None
        if content is not None:
            yield header.name, cast(BinaryIO, content)
    raise tarfile.ReadError(f"more than {most:,} entries")


@contextmanager
def _headers() -> Iterator[None]:
    """The library lets numbers it cannot read in a header escape as they are."""
    try:
        yield
    except (ValueError, OverflowError) as problem:
        raise tarfile.ReadError(f"bad header ({problem})") from None


class _Tape:
    """As much of a file as the library needs of one: it reads, and seeks forward only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0
        self._last = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise tarfile.ReadError("an entry begins before the end of the one in front of it")
        while self._position < position:
            skipped = len(self._stream.read(min(_CHUNK, position - self._position)))
            if not skipped:
                break
            self._position += skipped
        return self._position

    def read(self, size: int) -> bytes:
        if size > _MOST_READ:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self._last = self._stream.read(size)
        self._position += len(self._last)
        return self._last

    def check_end(self) -> None:
        """An archive ends with a block of zeros; reading on to the end of the stream checks its checksum too."""
        if len(self._last) != tarfile.BLOCKSIZE or self._last.strip(b"\0"):
            raise tarfile.ReadError("an entry's header is broken, or the end is missing")
        self.seek(self._position + _MOST_PADDING)
