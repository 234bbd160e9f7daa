"""The bar shows what it should on a terminal and nothing elsewhere."""

import io
from contextlib import suppress

import pytest
from rich.console import Console

from decomposition.progress import in_words, progress_bar, whole_call


def test_on_a_terminal_description_count_and_best_value_are_shown() -> None:
    output = io.StringIO()
    with progress_bar("search", 3, console=Console(file=output, force_terminal=True, width=100)) as bar:
        bar.advance(best=0.25)
        bar.advance(2, best=0.9)
    text = output.getvalue()
    assert "search" in text
    assert "3/3" in text
    assert "best 0.9000" in text


def test_a_bar_can_be_set_to_a_count() -> None:
    output = io.StringIO()
    with progress_bar("train", 10, console=Console(file=output, force_terminal=True, width=100)) as bar:
        bar.update(4)
    assert " 4/10" in output.getvalue()


def test_a_bar_within_another_is_not_drawn() -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with (
        progress_bar("search", 2, console=Console(file=outer, force_terminal=True)),
        progress_bar("apply", 2, console=Console(file=inner, force_terminal=True)) as bar,
    ):
        bar.advance()
    assert "search" in outer.getvalue()
    assert inner.getvalue() == ""
    with progress_bar("apply", 2, console=Console(file=inner, force_terminal=True)) as bar:
        bar.advance()
    assert "apply" in inner.getvalue()


def test_a_function_is_told_instead() -> None:
    told: list[tuple[str, int, int]] = []
    output = Console(file=io.StringIO(), force_terminal=True)
    with progress_bar("fit", 5, progress=lambda *step: told.append(step), console=output) as bar:
        bar.advance(2)
        bar.update(5, best=0.5)
    assert told == [("fit", 2, 5), ("fit", 5, 5)]
    with progress_bar("fit", 5, progress=False, console=output) as bar:
        bar.advance(2)
    assert isinstance(output.file, io.StringIO)
    assert output.file.getvalue() == ""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time in seconds, to be set."""
    time = [0.0]
    monkeypatch.setattr("decomposition.progress.time.monotonic", lambda: time[0])
    return time


def test_without_a_terminal_the_log_says_how_long_it_will_take(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), progress_bar("prune", 1000) as bar:
        bar.advance(100)  # a resumed stage: these took no time here
        for now[0] in (5.0, 12.0, 20.0, 30.0):
            bar.advance(10)
    assert caplog.messages == [
        "prune: 120 of 1000, about 9 min left",
        "prune: 140 of 1000, about 11 min left",
    ]


def test_time_to_read_a_resumed_stage_counts_for_nothing(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), progress_bar("fine-tune", 1000) as bar:
        for now[0], step in ((4.0, 501), (14.0, 511)):  # the state is read, then a step a second
            bar.update(step)
    assert caplog.messages == ["fine-tune: 511 of 1000, about 8 min left"]


def test_a_stage_that_starts_again_is_counted_anew(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), progress_bar("train", 1000) as bar:
        for now[0], step in ((1.0, 1), (200.0, 300), (300.0, 1), (310.0, 11)):  # a step a second after that
            bar.update(step)
    assert caplog.messages == ["train: 300 of 1000, about 8 min left", "train: 11 of 1000, about 16 min left"]


def test_long_stages_are_never_silent_for_long(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), progress_bar("fine-tune", 400) as bar:
        for minute in range(1, 241):
            now[0] = 60.0 * minute
            bar.advance()
    said = [int(message.split()[1]) for message in caplog.messages]
    assert said == [1, 2, 4, 8, *range(16, 241, 10)]


def test_short_stages_say_nothing(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), progress_bar("fit", 10) as bar:
        for now[0] in (6.0, 12.0, 18.0):
            bar.advance()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.4, "4 s"), (29, "29 s"), (90.1, "2 min"), (3540, "59 min"), (9000, "2 h 30 min")],
)
def test_durations_are_said_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_without_a_terminal_it_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    with progress_bar("search", 2, console=Console(file=output, force_terminal=False)) as bar:
        bar.advance(best=1.0)
    with progress_bar("search", 2) as bar:
        bar.advance(best=1.0)
    assert output.getvalue().strip() == ""
    assert capsys.readouterr().out.strip() == ""


COSTS: dict[str, float | None] = {"perturb": 1.0, "time": 2.0, "fit": 3.0, "refit": 1.0}


def run(now: list[float], stage: str, seconds: float, *, steps: int = 10) -> None:
    """Run so many of a stage's ten steps, each of so many seconds."""
    with progress_bar(stage, 10) as bar:
        for _ in range(steps):
            now[0] += seconds
            bar.advance()


@pytest.mark.parametrize(("steps", "left"), [(0, ""), (1, "0:00:37 left"), (10, "0:00:10 left")])
def test_a_call_is_one_bar_that_shows_the_time_left_once_it_is_known(
    now: list[float], steps: int, left: str
) -> None:
    output = io.StringIO()
    with whole_call(COSTS, console=Console(file=output, force_terminal=True, width=100)):
        run(now, "perturb", 1.0)
        run(now, "time", 2.0)  # a cost of 3 took 30 s, and more is ahead than that
        run(now, "fit", 3.0, steps=steps)
    last = output.getvalue().split("\r")[-1]
    assert output.getvalue().count("\n") == 1
    assert "fit \x1b" in last
    assert f"{steps}/10" in last
    assert ("left" in last) is bool(left)
    assert left in last


def test_a_nested_bar_of_a_call_belongs_to_the_outer_one(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), whole_call(COSTS), progress_bar("time", 2):
        run(now, "refit", 100.0)
    assert not caplog.messages


def test_without_a_terminal_the_log_says_how_long_the_whole_call_will_take(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), whole_call(COSTS):
        run(now, "perturb", 10.0)
        run(now, "time", 0.001)  # from a cache, which tells nothing of the pace
        run(now, "fit", 35.0, steps=2)
    assert caplog.messages == [
        "perturb: 1 of 10",
        "perturb: 2 of 10",
        "perturb: 4 of 10",
        "perturb: 8 of 10",
        "fit: 2 of 10, about 7 min left in all",  # 280 s of the fit, and 112 to refit
    ]


def test_a_stage_of_unknown_length_is_waited_for(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), whole_call({"fit": 1.0, "search": None, "refit": 0.5}):
        run(now, "fit", 10.0)
        run(now, "search", 60.0, steps=1)
    assert caplog.messages[:2] == ["fit: 1 of 10", "fit: 2 of 10"]
    assert caplog.messages[-1] == "search: 1 of 10, about 10 min left in all"  # 540 s, and 50 to refit


@pytest.mark.parametrize("works", [True, False])
def test_a_function_is_told_of_every_stage_and_a_call_ends_with_its_block(works: bool) -> None:
    told: list[tuple[str, int, int]] = []
    with suppress(ValueError), whole_call(COSTS, progress=lambda *step: told.append(step)):
        with whole_call({"other": 1.0}), progress_bar("fit", 2) as bar:
            bar.advance()
            with progress_bar("apply", 2) as inner:
                inner.advance()
        if not works:
            raise ValueError
    with progress_bar("later", 2) as bar:
        bar.advance()
    assert told == [("fit", 1, 2)]


def test_a_call_that_shows_nothing_silences_its_stages(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), whole_call(COSTS, progress=False):
        run(now, "fit", 100.0)
    assert not caplog.messages
