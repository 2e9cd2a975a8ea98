"""Where start-up time goes, as far as a CPU can tell, and what Triton's compiler tells a listener."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Harness
from tiny import write_checkpoint

from specgen.kernels._triton import HAS_TRITON
from specgen.worker.startup import CompileClock, compile_clock


def test_weights_and_the_measured_step_are_timed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    start_up = Harness(folder, k=1).worker.start_up()
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.8 * stored < start_up.weight_bytes <= stored
    assert start_up.weight_seconds > 0 and start_up.largest_step_seconds > 0
    assert (start_up.num_graphs, start_up.graph_seconds) == (0, 0.0)


def test_the_clock_counts_and_tells_who_listened_before() -> None:
    told: list[Any] = []
    clock = CompileClock(before=lambda **what: told.append(what["cache_hit"]))
    times = SimpleNamespace(total=250_000)
    for cache_hit in (False, True):
        clock(src=None, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)
    assert (clock.num_compiled, clock.num_cached, clock.seconds) == (2, 1, 0.5)
    assert told == [False, True]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_has_the_listener_and_tells_microseconds() -> None:
    """The names that its compiler calls a listener with are part of `CompilationListener`, and so is the unit."""
    import inspect

    from triton import knobs

    clock = compile_clock()
    assert knobs.compilation.listener is clock and compile_clock() is clock
    wanted = set(inspect.signature(knobs.CompilationListener.__call__).parameters) - {"self"}
    assert wanted == set(inspect.signature(clock).parameters)
    times = knobs.CompileTimes(ir_initialization=1_000, lowering_stages=[("ttir", 2_000)], store_results=500)
    before = clock.seconds
    clock(src=None, metadata={}, metadata_group={}, times=times, cache_hit=False)
    assert clock.seconds - before == pytest.approx(3.5e-3)
