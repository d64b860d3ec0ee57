"""Processes that share a run end together: where one is gone, the others stop with its error.

Without this they would wait for it in their next common sum, until a library's timeout. Every process holds one
connection to the main one, which breaks when either of them dies, whatever of: the system closes it. What ended a
process is sent through it first, where there is time for that.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dmx.errors import RunError
from dmx.processes import Processes

CONNECTING = 120.0
"""Seconds for all to connect."""
GRACE = 10.0
"""Seconds in which a process that waits for one that is gone may end by itself, and a checkpoint be finished."""
KNOWING = 3.0
"""Seconds in which word of a lost process comes after the error that its loss makes elsewhere."""


class LostProcess(RunError):
    """Another process of the run has ended before its time; this was said as soon as it was known."""


class Watch:
    """The connections of one process; `leave` ends it. Alone there is nothing to watch.

    Args:
        say: told at once, in a thread of its own, as a launcher may end this process next.
    """

    def __init__(self, processes: Processes, say: Callable[[LostProcess], None]) -> None:
        self.rank, self.size, self.say = processes.rank, processes.size, say
        self.lost: LostProcess | None = None
        self._one_at_a_time = threading.Lock()
        self._said, self._left = threading.Event(), threading.Event()
        self._peers: list[_Peer] = []
        if self.size == 1:
            return
        server = socket.create_server(("", 0)) if processes.is_main else None
        port, token = processes.agree(
            lambda: (server.getsockname()[1] if server else 0, secrets.token_hex(16))
        )
        self._peers = (
            [_called(port, token, self.rank)] if server is None else _met(server, token, self.size)
        )
        for peer in self._peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    def _listen(self, peer: "_Peer") -> None:
        word = peer.hear()
        if word.get("done"):
            return
        if "gone" in word:  # the main process passes on what it heard of another, and has said it
            cause = word["gone"]
        elif "error" in word:
            # Often all are about to say the same, and what has to be mended first does not go on by itself.
            said = word["error"].removesuffix(".")
            cause = (
                f"{peer.place(self.size)} stopped: {said}. All processes of the run end with it."
            )
        else:
            cause = (
                f"{peer.place(self.size)} is gone without a word: killed, or its machine is out of memory. "
                "All processes of the run end; the same command goes on from its last checkpoint."
            )
        with self._one_at_a_time:
            if self.lost is not None or self._left.is_set():
                return
            self.lost = LostProcess(cause)
        if "gone" not in word:
            # Before the others end of it, and a launcher then this process. A folder that cannot be written must not
            # keep it alive.
            with suppress(RunError):
                self.say(self.lost)
        if self.rank == 0:
            for other in self._peers:
                other.say(gone=cause)
        self._said.set()
        if self._left.wait(GRACE):
            time.sleep(GRACE)  # what is lost may keep it from ending
        os._exit(2)

    def leave(self, error: BaseException | None) -> None:
        """Tell the others how this process ends.

        Raises:
            LostProcess: in place of an error that comes of the loss of another process.
        """
        if self.size > 1 and isinstance(error, RuntimeError) and self._is_lost():
            assert self.lost is not None
            self._left.set()
            raise self.lost from error
        self._left.set()
        said: dict[str, Any] = {"done": True}
        if error is not None:
            said = {"error": f"{type(error).__name__}: {error}"}
        for peer in self._peers:
            peer.say(**said)

    def _is_lost(self) -> bool:
        """Whether another process is gone, once that is said."""
        return self._said.wait(KNOWING) or (self.lost is not None and self._said.wait(GRACE))


class _Peer:
    """One connection; a line of JSON is a word.

    Args:
        about: rank, pid and host of the process at its other end.
    """

    def __init__(self, connection: socket.socket, about: dict[str, Any]) -> None:
        self.connection, self.about = connection, about
        connection.settimeout(None)
        # A machine that is gone says nothing at all; one that is alive answers.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def place(self, size: int) -> str:
        return "rank {rank} of {size} (process {pid} on {host})".format(size=size, **self.about)

    def say(self, **word: Any) -> None:
        with suppress(OSError):  # nobody may be there
            self.connection.sendall(json.dumps(word).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """The next word; {} where there will be none."""
        return _read(self.connection)


def _read(connection: socket.socket) -> dict[str, Any]:
    line = b""
    try:
        while not line.endswith(b"\n"):
            part = connection.recv(1)
            if not part:
                return {}
            line += part
        word = json.loads(line)
    except (OSError, ValueError):
        return {}
    return word if isinstance(word, dict) else {}


def _introduction(rank: int) -> dict[str, Any]:
    return {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}


def _met(server: socket.socket, token: str, size: int) -> list[_Peer]:
    """All other processes, as the main one meets them."""
    peers: list[_Peer] = []
    server.settimeout(CONNECTING)
    with server:
        while len(peers) < size - 1:
            connection, _ = server.accept()
            connection.settimeout(CONNECTING)
            about = _read(connection)
            if about.pop("token", None) != token:
                connection.close()  # somebody else
                continue
            peers.append(_Peer(connection, about))
            peers[-1].say(**_introduction(0))
    return peers


def _called(port: int, token: str, rank: int) -> _Peer:
    """The main process, as another one calls it."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    connection = socket.create_connection((host, port), timeout=CONNECTING)
    connection.sendall(json.dumps(_introduction(rank) | {"token": token}).encode() + b"\n")
    return _Peer(connection, _read(connection))
