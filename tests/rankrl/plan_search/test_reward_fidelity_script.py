"""The fidelity script draws plans of every quality, and correlates what it says it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reward_fidelity as script
from scipy.stats import spearmanr

from decomposition import FitLibrary
from rankrl.data import Augmentation, ImageData, TestImages, batches
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.space.problem import SearchProblem

pytestmark = pytest.mark.slow


def test_plans_differ_keep_the_budget_and_begin_with_greedys(small_problem: SearchProblem) -> None:
    plans = script.draw_plans(small_problem, 8, seed=1)
    assert len(set(plans)) == 8
    assert all(small_problem.keeps_budget(choices) for choices in plans)
    assert plans[0] == tuple(small_problem.preset)
    assert plans == script.draw_plans(small_problem, 8, seed=1)


def test_less_noise_draws_plans_nearer_to_greedys(small_problem: SearchProblem) -> None:
    def distance(widest: float) -> int:
        plans = script.draw_plans(small_problem, 8, seed=1, widest=widest)
        return sum(int(np.abs(np.array(each) - small_problem.preset).sum()) for each in plans)

    assert distance(0.5) < distance(4.0)


def test_more_plans_than_there_are_is_refused(small_problem: SearchProblem) -> None:
    with pytest.raises(ValueError, match="lower --plans"):
        script.draw_plans(small_problem, 5000, seed=1)


def test_rewards_are_those_of_the_evaluator(
    small_network, small_library: FitLibrary, small_problem: SearchProblem, small_images
) -> None:
    data = ImageData(
        "small",
        small_images,
        small_images,
        TestImages(small_images),
        5,
        (0.5,),
        (0.25,),
        Augmentation(padding=1),
    )
    bare = FitLibrary(small_network, list(small_library.specs.values()), "tucker")
    libraries = {"data": small_library, "weights": bare}
    images = next(iter(batches(small_images, len(small_images), mean=(0.5,), std=(0.25,))))[0]
    found = script.Rewards(small_network, libraries, small_problem, data, images)
    choices = tuple(small_problem.preset.tolist())
    row = found(choices)
    assert list(row) == script.reward_names()
    evaluator = PlanEvaluator(
        small_network,
        small_library,
        small_problem,
        ScoredImages(small_images, (0.5,), (0.25,)),
        options=EvaluatorOptions(metric="soft_agreement", augmented=False),
    )
    assert row["data, plain, soft_agreement"] == evaluator(choices).score
    assert row["weights, plain, soft_agreement"] != row["data, plain, soft_agreement"]
    assert row["data + refit, plain, soft_agreement"] > row["data, plain, soft_agreement"]


def rows(count: int = 8) -> list[dict[str, float]]:
    """Plans whose accuracies rise, whose rewards rise too but for the best quarter, and one that falls."""
    names = [*script.reward_names(), "heldout_compressed", "test_compressed", *script.AFTER]
    made = [dict.fromkeys(names, index / count) for index in range(count)]
    for index, row in enumerate(made):
        row[names[0]] = -row["test_finetuned"]
        row[names[1]] = index if index < count - 2 else 2 * count - index
        row[names[2]] = 1.0
    return made


def test_correlations_and_their_table() -> None:
    made = rows(12)
    falls, turns, flat, rises = script.reward_names()[:4]
    assert list(script.correlations(made, rises)) == pytest.approx([1, 1, 1, 1])
    assert list(script.correlations(made, falls)) == pytest.approx([-1, -1, -1, -1])
    everywhere, best, *_ = script.correlations(made, turns)
    assert everywhere > 0.9
    assert best < 1
    assert np.isnan(list(script.correlations(made, flat))).all()
    text = script.report(made, 2)
    sure = "-1.00 (-1.00 to -1.00)"
    assert f"| weights | plain | accuracy | {sure} | -1.00 | {sure} | -1.00 |" in text
    assert "| weights | augmented | accuracy | 1.00 (1.00 to 1.00) |" in text
    assert "| weights | plain | soft_agreement | – | – | – | – |" in text
    assert "sequential refit" in text


def test_an_interval_is_that_of_scipys_correlations_of_plans_drawn_again() -> None:
    random = np.random.default_rng(1)
    made = [{"reward": number, "after": number + 3 * random.normal()} for number in range(20)]
    low, high = script.interval(made, "reward", "after")
    drawn = np.random.default_rng(0).integers(20, size=(script.DRAWS, 20))
    rewards, after = (np.array([row[name] for row in made]) for name in ("reward", "after"))
    found = [spearmanr(rewards[each], after[each]).statistic for each in drawn]
    assert (low, high) == pytest.approx(np.percentile(found, [2.5, 97.5]))
    assert low < spearmanr(rewards, after).statistic < high


def test_rows_are_read_back_and_never_mixed(tmp_path: Path) -> None:
    path, made = tmp_path / "rows.csv", rows()
    assert script.finished_rows(path, "a") == []
    script.save_rows(path, made, "a")
    assert script.finished_rows(path, "a") == made
    with pytest.raises(ValueError, match="other options"):
        script.finished_rows(path, "b")


def test_finished_plans_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load_dataset", None)
    options = script.parse(["--checkpoint", "none.th", "--plans", "8", "--rows", str(tmp_path / "r.csv")])
    script.save_rows(options.rows, rows(), "a")
    assert script.measure(options, "a") == rows()


def test_bad_options_are_refused() -> None:
    for wrong in (["--plans", "2"], ["--epochs", "0"], ["--images", "0"], ["--format", "cpp"]):
        with pytest.raises(SystemExit):
            script.parse(["--checkpoint", "none.th", *wrong])
