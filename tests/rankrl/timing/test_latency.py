"""Latency: what is reported, not how long it took."""

import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from decomposition import memory
from rankrl.errors import ExportError
from rankrl.kits.kit import FileGroup
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Session
from rankrl.timing import (
    LatencyComparison,
    compare_latency,
    is_unchanged,
    latency,
    measure_latency,
    time_in_turns,
)


@pytest.fixture
def path(plain_file: Path) -> Path:
    return plain_file


def test_a_latency_states_how_it_was_measured(path: Path) -> None:
    measured = measure_latency(path, batch=5, threads=2, runs=7)
    assert (measured.batch, measured.threads, measured.runs) == (5, 2, 7)
    assert 0 < measured.ms <= measured.median_ms <= measured.high_ms
    assert str(measured).endswith("batch 5, 2 threads")


def test_two_models_are_timed_in_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of_passes(monkeypatch)
    monkeypatch.setattr(latency, "_ROUNDS", 1)
    compare_latency(path, path, batch=2, runs=4, warm_up=0)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]


def test_runtimes_are_timed_in_the_same_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of_passes(monkeypatch)
    timed = time_in_turns([(DEFAULT_RUNTIME, path)] * 3, batch=2, runs=2, warm_up=0)
    assert order == [0, 1, 2, 2, 1, 0]
    assert timed.times.shape == (2, 3)
    for first, second in ((0, 1), (2, 0)):
        found = timed.compare(first, second)
        assert (found.baseline, found.compressed) == (timed.latencies[first], timed.latencies[second])


def test_files_without_room_for_all_of_their_sessions_are_timed_one_after_the_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, held = order_of_passes(monkeypatch), iter([0, 10**9] * 2)
    monkeypatch.setattr(latency, "held_memory", lambda: next(held))  # the first session takes 1 GB
    monkeypatch.setattr(memory, "free_memory", lambda: 7 * 10**9)
    assert time_in_turns([(DEFAULT_RUNTIME, path)] * 3, batch=2, runs=2, warm_up=0).times.shape == (2, 3)
    assert order == [0, 1, 2, 2, 1, 0]
    order.clear()
    monkeypatch.setattr(memory, "free_memory", lambda: 5 * 10**9)
    timed = time_in_turns([(DEFAULT_RUNTIME, path)] * 3, batch=2, runs=2, warm_up=0)
    assert order == [3, 3, 4, 4, 5, 5]
    assert timed.times.shape == (2, 3)


