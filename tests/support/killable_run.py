"""Runs the command line over a scripted engine in child processes that die in set ways; a server on stdin and stdout.

A line in is a JSON object: args, and one of at_byte ([bytes of the output, signals that come then, in the middle of a
write]), waiting_at_byte (the same of the file of lines that wait), signal_at ([step, number]), max_bytes (of any file,
as on a full disk), reader_bytes (after which whoever reads stdout leaves; they are in read.bin); a line out is the
child's exit status, negative for a signal. Nothing of torch is imported, so that a child costs some milliseconds.
"""

import fcntl
import json
import os
import resource
import signal
import sys
import types
from typing import Any

from scripted_engine import FakeEngine

import specgen.cli.run
import specgen.job.session  # noqa: F401
from specgen.cli.main import main
from specgen.job import waiting, writer


def _put_in_engine(**options: Any) -> list[FakeEngine]:
    made: list[FakeEngine] = []

    def create(*args: object, **_: object) -> FakeEngine:
        made.append(FakeEngine(max_running=8, seed=os.getpid()))
        if options.get("signal_at"):
            at, number = options["signal_at"]
            made[-1].on_step = lambda step: os.kill(os.getpid(), number) if step == at else None
        return made[-1]

    module = types.ModuleType("specgen.engine.client")
    module.EngineClient = types.SimpleNamespace(create=create)  # type: ignore[attr-defined]
    sys.modules["specgen.engine.client"] = module
    return made


def _signal_at(module: types.ModuleType, name: str, offset: int, *numbers: int) -> None:
    """Let signals come when the file that a module writes has grown to `offset` bytes and not one more."""
    write = getattr(os, name)

    def interrupted_write(descriptor: int, data: bytes, *place: int) -> int:
        size = place[0] if place else os.fstat(descriptor).st_size
        if not size < offset <= size + len(data):
            return int(write(descriptor, data, *place))
        written = write(descriptor, data[: offset - size], *place)
        for number in numbers:
            os.kill(os.getpid(), number)
        return int(written)

    module.os = types.SimpleNamespace(**{**vars(os), name: interrupted_write})  # type: ignore[attr-defined]


def _read_and_leave(num_bytes: int) -> None:
    """Put a process behind stdout that reads so many bytes and ends."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)  # or the whole output may fit into the pipe before it breaks
    if os.fork() == 0:
        os.close(write_end)
        data = b""
        while len(data) < num_bytes and (more := os.read(read_end, num_bytes - len(data))):
            data += more
        with open("read.bin", "wb") as stream:
            stream.write(data)
        os._exit(0)
    os.close(read_end)
    os.dup2(write_end, 1)
    os.close(write_end)


def _child(
    args: list[str],
    at_byte: list[int] | None = None,
    waiting_at_byte: list[int] | None = None,
    max_bytes: int | None = None,
    reader_bytes: int | None = None,
    **options: Any,
) -> None:
    os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)
    if reader_bytes is not None:
        _read_and_leave(reader_bytes)
    _put_in_engine(**options)
    if at_byte is not None:
        _signal_at(writer, "write", *at_byte)
    if waiting_at_byte is not None:
        _signal_at(waiting, "pwrite", *waiting_at_byte)
    if max_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    os._exit(main(args))


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        _child(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
