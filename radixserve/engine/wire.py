"""The wire between server and engine: every message that may cross it, and the codec. msgpack, checked on arrival; never pickle.

The nouns of core.py cross as they are. Token id arrays cross as the bytes of their int32 items in this machine's byte order: both ends
live on one machine, joined by a socket file in a directory of mode 0700.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from array import array
from pathlib import Path
from typing import Any

import msgspec

from radixserve.config import EngineConfig
from radixserve.core import IntArray, Request, RequestOutput
from radixserve.engine.info import EngineInfo
from radixserve.errors import ConfigError
from radixserve.metrics import EngineStats

# A socket path has to fit sockaddr_un.sun_path: 108 bytes with its final zero on Linux, 104 elsewhere.
MAX_SOCKET_PATH_BYTES = 103
_PREFIX = "radixserve-"
_LOCK = "lock"


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first thing that an engine process reads, from its standard input."""

    address: str
    parent_pid: int
    config: EngineConfig
    log_level: str = "info"  # as ServerConfig.log_level: both processes print under one rule


class Add(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A stop string was found in the text: the request ends here, with reason stop, cut at num_output_tokens."""

    request_id: str
    num_output_tokens: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class WithdrawFlush(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for that flush any more: it is not to happen, unless it has."""

    ticket: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave at once, between two steps. Draining is the server's business and is over by then."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All news of one step."""

    outputs: list[RequestOutput]


class Flushed(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    is_done: bool  # False: requests were running or waiting


class Stats(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    stats: EngineStats


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or a step raised. The process exits non-zero right after."""

    message: str


ClientMessage = Add | Abort | Finish | Flush | WithdrawFlush | GetStats | Shutdown
EngineMessage = Ready | Outputs | Flushed | Stats | Fatal


def array_to_bytes(value: Any) -> bytes:
    if isinstance(value, array):
        assert value.typecode == "i", f"token ids cross as int32, got array({value.typecode!r})"
        return value.tobytes()
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def bytes_to_array(kind: Any, value: Any) -> IntArray:
    if kind is not array or not isinstance(value, bytes):
        raise NotImplementedError(f"cannot receive a {kind}")
    ids: IntArray = array("i")
    ids.frombytes(value)
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=array_to_bytes)
_start_decoder = msgspec.msgpack.Decoder(Start)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage, dec_hook=bytes_to_array)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: Start | ClientMessage | EngineMessage) -> bytes:
    return _encoder.encode(message)


def decode_start(data: bytes) -> Start:
    return _start_decoder.decode(data)


def decode_client_message(data: bytes) -> ClientMessage:
    return _client_decoder.decode(data)


def decode_engine_message(data: bytes) -> EngineMessage:
    return _engine_decoder.decode(data)


class SocketDirectory:
    """A fresh directory of mode 0700 that holds one socket file, or that of engine/tp/ in which ranks meet.

    The socket's is removed as soon as both ends hold the connection.
    A file inside is locked for as long as its process lives: what a killed server left is swept by the next one. A lock and not a process
    id, which means nothing to a server in another container that shares the directory above.
    """

    def __init__(self) -> None:
        parent = _short_parent()
        sweep(parent)
        self._path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.address = f"ipc://{self._path / 'wire'}"
        self._lock = os.open(self._path / "new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self._path / "new", self._path / _LOCK)  # under its name it was never without its lock

    @property
    def path(self) -> Path:
        return self._path

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: str | None = None) -> None:
    """Remove directories in `parent`, by default where the next one will be, that are ours, private, and whose lock nobody holds; whatever
    is in doubt stays."""
    for path in Path(parent or _short_parent()).glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) != 0o700 or status.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _short_parent() -> str:
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        if len(os.fsencode(parent)) + len("/radixserve-12345678/wire") <= MAX_SOCKET_PATH_BYTES and os.access(parent, os.W_OK):
            return parent
    raise ConfigError(
        f"TMPDIR: expected a writable directory with a path under 80 bytes for the engine's socket, got {tempfile.gettempdir()}"
    )
