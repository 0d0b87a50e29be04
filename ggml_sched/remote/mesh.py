"""Messages between processes of one machine, over sockets in a folder that only their user can open.

Each process listens on a socket of its name, and connects to a peer when it first sends to it.  A process that sends
also receives, so that two processes that send to each other never wait for each other.  Bytes that a peer does not take
are kept, so that a process that hangs holds up no other.  No thread is needed.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from pathlib import Path

from ggml_sched.remote.messages import MAX_MESSAGE

__all__ = ["Mesh"]

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20
TAKES_WITHIN = 0.25
"""If a peer accepts no bytes for so many seconds, `send` returns; the rest of the message is sent whenever this process
waits for messages."""
AT_ONCE = 64
"""The most buffers that one system call is given to send."""


# An interrupt may come after any system call, before its result is assigned.  So that no byte is lost or sent twice,
# `list.extend(map(...))` calls and keeps the count of bytes in one step, and a `_state` is replaced as a whole.


class _Incoming:
    """A connection on which a peer sends.  `name`: the peer's name, which is its first message; empty before that."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.name = ""
        self._state: tuple[bytearray, bool, list[int]] = bytearray(LENGTH.size), True, []
        """(the array that is being filled, whether it gets the length of a message, the number of bytes that each call
        has received)."""

    def receive(self, inbox: deque[bytearray]) -> bool:
        """Receive the bytes that have arrived, and append complete messages to `inbox`; False at the end of the
        connection."""
        while True:
            target, is_length, taken = self._state
            filled = sum(taken)
            if filled < len(target):
                try:
                    taken.extend(map(self.socket.recv_into, (memoryview(target)[filled:][:PIECE],)))
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not taken[-1]:
                    return False
            elif is_length:
                size, = LENGTH.unpack(target)
                if size > MAX_MESSAGE:
                    return False
                self._state = bytearray(size), False, []
            else:
                if self.name:
                    inbox.append(target)
                else:
                    self.name = target.decode("utf-8", "replace")
                self._state = bytearray(LENGTH.size), True, []


class _Outgoing:
    """A connection to a peer, on which `name` is sent first."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_watched = False
        self._state: tuple[tuple[memoryview, ...], list[int]] = (), []
        """(the buffers to be sent, the number of bytes of them that each call has sent)."""
        self.add(name.encode())

    def add(self, message: bytes | bytearray) -> None:
        self._state = (*self.rest, memoryview(LENGTH.pack(len(message))), memoryview(message)), []

    @property
    def rest(self) -> tuple[memoryview, ...]:
        """The bytes that were not sent yet."""
        rest, sent = self._state
        n, first = sum(sent), 0
        while first < len(rest) and n >= len(rest[first]):
            n -= len(rest[first])
            first += 1
        rest = rest[first:]
        if n:
            rest = rest[0][n:], *rest[1:]
        self._state = rest, []
        return rest

    def push(self) -> None:
        """Send as many bytes as the connection takes without waiting.  OSError if it has ended."""
        while rest := self.rest:
            try:
                self._state[1].extend(map(self.socket.sendmsg, (rest[:AT_ONCE],)))
            except BlockingIOError:
                break


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
        self._outgoing: dict[str, _Outgoing] = {}
        self._watched: dict[int, str] = {}
        """{descriptor of a connection that has something left to send: its peer}."""
        self._inbox: deque[bytearray] = deque()
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def listens(self, name: str) -> bool:
        """Whether a process listens under a name."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.folder / name))
            except OSError:
                return False
            return True

    def connect(self, to: str) -> bool:
        """Connect to a peer; False if it does not listen."""
        if to not in self._outgoing:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.folder / to))
            except OSError:
                connection.close()
                return False
            self._outgoing[to] = _Outgoing(connection, self.name)
            self._push(to)
        return to in self._outgoing

    def send(self, to: str, message: bytes | bytearray) -> bool:
        """Send a message, and receive meanwhile; False if the peer is lost.

        Bytes that a peer does not take now are sent by a later `send` or `receive`.
        """
        if to in self.lost or not self.connect(to):
            self._lose(to)
            return False
        outgoing = self._outgoing[to]
        is_stuck = bool(outgoing.rest)
        outgoing.add(message)
        self._push(to)
        end = time.monotonic() + TAKES_WITHIN
        while not is_stuck and outgoing.rest and to not in self.lost and time.monotonic() < end:
            before = len(outgoing.rest), len(outgoing.rest[0])
            self._wait(max(0.0, end - time.monotonic()))
            if outgoing.rest and (len(outgoing.rest), len(outgoing.rest[0])) != before:
                end = time.monotonic() + TAKES_WITHIN
        return to not in self.lost

    def receive(self, timeout: float | None) -> bytearray | None:
        """The next message; None if none comes within `timeout` seconds (None: however long), or a connection ends."""
        end = None if timeout is None else time.monotonic() + timeout
        n_lost = len(self.lost)
        left = timeout
        while not self._inbox:
            self._wait(left)
            left = None if end is None else end - time.monotonic()
            if len(self.lost) > n_lost or left is not None and left <= 0:
                break
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self._listener.close()
        for outgoing in self._outgoing.values():
            outgoing.socket.close()
        for peer in self._incoming.values():
            peer.socket.close()
        self._outgoing, self._incoming, self._watched, self._poll = {}, {}, {}, select.poll()

    def _push(self, to: str) -> None:
        """Send a peer as many bytes as it takes without waiting, and watch for when it takes the rest."""
        outgoing = self._outgoing[to]
        try:
            outgoing.push()
        except OSError:
            self._lose(to)
            return
        if outgoing.rest and not outgoing.is_watched:
            self._watched[outgoing.socket.fileno()] = to
            self._poll.register(outgoing.socket, select.POLLOUT)
            outgoing.is_watched = True
        elif outgoing.is_watched and not outgoing.rest:
            self._unwatch(outgoing)
            outgoing.is_watched = False

    def _unwatch(self, outgoing: _Outgoing) -> None:
        if self._watched.pop(outgoing.socket.fileno(), None) is not None:
            self._poll.unregister(outgoing.socket)

    def _wait(self, timeout: float | None) -> None:
        """Wait until bytes arrive, or a peer takes bytes that were kept for it; receives them, or sends them."""
        for number, _ in self._poll.poll(None if timeout is None else max(0.0, timeout * 1000)):
            if number == self._listener.fileno():
                connection = self._listener.accept()[0]
                self._incoming[connection.fileno()] = _Incoming(connection)
                self._poll.register(connection, select.POLLIN)
            elif number in self._incoming and not self._incoming[number].receive(self._inbox):
                peer = self._incoming.pop(number)
                self._poll.unregister(peer.socket)
                peer.socket.close()
                self._lose(peer.name)
            elif number in self._watched:
                self._push(self._watched[number])

    def _lose(self, name: str) -> None:
        if name:
            self.lost.add(name)
        outgoing = self._outgoing.pop(name, None)
        if outgoing is not None:
            self._unwatch(outgoing)
            outgoing.socket.close()
