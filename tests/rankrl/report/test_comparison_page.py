"""The page of a comparison of selectors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from rankrl.report.comparison import (
    ComparisonRow,
    Spread,
    comparison_latex,
    comparison_markdown,
    comparison_page,
    mean_over_tasks,
    means_table,
    progress_table,
    tasks_table,
)


def row(selector: str, seed: int) -> ComparisonRow:
    rewards = (0.5, 0.52, 0.55 + seed / 100)
    return ComparisonRow(selector, seed, rewards[-1], 0.6, 0.4, 0.5, 0.7, 0.8, 3, 3, 1.5, rewards)


@pytest.fixture
def rows() -> list[ComparisonRow]:
    return [row(selector, seed) for selector in ("ddpg", "random") for seed in (0, 1)]


def test_the_page_has_its_sections_and_answers(rows: list[ComparisonRow], metrics: Mapping[str, Any]) -> None:
    page = comparison_page(rows, metrics, {"Seed": "0"})
    assert "<h1>Selectors compared: resnet20 on cifar10</h1>" in page
    headings = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert headings == ["Result", "Search", "Setup"]
    assert page.count("<svg") == 1
    assert page.count("0.5550 ± 0.0635") == 5  # in a headline and in both tables, of both selectors
    assert re.findall("<dt>(Highest [^<]*)</dt><dd[^>]*>([^<]*)", page) == [
        ("Highest reward", "0.5550 ± 0.0635"),
        ("Highest test accuracy, %", "70.00 ± 0.00"),
        ("Highest after fine-tuning, %", "80.00 ± 0.00"),
    ]
    assert page.count("mean ± half of its 95 % interval over 2 seeds (Student") == 4


def test_rows_of_several_tasks_are_averaged_for_each_seed(metrics: Mapping[str, Any]) -> None:
    known = {"heldout_accuracy": None, "regret": 0.02}
    first = dataclasses.replace(row("ddpg", 0), task="a", **known)
    second = dataclasses.replace(first, task="b", regret=0.04, best_rewards=(0.7,), best_reward=0.7)
    (mean,) = mean_over_tasks([first, second])
    assert mean.best_rewards == pytest.approx((0.6, 0.61, 0.625))
    assert (mean.best_reward, mean.regret, mean.heldout_accuracy) == pytest.approx((0.625, 0.03, None))
    other = dataclasses.replace(first, seed=1, regret=0.04)
    assert tasks_table([first, second, other]).rows == [["a", "3.00"], ["b", "4.00"]]
    page = comparison_page([first, second], {**metrics, "bench": ["a", "b"]}, {})
    assert re.findall("<dt>(Least [^<]*)</dt><dd[^>]*>([^<]*)", page) == [("Least regret, points", "3.00")]
    assert ">Tasks</h2>" in page
    assert "Held-out accuracy" not in page


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.4], [0.5, 0.5], [1.0, 2.0, 4.0, 8.0, 16.0]])
def test_an_interval_is_students(values: list[float]) -> None:
    found = Spread.of(values)
    error = np.std(values, ddof=1) / len(values) ** 0.5
    assert found.mean == pytest.approx(np.mean(values))
    assert found.half_width == pytest.approx(student.ppf(0.975, len(values) - 1) * error)


def test_a_single_search_has_no_interval() -> None:
    assert Spread.of([0.5]) == Spread(0.5, None, None)
    assert Spread.of([0.5]).text(factor=100, digits=1) == "50.0"


def test_equal_searches_share_the_headline_whatever_their_number(metrics: Mapping[str, Any]) -> None:
    reward = 0.9089205364882946  # of which the mean of three is another number
    one = dataclasses.replace(row("greedy", 0), best_reward=reward)
    three = [dataclasses.replace(row("bayes", seed), best_reward=reward) for seed in range(3)]
    less = dataclasses.replace(row("random", 0), best_reward=0.9)
    page = comparison_page([less, *three, one], metrics, {})
    assert "bayes, greedy (equal)" in page
    assert [each[0] for each in means_table([less, *three, one]).rows] == ["bayes", "greedy", "random"]


def test_progress_is_the_best_reward_so_far_of_searches_of_any_length(rows: list[ComparisonRow]) -> None:
    short = dataclasses.replace(row("greedy", 0), seed=None, best_rewards=(0.51,), best_reward=0.51)
    long = dataclasses.replace(row("tpe", 0), best_rewards=tuple(np.linspace(0.4, 0.6, 6)), best_reward=0.6)
    table = progress_table([*rows, short, long])
    assert table.columns == ["Selector", "1 plan", "5 plans", "6 plans"]
    assert {each[0]: each[1:] for each in table.rows} == {
        "tpe": ["0.4000", "0.5600", "0.6000"],
        "ddpg": ["0.5000 ± 0.0000", "–", "–"],
        "random": ["0.5000 ± 0.0000", "–", "–"],
        "greedy": ["0.5100", "0.5100", "0.5100"],
    }
    assert table.rows[0][0] == "tpe"  # the best one


def test_single_plans_have_no_progress(metrics: Mapping[str, Any]) -> None:
    single = [dataclasses.replace(row(name, 0), best_rewards=(0.5,)) for name in ("greedy", "uniform")]
    assert "so many different plans" not in comparison_markdown(single)
    assert "interval" not in comparison_markdown(single)
    assert "so many different plans" not in comparison_page(single, metrics, {})


def test_a_table_for_latex_escapes_what_latex_reads() -> None:
    first, second, *_ = comparison_latex([row("a_b:c={1}^%&", 0)]).splitlines()
    assert (first, second) == (r"\begin{tabular}{lrrrrrrrrr}", r"\toprule")
    assert r"a\_b:c=\{1\}\textasciicircum{}\%\& & 1 &" in comparison_latex([row("a_b:c={1}^%&", 0)])
