"""The wire and the streams: what goes in comes out, in a private place, in bounded memory."""

import os
import signal
import stat
import subprocess
import sys
from array import array
from pathlib import Path

import msgspec
import pytest
import zmq

from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.core import FinishReason, Namespace, Request, RequestError, RequestOutput, SamplingParams
from radixserve.engine import wire
from radixserve.engine.info import EngineInfo
from radixserve.engine.process import EngineLoop
from radixserve.engine.streams import RequestStream, StreamGroup
from radixserve.errors import ConfigError, EngineDeadError
from radixserve.metrics import EngineStats, StepSeconds
from tests.support.byte_tokenizer import CRASH_ID
from tests.support.echo_engine import EchoEngine

SAMPLING = SamplingParams(max_tokens=2**31 - 1, temperature=0.5, seed=-(2**63), stop=("é", "\n"), stop_token_ids=(1, 2), ignore_eos=True)
INFO = EngineInfo("m", "p", "float32", "cpu", "torch", "torch", "none", 100, 200, 2**40, 16, "lpm", 300, (1, 2), False, 64, 512)


@pytest.mark.parametrize(
    "message",
    [
        wire.Add(Request("r", array("i", [0, 1, 2**31 - 1]), SAMPLING, 2**64 - 1, 3, Namespace("a", "b", "c"), -1)),
        wire.Abort("r"),
        wire.Finish("r", 5),
        wire.Flush(1),
        wire.WithdrawFlush(1),
        wire.GetStats(2),
        wire.Shutdown(),
    ],
)
def test_messages_to_the_engine_survive(message: wire.ClientMessage) -> None:
    assert wire.decode_client_message(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Ready(INFO),
        wire.Outputs([RequestOutput("r", (1, 2), 3, 1, 2, FinishReason.STOP, 2, RequestError("m", 429, "t", "c", "p"), 0.5)]),
        wire.Outputs([RequestOutput("r", (), 3, 1, 2)]),
        wire.Flushed(1, False),
        wire.Stats(2, EngineStats(num_running=1, step_seconds=StepSeconds(send=0.25))),
        wire.Fatal("over"),
    ],
)
def test_messages_from_the_engine_survive(message: wire.EngineMessage) -> None:
    assert wire.decode_engine_message(wire.encode(message)) == message


def test_start_survives() -> None:
    config = EngineConfig("/model", context_length=5, cache=CacheConfig(page_size=4), scheduler=SchedulerConfig("fcfs"))
    assert wire.decode_start(wire.encode(wire.Start("ipc://x", 7, config, "error"))) == wire.Start("ipc://x", 7, config, "error")


def test_token_ids_cross_as_int32_bytes() -> None:
    ids = array("i", range(1000))
    assert ids.tobytes() in wire.encode(wire.Add(Request("r", ids)))


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95.", b"cos\nsystem\n(S'true'\ntR.", wire.encode(wire.Fatal("x"))])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_client_message(data)


def test_the_socket_lives_in_a_private_directory_and_goes_with_it() -> None:
    directory = wire.SocketDirectory()
    path = Path(directory.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    directory.remove()
    assert not path.exists()


def test_what_a_killed_server_left_is_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = "from radixserve.engine import wire; import os, signal; wire.SocketDirectory(); os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    living = wire.SocketDirectory()
    assert not left.exists()
    (living_path,) = tmp_path.iterdir()
    for name, mode in (("radixserve-nolock__", 0o700), ("radixserve-opentoal", 0o755), ("radixserve-longer-name", 0o700), ("other", 0o700)):
        (tmp_path / name).mkdir(mode)
        if name != "radixserve-nolock__":
            (tmp_path / name / "lock").touch()
    target = tmp_path / "other"
    (tmp_path / "radixserve-symlink_").symlink_to(target)
    before = {living_path, *tmp_path.iterdir()}
    another = wire.SocketDirectory()
    assert before < set(tmp_path.iterdir())
    assert (target / "lock").exists()
    another.remove()
    living.remove()
    living.remove()
    assert not living_path.exists()


def test_a_long_temporary_directory_is_not_used_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory = wire.SocketDirectory()
    assert len(directory.address.removeprefix("ipc://").encode()) <= wire.MAX_SOCKET_PATH_BYTES
    directory.remove()
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/tmp")
    with pytest.raises(ConfigError, match="TMPDIR"):
        wire.SocketDirectory()


def output(ids: tuple[int, ...], count: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", ids, 3, 1, count, reason)


class Recorder:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []

    def stream(self, name: str = "r") -> RequestStream:
        return RequestStream(Request(name, array("i", [1, 2, 3])), self.aborted.append, lambda *call: self.finished.append(call))


async def test_outputs_that_nobody_took_become_one() -> None:
    stream = Recorder().stream()
    for count in range(1, 1001):
        stream.push(output((count,), count))
    stream.push(output((7,), 1001, FinishReason.LENGTH))
    (only,) = [news async for news in stream]
    assert only == output((*range(1, 1001), 7), 1001, FinishReason.LENGTH)


async def test_a_stream_ends_once_and_only_once() -> None:
    stream = Recorder().stream()
    stream.push(output((5,), 1))
    stream.cut(EngineDeadError("gone"))
    stream.push(output((6,), 2, FinishReason.STOP))
    (only,) = [news async for news in stream]
    assert only.token_ids == (5,)
    assert only.num_output_tokens == 1
    assert only.finish_reason is FinishReason.ERROR
    assert only.error == RequestError("gone", 503, "server_error", "engine_dead")


@pytest.mark.parametrize("is_taken", [False, True])
async def test_closing_aborts_before_the_end_and_not_after(is_taken: bool) -> None:
    recorder = Recorder()
    open_stream, ended = recorder.stream("open"), recorder.stream("ended")
    ended.push(output((5,), 1, FinishReason.STOP))
    if is_taken:
        assert (await anext(ended)).is_final
    for stream in (open_stream, ended, open_stream):
        stream.close()
    assert recorder.aborted == ["open"]
    assert [news async for news in open_stream] == []


async def test_a_group_gives_all_news_and_ends_when_all_streams_have() -> None:
    recorder = Recorder()
    streams = [recorder.stream(name) for name in "abc"]
    group = StreamGroup(streams)
    streams[1].push(output((1,), 1))
    streams[0].push(output((2,), 1, FinishReason.STOP))
    streams[1].push(output((3,), 2))
    assert group.take() == (1, output((1, 3), 2))
    assert group.take() == (0, output((2,), 1, FinishReason.STOP))
    assert group.take() is None
    group.finish(1, 1)
    streams[2].push(output((4,), 1, FinishReason.LENGTH))
    assert group.take() == (2, output((4,), 1, FinishReason.LENGTH))
    assert group.take() is None and group.is_ended
    group.close()
    assert recorder.finished == [("b", 1)]
    assert recorder.aborted == []


def test_an_engine_that_fails_is_closed_too() -> None:
    """So that a profile tells what it has."""
    context = zmq.Context()
    ours, its = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    ours.bind("inproc://failing")
    its.connect("inproc://failing")
    engine = EchoEngine(EngineConfig())
    closed: list[str] = []
    engine.close = lambda: closed.append("closed")  # type: ignore[method-assign]
    ours.send(wire.encode(wire.Add(Request("r", array("i", [CRASH_ID])))))
    with pytest.raises(RuntimeError, match="on purpose"):
        EngineLoop(engine, its).run()
    assert closed == ["closed"]
    ours.close()
    its.close()
    context.term()
