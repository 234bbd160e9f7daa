"""The script of learning curves judges the best plans on other images, and goes on where it was killed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import selector_curves as script
import torch

from rankrl.data import load_dataset
from rankrl.models import create_model, save_checkpoint

pytestmark = pytest.mark.slow

GREEDY = script.entry("greedy")


def test_entries_are_selectors_with_options() -> None:
    found = script.entry("bayes:policy=pretrained_refitted,step=0.2,candidates=1")
    assert found.selector == "bayes"
    assert found.options == {"policy": "pretrained_refitted", "step": 0.2, "candidates": 1}
    assert script.seeds_of(found, [3, 4]) == [3, 4]
    assert script.seeds_of(GREEDY, [3, 4]) == [3]
    for text in ("bayesian", "bayes:stepp=1", "bayes:step", "bayes:step=-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            script.entry(text)


def test_searches_are_read_again_and_judged_by_their_best_plans(
    small_problem, small_evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = script.entry("local")
    found = script.search(small_problem, small_evaluator, entry, seed=0, episodes=7, folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(small_evaluator, "value", None)  # nothing is scored again
        again = script.search(small_problem, small_evaluator, entry, seed=0, episodes=7, folder=tmp_path)
    assert again.rows == found.rows
    best = script.best_plans(found.rows, script.milestones(len(found.rows)))
    assert list(best) == [1, 5, 7]
    assert best[1] == tuple(small_problem.preset)
    for after, plan in best.items():
        assert small_evaluator(plan).score == max(row.reward for row in found.rows[:after])


def test_the_table_puts_the_best_first() -> None:
    curves = [
        script.Curve("greedy", 0, {1: 0.5}),
        script.Curve("local", 0, {1: 0.5, 20: 0.6, 30: 0.7}),
        script.Curve("local", 1, {1: 0.5, 20: 0.6, 30: 0.6}),
    ]
    lines = script.report(curves, {"greedy's plan": 0.5}, 30).splitlines()
    assert lines[0] == "| selector | seeds | 20 evaluations | 30 evaluations |"
    assert lines[2].startswith("| `local` | 2 | 0.600 ± 0.000 | 0.650 ± ")
    assert lines[3] == "| `greedy` | 1 | 0.500 | 0.500 |"
    assert lines[-1] == "Without any evaluation: greedy's plan 0.500."


def test_the_table_tells_what_became_of_the_last_plans() -> None:
    curves = [
        script.Curve("local", seed, {1: 0.5, 30: 0.6}, {script.REFIT: 0.7 + seed / 10, script.TUNED: 0.9})
        for seed in (0, 1)
    ]
    lines = script.report(curves, {}, 30).splitlines()
    assert lines[0] == "| selector | seeds | 20 evaluations | 30 evaluations | refitted | fine-tuned, test |"
    assert lines[1].count("---") == 6
    assert lines[2].endswith("| 0.750 ± 0.635 | 0.900 ± 0.000 |")


def test_plans_are_applied_and_fine_tuned_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    model = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes)
    save_checkpoint(model, tmp_path / "conv4.safetensors")
    words = ["--task", f"conv4:{tmp_path}/conv4.safetensors:digits:tucker:params:0.2", "--entries", "greedy"]
    words += ["--folder", str(tmp_path), "--images", "100", "--judged", "100", "--finetune", "1"]
    options = script.parse([*words, "--train-images", "200"])
    ((curve,), _) = script.measured(options)
    assert set(curve.applied) == {script.REFIT, script.TUNED}
    monkeypatch.setattr(script, "apply_plan", None)
    ((again,), _) = script.measured(options)
    assert again == curve


def test_the_picture_has_a_curve_and_a_band_for_each_search_and_levels_for_single_plans() -> None:
    curves = [script.Curve("local", seed, {1: 0.5, 5: 0.6 + seed / 10}) for seed in (0, 1)]
    curves += [replace(curves[0], entry="tpe"), script.Curve("random", 0, {1: 0.1, 5: 0.2})]
    curves += [script.Curve("greedy", 0, {1: 0.5}), script.Curve("divergence", 0, {1: 0.55})]
    (axes,) = script.picture(curves, {script.DENSE: 0.9, script.GREEDY: 0.5}, 5).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["local"] == pytest.approx([0.5, 0.65])
    assert drawn["divergence"] == [0.55, 0.55]
    assert set(drawn) == {"local", "tpe", "divergence", script.GREEDY}
    assert len(axes.collections) == 2
