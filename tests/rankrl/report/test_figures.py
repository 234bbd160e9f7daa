"""What axes say: no two labels alike, no accuracy beyond 100 %, a point alone in the middle."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decomposition import list_formats
from rankrl.plan_search.scores.evaluation import EpisodeRow
from rankrl.report import LayerRow
from rankrl.report.comparison import ComparisonRow, rewards_figure
from rankrl.report.figures import (
    layers_figure,
    number_axis,
    percent_axis,
    reward_figure,
    whole_axis,
)
from rankrl.report.run_folder import GatheredRun
from rankrl.report.sweep_page import pareto_figure

FRACTIONS = st.lists(
    st.floats(0, 1).filter(lambda value: value == 0 or value > 1e-4), min_size=1, max_size=20
) | st.tuples(st.floats(0, 0.99), st.lists(st.floats(1e-4, 0.01), min_size=1, max_size=20)).map(
    lambda pair: [pair[0] + offset for offset in pair[1]]
)
"""Accuracies anywhere, and such that lie within a point of one another."""


def shown(axes: Axes, which: str) -> tuple[list[float], list[str]]:
    """Positions and labels of the ticks within an axis's limits."""
    axes.figure.draw_without_rendering()
    return ticks_of(axes, which)


def ticks_of(axes: Axes, which: str) -> tuple[list[float], list[str]]:
    """The same of a figure that is drawn already."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    room = 1e-9 * (high - low)
    if not axis.get_majorticklabels():  # another panel that shares the axis has them
        return [], []
    ticks = [
        (float(place), label.get_text())
        for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        if low - room <= place <= high + room and label.get_text()
    ]
    return [place for place, _ in ticks], [text for _, text in ticks]


def assert_true_labels(axes: Axes, which: str) -> None:
    places, labels = ticks_of(axes, which)
    assert len(set(labels)) == len(labels), labels
    if not any(label.endswith("%") for label in labels):
        return
    low, high = (axes.xaxis if which == "x" else axes.yaxis).get_view_interval()
    assert 0 <= low < high <= 1
    for place, label in zip(places, labels, strict=True):
        assert float(label.removesuffix("%")) == pytest.approx(100 * place, abs=0.02 * 100 * (high - low))
        assert 0 <= float(label.removesuffix("%")) <= 100


def assert_true_figure(figure: Figure) -> None:
    assert figure.axes
    figure.draw_without_rendering()
    for axes in figure.axes:
        for which in ("x", "y"):
            assert_true_labels(axes, which)


def on_panel(values: Sequence[float]) -> Axes:
    axes = Figure().add_subplot()
    axes.plot(range(1, len(values) + 1), values, "o")
    return axes


@given(FRACTIONS)
def test_labels_of_a_percent_axis_are_distinct_and_within_its_limits(values: list[float]) -> None:
    axes = on_panel(values)
    percent_axis(axes)
    assert shown(axes, "y")[1]
    assert_true_labels(axes, "y")
    low, high = axes.get_ylim()
    assert low <= min(values)
    assert max(values) <= high


@given(st.floats(0.01, 0.99))
def test_an_accuracy_alone_is_in_the_middle_with_its_neighbours(value: float) -> None:
    axes = on_panel([value])
    percent_axis(axes)
    low, high = axes.get_ylim()
    assert (low + high) / 2 == pytest.approx(value)
    assert len(shown(axes, "y")[1]) >= 3


def test_full_marks_end_the_axis_and_their_marker_is_drawn_whole() -> None:
    axes = on_panel([0.99, 1.0])
    percent_axis(axes)
    assert axes.get_ylim()[1] == 1.0
    assert not axes.lines[0].get_clip_on()


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20))
def test_labels_of_a_number_axis_are_distinct_and_in_full(values: list[float]) -> None:
    axes = on_panel(values)
    number_axis(axes)
    labels = shown(axes, "y")[1]
    assert len(set(labels)) == len(labels)
    offset = axes.yaxis.get_major_formatter().get_offset()
    assert offset == "" or offset.startswith("1e")  # a power of ten, never a difference from another number


@given(st.integers(1, 400), st.integers(0, 30))
def test_a_counting_axis_has_whole_numbers_only(count: int, first: int) -> None:
    axes = Figure().add_subplot()
    axes.plot(range(first, first + count), [0.5] * count)
    whole_axis(axes)
    places, labels = shown(axes, "x")
    assert places
    assert all(place == round(place) for place in places)
    assert len(set(labels)) == len(labels)
    if count == 1:
        assert labels == [str(first)]


def comparison_rows(count: int, episodes: int) -> list[ComparisonRow]:
    """Searches of several selectors whose accuracies lie within two points."""
    return [
        ComparisonRow(
            selector=f"selector {index}",
            seed=seed,
            best_reward=0.92 + 0.001 * index,
            heldout_accuracy=0.93,
            params_kept=0.4,
            macs_kept=0.4,
            test_accuracy=0.915 + 0.003 * index + 0.001 * seed,
            finetuned_accuracy=1.0 - 0.002 * index,
            episodes=episodes,
            evaluations=episodes,
            seconds=1.0,
            best_rewards=tuple(0.92 + 0.001 * index - 0.01 / (step + 1) for step in range(episodes)),
        )
        for index in range(count)
        for seed in (0, 1)
    ]


def gathered(accuracies: Sequence[float], metrics: dict[str, Any]) -> list[GatheredRun]:
    runs = []
    for index, accuracy in enumerate(accuracies):
        own = {**metrics, "finetuned": {"accuracy": accuracy}}
        own["compressed"] = {**metrics["compressed"], "params": 60_000 + 20_000 * index}
        runs.append(GatheredRun(None, "finished", metrics=own))  # type: ignore[arg-type]
    return runs


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 12])
def test_every_figure_of_a_run_has_true_labels(
    count: int, episodes: Sequence[EpisodeRow], layers: Sequence[LayerRow]
) -> None:
    assert_true_figure(reward_figure(episodes[:count]))
    assert_true_figure(layers_figure(layers[-count:]))
    tiny = [dataclasses.replace(row, params_after=row.params_before // 90) for row in layers[-count:]]
    assert_true_figure(layers_figure(tiny))
    names = list_formats()
    mixed = [
        dataclasses.replace(row, format=names[i % len(names)] if row.ranks else "")
        for i, row in enumerate(layers)
    ]
    figure = layers_figure(mixed)
    assert_true_figure(figure)
    shown = {text.get_text() for legend in figure.legends for text in legend.texts}
    assert {row.format.replace("_", " ") for row in mixed if row.format} <= shown


@pytest.mark.parametrize(("count", "length"), [(1, 1), (2, 5), (6, 30)])
def test_every_figure_of_a_comparison_has_true_labels(count: int, length: int) -> None:
    rows = comparison_rows(count, length)
    assert_true_figure(rewards_figure(rows))


@pytest.mark.parametrize(
    "accuracies",
    [
        [0.93],
        [1.0],
        pytest.param([0.915, 0.9275, 0.932], marks=pytest.mark.slow),
        [0.9171, 0.9172, 0.9173],
        pytest.param([0.1, 0.5, 1.0], marks=pytest.mark.slow),
    ],
)
def test_the_pareto_plot_has_true_labels(accuracies: list[float], metrics: dict[str, Any]) -> None:
    assert_true_figure(pareto_figure(gathered(accuracies, metrics)))


def test_a_search_of_the_reference_plan_alone_is_a_point(episodes: Sequence[EpisodeRow]) -> None:
    (axes,) = reward_figure(episodes[:1]).axes
    assert shown(axes, "x")[1] == ["0"]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "."] == [[0]]


def test_the_markers_of_two_panels_that_share_an_axis_are_all_within_it() -> None:
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, value in zip(panels, (0.2, 0.9), strict=True):
        axes.plot([1], [value], "o")
    for axes in panels:
        percent_axis(axes)
    for axes, value in itertools.product(panels, (0.2, 0.9)):
        assert axes.get_ylim()[0] < value < axes.get_ylim()[1]


def test_a_dense_layer_in_integers_is_not_called_compressed() -> None:
    rounded = LayerRow("rounded", (4, 4, 3, 3), (), 144, 144, 1000, 1000, precision="int8")
    smaller = LayerRow("smaller", (4, 4, 3, 3), (2,), 144, 90, 1000, 900, format="cp", precision="int8")
    figure = layers_figure([rounded, smaller])
    names = {label.get_text() for legend in figure.legends for label in legend.get_texts()}
    assert {"dense, in integers", "compressed"} <= names
    alone = layers_figure([rounded])
    names = {label.get_text() for legend in alone.legends for label in legend.get_texts()}
    assert "compressed" not in names
