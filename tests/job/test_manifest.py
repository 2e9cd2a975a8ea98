"""The counts over time that a manifest keeps: few, evenly spread, and up to the end."""

from itertools import pairwise

from specgen.job.job import Progress
from specgen.job.manifest import TimeSeries
from specgen.stats import SpecStats


def at(seconds: float) -> Progress:
    return Progress(0, int(10 * seconds), 0, int(1000 * seconds), 0, 0, 0, seconds, SpecStats())


def test_a_short_run_has_its_beginning_and_its_end() -> None:
    series = TimeSeries()
    for step in range(9):
        series.observe(at(step / 10))
    assert [point[:3] for point in series.points] == [[0.0, 0, 0], [0.8, 8, 800]]


def test_the_latest_counts_are_there_and_never_a_moment_after_the_others() -> None:
    series = TimeSeries()
    for step in range(1, 125):
        series.observe(at(step / 10))
        seconds = [point[0] for point in series.points]
        assert seconds[-1] == step / 10
        assert all(later - before > 0.45 for before, later in pairwise(seconds[1:]))


def test_a_long_run_has_no_more_points() -> None:
    series = TimeSeries()
    for second in range(100_000):
        series.observe(at(second))
    points = series.points
    assert 100 < len(points) <= 242
    gaps = {later[0] - before[0] for before, later in pairwise(points[:-1])}
    assert len(gaps) <= 2  # even, but for where the spacing grew last
    assert points[-1][0] == 99_999
