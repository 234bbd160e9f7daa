"""The bar shows what it should on a terminal and nothing elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rankrl.progress import progress_bar


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


def test_without_a_terminal_it_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    with progress_bar("search", 2, console=Console(file=output, force_terminal=False)) as bar:
        bar.advance(best=1.0)
    with progress_bar("search", 2) as bar:
        bar.advance(best=1.0)
    assert output.getvalue().strip() == ""
    assert capsys.readouterr().out.strip() == ""
