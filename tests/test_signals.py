"""Signals as the command line takes them, in processes of their own: when they raise, wait, or end everything."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import sys, time
from specgen.cli.signals import Interrupts
from specgen.job.writer import FileSink, LineWriter
def ready():
    print("ready", file=sys.stderr, flush=True)
"""


def start(code: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-P", "-c", HEAD + code], stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_or_waits_until_it_may(number: int) -> None:
    code = """
with Interrupts() as interrupts:
    if HELD:
        interrupts.hold()
    try:
        ready()
        end = time.monotonic() + 20
        while not interrupts.stop.is_set() and time.monotonic() < end:
            time.sleep(0.01)
        print("went on", file=sys.stderr)
        interrupts.release()
    except KeyboardInterrupt:
        print("raised", file=sys.stderr)
"""
    for held, told in ((False, b"raised\n"), (True, b"went on\nraised\n")):
        with start(code.replace("HELD", str(held))) as process:
            process.send_signal(number)
            assert process.communicate(timeout=30)[1] == told
            assert process.returncode == 0


def test_a_second_signal_ends_at_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    code = f"""
with Interrupts() as interrupts, LineWriter(FileSink({str(tmp_path / "out")!r}), ordered=True) as writer:
    interrupts.flush = writer.write_held
    interrupts.hold()
    writer.put(0, b"x" * 20_000 + b"\\n")
    writer.put(2, b"y" * 100 + b"\\n")  # waits for a line that will not come
    ready()
    while True:
        time.sleep(0.01)
"""
    with start(code) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 143
    assert [len(line) for line in (tmp_path / "out").read_bytes().split(b"\n")] == [20_000, 100, 0]
