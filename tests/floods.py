"""A hostile client: many connections, opened again as soon as they are closed."""

import errno
import selectors
import socket
from threading import Event, Thread
from types import TracebackType
from typing import Self

SLOW_HEAD = b"GET /v1/me HTTP/1.1\r\nhost: localhost\r\nx-slow: "


class Flood:
    """So many connections to a port, each of which says `first` and nothing more; a thread of its own keeps them up.

    `opened` counts all that got as far as saying it.
    """

    def __init__(self, port: int, connections: int, first: bytes = SLOW_HEAD) -> None:
        self.opened = 0
        self._port = port
        self._connections = connections
        self._first = first
        self._over = Event()
        self._all_open = Event()
        self._selector = selectors.DefaultSelector()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._all_open.wait(60.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._close(key.fileobj)
        self._selector.close()

    def _run(self) -> None:
        for _ in range(self._connections):
            self._open()
        while not self._over.is_set():
            for key, mask in self._selector.select(0.1):
                if mask & selectors.EVENT_WRITE:
                    self._say(key.fileobj)
                elif not self._is_open(key.fileobj):
                    self._close(key.fileobj)
                    self._open()
            if self.opened >= self._connections:  # in the kernel, if not in the server
                self._all_open.set()

    def _open(self) -> None:
        link = socket.socket()
        link.setblocking(False)
        found = link.connect_ex(("127.0.0.1", self._port))
        assert found in {0, errno.EINPROGRESS}, errno.errorcode[found]
        self._selector.register(link, selectors.EVENT_WRITE)

    def _say(self, link: object) -> None:
        assert isinstance(link, socket.socket)
        try:
            link.send(self._first)
        except OSError:
            self._close(link)
            self._open()
            return
        self.opened += 1
        self._selector.modify(link, selectors.EVENT_READ)

    @staticmethod
    def _is_open(link: object) -> bool:
        assert isinstance(link, socket.socket)
        try:
            return bool(link.recv(1 << 12))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _close(self, link: object) -> None:
        assert isinstance(link, socket.socket)
        self._selector.unregister(link)
        link.close()
