"""Runs a function in a process of its own: for what libraries decide once a process."""

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from specgen.errors import EngineError, SpecgenError

Result = TypeVar("Result")


def in_own_process(function: Callable[..., Result], *args: object) -> Result:
    """Return what `function(*args)` gives in a new process, which ends with this one's interest in it.

    Raises: SpecgenError as the function does; EngineError if it fails in another way, or the process dies.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit CUDA's state
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        outcome: Result | SpecgenError = receiver.recv()
    except EOFError:
        process.join()
        raise EngineError(f"the process that measured ended with exit code {process.exitcode}") from None
    except BaseException:  # an interrupt
        process.terminate()
        raise
    finally:
        process.join()
        receiver.close()
    if isinstance(outcome, SpecgenError):
        raise outcome
    return outcome


def _child(sender: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    with suppress(KeyboardInterrupt):  # the parent has it too, and says so
        try:
            outcome = function(*args)
        except SpecgenError as error:
            outcome = error
        except Exception:
            outcome = EngineError(f"in the process that measured:\n{traceback.format_exc()}")
        sender.send(outcome)
