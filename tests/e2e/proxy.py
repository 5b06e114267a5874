"""A TCP proxy between agents and the server that can hold, slow down and break connections."""

import selectors
import socket
import threading
from contextlib import suppress
from time import monotonic

CHUNK = 1 << 16


class Proxy:
    """Passes bytes between those who connect to `url` and the target. All settings may be changed at any time.

    is_held        nothing gets through, and nothing is closed: a connection that leads nowhere
    delay          seconds that each piece takes
    breaks_after   of so many answers, the last is not passed on: the connection is closed instead, after the server has done
                   what it was asked for; 0: all are
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._door = socket.create_server((host, 0))
        self.url = f"http://{host}:{self._door.getsockname()[1]}"
        self.is_held = False
        self.delay = 0.0
        self.breaks_after = 0
        self.broken = 0
        self._answers = 0
        self._is_closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            with suppress(OSError):
                near = self._door.accept()[0]
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(self._target) as far, selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._is_closed:
                for key, _ in [] if self.is_held else selector.select(0.05):
                    assert isinstance(key.fileobj, socket.socket)
                    piece = key.fileobj.recv(CHUNK)
                    if not piece or (key.fileobj is far and self._breaks()) or not self._wait():
                        return
                    key.data.sendall(piece)
                if self.is_held:
                    self._pause(0.05)

    def _breaks(self) -> bool:
        with self._lock:
            self._answers += 1
            if not self.breaks_after or self._answers % self.breaks_after:
                return False
            self.broken += 1
            return True

    def _wait(self) -> bool:
        """Wait as long as a piece takes, and for as long as everything is held."""
        due = monotonic() + self.delay
        while not self._is_closed and (self.is_held or monotonic() < due):
            self._pause(min(0.05, max(0.0, due - monotonic())) or 0.05)
        return not self._is_closed

    def _pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def close(self) -> None:
        """Break all connections, and take no more."""
        self._is_closed = True
        self._door.close()
