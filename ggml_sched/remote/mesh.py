"""Messages between processes of one machine, over sockets in a folder that only their user can open.

Each process listens on a socket of its name, and connects to a peer when it first sends to it.  A process that sends
also receives, so that two processes that send to each other never wait for each other.  No thread is needed.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from pathlib import Path

__all__ = ["Mesh"]

LENGTH = struct.Struct("<Q")
MAX_MESSAGE = 1 << 34
PIECE = 1 << 20


class _Incoming:
    """A connection of a peer that sends: `name` is that in its first message, and empty before."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.name = ""
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0

    def receive(self, inbox: deque[bytearray]) -> bool:
        """Take what has come, complete messages into `inbox`; False at the end of the connection."""
        while True:
            try:
                if self._body is None:
                    given = self.socket.recv(LENGTH.size - len(self._head))
                    self._head += given
                    n = len(given)
                    if len(self._head) == LENGTH.size:
                        size, = LENGTH.unpack(self._head)
                        if size > MAX_MESSAGE:
                            return False
                        self._head, self._body, self._filled = bytearray(), bytearray(size), 0
                else:
                    n = self.socket.recv_into(memoryview(self._body)[self._filled :][:PIECE])
                    self._filled += n
            except BlockingIOError:
                return True
            except OSError:
                return False
            if self._body is not None and self._filled == len(self._body):
                if self.name:
                    inbox.append(self._body)
                else:
                    self.name = bytes(self._body).decode("utf-8", "replace")
                self._body = None
            elif n == 0:
                return False


class Mesh:
    """The connections of the process `name`.  `lost`: names of peers whose connection has ended.

    `folder` holds a socket for each process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name: str = name
        self.folder: Path = folder
        self.lost: set[str] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / name))
        self._listener.listen()
        self._listener.setblocking(False)
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[str, socket.socket] = {}
        self._inbox: deque[bytearray] = deque()
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def connect(self, to: str) -> bool:
        """Connect to a peer; False if it does not listen."""
        if to not in self._outgoing:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.folder / to))
            except OSError:
                connection.close()
                return False
            connection.setblocking(False)
            self._outgoing[to] = connection
            self.send(to, self.name.encode())
        return True

    def send(self, to: str, message: bytes | bytearray) -> bool:
        """Send a message, and receive meanwhile; False if the peer is lost."""
        if to in self.lost or not self.connect(to):
            self._lose(to)
            return False
        rest: deque[memoryview] = deque((memoryview(LENGTH.pack(len(message))), memoryview(message)))
        while rest:
            try:
                n = self._outgoing[to].sendmsg(rest)
            except BlockingIOError:
                self._wait(None, self._outgoing[to])
                if to in self.lost:
                    return False
                continue
            except OSError:
                self._lose(to)
                return False
            while rest and n >= len(rest[0]):
                n -= len(rest.popleft())
            if n:
                rest[0] = rest[0][n:]
        return True

    def receive(self, timeout: float | None) -> bytearray | None:
        """The next message; None if none comes within `timeout` seconds (None: however long), or a connection ends."""
        if not self._inbox:
            self._wait(timeout)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self._listener.close()
        for end in (*self._outgoing.values(), *(peer.socket for peer in self._incoming.values())):
            end.close()
        self._outgoing, self._incoming = {}, {}

    def _wait(self, timeout: float | None, writing: socket.socket | None = None) -> None:
        """Wait until something has come, or can be written."""
        if writing is not None:
            self._poll.register(writing, select.POLLOUT)
        try:
            ready = self._poll.poll(None if timeout is None else max(0.0, timeout * 1000))
        finally:
            if writing is not None:
                self._poll.unregister(writing)
        for number, _ in ready:
            if number == self._listener.fileno():
                connection = self._listener.accept()[0]
                self._incoming[connection.fileno()] = _Incoming(connection)
                self._poll.register(connection, select.POLLIN)
            elif number in self._incoming and not self._incoming[number].receive(self._inbox):
                peer = self._incoming.pop(number)
                self._poll.unregister(peer.socket)
                peer.socket.close()
                self._lose(peer.name)

    def _lose(self, name: str) -> None:
        if name:
            self.lost.add(name)
        end = self._outgoing.pop(name, None)
        if end is not None:
            end.close()