@pytest.mark.parametrize(
    ("ms", "turns", "passes"), [(1.0, 30, 3 + 2 * 30), (20.0, 15, 1 + 15), (100.0, 5, 1 + 5)]
)
def test_long_passes_are_timed_in_fewer_turns_and_fill_the_caches_themselves(
    ms: float, turns: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[Any] = []
    processor_time = iter([0.0, ms / 1e3])
    monkeypatch.setattr(latency.time, "process_time", lambda: next(processor_time))
    session: Any = types.SimpleNamespace(run=run.append)
    times, _ = latency.timed_passes(
        [session], ["batch"], ["wall"], runs=30, warm_up=3, settle=True, enough=300.0
    )
    assert len(times) == turns
    assert len(run) == passes


def test_layers_with_large_arenas_are_opened_one_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of_passes(monkeypatch)
    group = FileGroup(("a", "b"), lambda: ([load_model(path)] * 2, {}), 2, warm_up=1)
    for taken, expected in ((10**8, [0, 0, 1, *[0, 0, 1, 1], *[1, 1, 0, 0]]), (10**8 + 1, [2] * 6 + [3] * 5)):
        order.clear()
        held = iter([0, taken])
        monkeypatch.setattr(latency, "held_memory", lambda held=held: next(held))
        latency.LocalStopwatch(threads=1).times(group)
        assert order == expected


def order_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that the number of each session is added to when it runs."""
    order: list[int] = []
    opened = itertools.count()
    original = latency.open_session

    def remember(*args: Any, **options: Any) -> Session:
        session, number = original(*args, **options), next(opened)
        monkeypatch.setattr(session, "run", lambda batch: order.append(number))
        return session

    monkeypatch.setattr(latency, "open_session", remember)
    return order


Clocks = Callable[..., None]


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Let passes take the given milliseconds of processor time, and `waiting` times that on the wall."""

    monkeypatch.setattr(latency, "_ROUNDS", 1)

    def set_clocks(*turns: tuple[float, float], waiting: float = 1.0) -> None:
        taken = [ms for turn, pair in enumerate(turns) for ms in (pair if turn % 2 == 0 else pair[::-1])]
        for name, factor in (("thread_time_ns", 1.0), ("perf_counter_ns", waiting)):
            ticks = iter([tick for ms in taken for tick in (0, int(factor * ms * 1e6))])
            monkeypatch.setattr(latency.time, name, lambda ticks=ticks: next(ticks))

    return set_clocks


def compared(path: Path, clocks: Clocks, *turns: tuple[float, float], **how: float) -> LatencyComparison:
    clocks(*turns, **how)
    return compare_latency(path, path, batch=2, runs=len(turns), warm_up=0)


def test_the_ratio_is_baseline_over_compressed(path: Path, clocks: Clocks) -> None:
    found = compared(path, clocks, (6, 2), (6, 2))
    assert found.baseline.ms == 6
    assert found.compressed.ms == 2
    assert found.ratio == found.ratio_low == found.ratio_high == 3
    assert not found.unchanged


def test_the_ratio_is_that_of_the_times_that_are_shown(path: Path, clocks: Clocks) -> None:
    """Not the median of the turns' ratios, which is 1.08 here."""
    turns = ((7.27, 6.73), (7.8, 7.26), (7.2, 8.1), (7.84, 7.25), (7.1, 7.9))
    found = compared(path, clocks, *turns)
    assert np.median([before / after for before, after in turns]) > 1.07
    shown = found.baseline.ms, found.compressed.ms
    assert shown == pytest.approx((7.14, 6.938))
    assert found.ratio == pytest.approx(shown[0] / shown[1])


def test_passes_that_others_slowed_down_do_not_count(path: Path, clocks: Clocks) -> None:
    turns = [(6.0, 2.0), (9.0, 2.1), (6.1, 4.0), (8.0, 3.5), (12.0, 2.0)] * 6
    found = compared(path, clocks, *turns)
    assert found.ratio == pytest.approx(3, rel=0.01)
    assert found.baseline.median_ms / found.compressed.median_ms == pytest.approx(8 / 2.1)


def test_more_turns_follow_until_the_interval_is_narrow(
    path: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "_ROUNDS", 3)
    noisy, steady = [(6.0, 2.0), (9.0, 2.0)] * 2, [(6.0, 2.0)] * 4
    clocks(*noisy, *steady, *steady)
    found = compare_latency(path, path, batch=2, runs=4, warm_up=0)
    assert (found.baseline.runs, found.is_narrow) == (8, True)
    clocks(*[(6.0, 2.0), (9.0, 2.5), (7.0, 3.0), (8.0, 4.0)] * 3)
    found = compare_latency(path, path, batch=2, runs=4, warm_up=0)
    assert (found.baseline.runs, found.is_narrow) == (12, False)
    clocks(*[(600.0, 200.0), (900.0, 250.0), (900.0, 300.0), (1000.0, 1000.0)])
    found = compare_latency(path, path, batch=2, runs=4, warm_up=0)
    assert (found.baseline.runs, found.is_narrow) == (4, False)


def test_the_interval_is_scipys_and_repeats(path: Path, clocks: Clocks) -> None:
    generator = np.random.default_rng(3)
    turns = tuple((float(a), float(b)) for a, b in generator.normal((10, 8), 0.8, (30, 2)))
    found = compared(path, clocks, *turns)
    assert compared(path, clocks, *turns) == found
    expected = scipy.stats.bootstrap(
        tuple(np.array(turns).T),
        lambda a, b, axis: np.percentile(a, 10, axis=axis) / np.percentile(b, 10, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.ratio_low < found.ratio < found.ratio_high
    assert found.ratio_low == pytest.approx(expected.low, rel=0.02)
    assert found.ratio_high == pytest.approx(expected.high, rel=0.02)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "unchanged"),
    [
        (1.7, 1.65, 1.75, False),
        (0.8, 0.78, 0.82, False),
        (1.04, 1.02, 1.06, False),
        (1.08, 0.98, 1.2, True),
        (0.9, 0.7, 1.0, True),
        (1.024, 1.011, 1.036, True),
        (1 / 1.024, 0.97, 0.99, True),
        (1.004, None, None, True),
        (1.05, None, None, False),
        (0.96, None, None, False),
    ],
)
def test_unchanged_is_what_lies_within_the_noise(
    ratio: float, low: float | None, high: float | None, unchanged: bool
) -> None:
    assert is_unchanged(ratio, low, high) is unchanged


def test_one_thread_is_measured_in_processor_time(path: Path, clocks: Clocks) -> None:
    found = compared(path, clocks, (4, 2), (4, 2), waiting=1.02)
    assert (found.baseline.ms, found.baseline.clock) == (4, "processor")
    assert found.busy is None


def test_several_threads_are_measured_on_the_wall(path: Path) -> None:
    assert measure_latency(path, batch=2, threads=2, runs=2).clock == "wall"


def test_a_coarse_clock_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = types.SimpleNamespace(resolution=0.0156)
    monkeypatch.setattr(latency.time, "get_clock_info", lambda name: coarse)
    assert measure_latency(path, batch=2, runs=2).clock == "wall"


def test_a_busy_machine_is_noticed_by_the_wait_for_a_core(path: Path, clocks: Clocks) -> None:
    found = compared(path, clocks, (4, 2), (4, 2), waiting=2.0)
    assert found.baseline.ms == 4
    assert found.busy == "the timed passes waited 50 % of the time for a core"


@pytest.mark.parametrize(("load", "busy"), [(2.4, None), (7.96, "the load average is 8.0 on 2 cores")])
def test_a_busy_machine_is_noticed_by_its_load(
    path: Path, monkeypatch: pytest.MonkeyPatch, load: float, busy: str | None
) -> None:
    monkeypatch.setattr(latency.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(latency, "usable_cores", lambda: 2)
    assert compare_latency(path, path, batch=2, threads=2, runs=2).busy == busy


@pytest.mark.parametrize("option", ["batch", "threads", "runs"])
def test_options_out_of_range_are_refused(path: Path, option: str) -> None:
    with pytest.raises(ExportError, match=f"{option} is 0; it must be at least 1"):
        measure_latency(path, **{option: 0})


def test_a_fixed_batch_must_be_the_one_asked_for(fixed_file: Path) -> None:
    assert measure_latency(fixed_file, batch=4, runs=1).batch == 4
    with pytest.raises(ExportError, match="exported for batches of 4"):
        measure_latency(fixed_file, batch=8, runs=1)
