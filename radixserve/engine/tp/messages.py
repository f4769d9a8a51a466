"""What rank 0 and another rank tell each other, over two pipes that nobody else holds: msgpack behind a length, never pickle.

    rank 0  --Setup-->              rank r    loads its part of the weights
            <--Loaded--
            --Allocate-->                     takes the memory of its pool
            <--Allocated--
            both connect (models/rank_group.py)
            --Step--> --Step--> ...           no answer: the collectives of the step keep the ranks together
Failed may come instead of any answer, and is the last. The end of a pipe means that the other process is gone.
"""

import struct
from typing import BinaryIO

import msgspec

from radixserve.config import EngineConfig
from radixserve.core import IntArray, ScheduledBatch
from radixserve.engine.wire import array_to_bytes, bytes_to_array

LOST_STATUS = 3  # exit status of a rank that ended because another one had
_LENGTH = struct.Struct("<Q")


class Setup(msgspec.Struct, frozen=True, tag=True):
    rank: int
    config: EngineConfig  # resolved
    model_path: str  # a directory with config.json
    directory: str  # where the ranks meet
    parent_pid: int
    is_of_main_thread: bool  # spawned by it, which ends with its process and not before
    log_level: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    num_pages: int
    attention_backend: str


class Step(msgspec.Struct, frozen=True, tag=True):
    batch: ScheduledBatch  # without requests and what they said so far: nothing here reads them
    decode_ids: IntArray  # the last token of each decode row's slot


class Loaded(msgspec.Struct, frozen=True, tag=True):
    num_pages: int  # that this rank has memory for


class Allocated(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str
    is_users: bool  # a ConfigError or a ModelError: the user can do something about it


ToRank = Setup | Allocate | Step
FromRank = Loaded | Allocated | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=array_to_bytes)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=bytes_to_array)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """A whole frame."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def read_to_rank(stream: BinaryIO) -> ToRank | None:
    """The next message, waiting for it; None where the other end is gone."""
    data = _read_frame(stream)
    return None if data is None else _to_rank.decode(data)


def read_from_rank(stream: BinaryIO) -> FromRank | None:
    """As read_to_rank."""
    data = _read_frame(stream)
    return None if data is None else _from_rank.decode(data)


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None
