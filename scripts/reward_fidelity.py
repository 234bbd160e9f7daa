"""Which reward tells best how accurate a plan will be after fine-tuning?

    OMP_NUM_THREADS=2 RANKRL_DATA=data python scripts/reward_fidelity.py --checkpoint cifar10-resnet20.th \
        --format tucker --params 0.25 --plans 24 --epochs 2 --output scripts/results/reward_fidelity.csv

Draws random plans at one budget: greedy's importances changed by noise of growing scale, so that rewards
spread widely and also cluster near the best. Scores every plan with every reward (fits to the weights, to the
data, to the data with batch-norm statistics re-estimated or with layers refitted; accuracy, agreement, soft
agreement; plain and augmented held-out images), applies it layer by layer, fine-tunes it with the dense
network as teacher, and correlates (Spearman) rewards with accuracies after fine-tuning, over all plans and
among the best quarter. Every finished plan is a line in the file of `--rows`; a killed run goes on from
there.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch import nn

from decomposition import CompressionPlan, FitLibrary, apply_plan, list_formats
from rankrl import reuse_memory
from rankrl.data import ImageData, load_dataset
from rankrl.data.calibration import CALIBRATION_BATCH, calibration_images
from rankrl.errors import counted
from rankrl.files import write_atomically
from rankrl.models import create_model, list_models, load_checkpoint
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions
from rankrl.options.search import ScoreMetric, Statistics
from rankrl.plan_search.envs.actions import ImportanceMap
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.report.run_folder import hardware_line, shown_command, write_section
from rankrl.training import TrainingRecipe, accuracy, train
from rankrl.verify.measure import test_accuracy

FITS: dict[str, Statistics] = {
    "weights": "corrected",
    "data": "corrected",
    "data + refit": "refitted",
}
AFTER = ("heldout_finetuned", "test_finetuned")
# Log-importances of the plan changed most, unless --noise says otherwise; the first plan is greedy's own.
WIDEST = 4.0
ATTEMPTS = 200
DRAWS = 2000  # of the bootstrap

Row = dict[str, float]


def reward_names() -> list[str]:
    """Return the columns of the rewards: fit, images and metric."""
    images = ("plain", "augmented")
    return [
        f"{fit}, {which}, {metric}" for fit in FITS for which in images for metric in get_args(ScoreMetric)
    ]


def draw_plans(problem: SearchProblem, count: int, seed: int, *, widest: float = WIDEST) -> list[Choices]:
    """Return different plans that spend the budget, from greedy's own to far from it.

    Args:
        problem: The search problem; it has a budget.
        count: How many plans.
        seed: Seed of the noise.
        widest: Standard deviation of the noise on the log-importances of the plan that is changed most.

    Raises:
        ValueError: There are not so many different plans near enough.
    """
    generator = np.random.default_rng(seed)
    importance = ImportanceMap(problem, scale=1.0)
    plans: list[Choices] = []
    for number in range(count):
        # Squared, so that half of the plans lie within a quarter of the widest noise.
        scale = widest * (number / max(1, count - 1)) ** 2
        for attempt in range(ATTEMPTS):
            # Noise so small that it changes nothing is widened until it does.
            noise = (scale + 0.01 * attempt) * generator.standard_normal(len(problem.sites))
            choices = tuple(importance.allocate(noise).tolist())
            if choices not in plans:
                plans.append(choices)
                break
        else:
            raise ValueError(f"found only {len(plans)} different plans at this budget; lower --plans")
    return plans


class Rewards:
    """All rewards of a plan.

    Args:
        model: The dense network.
        libraries: Fits to the `weights` and to the `data`.
        problem: The search problem.
        data: The dataset; its held-out images score plans.
        images: Calibration images (N, C, H, W) that layers are refitted to.
    """

    def __init__(
        self,
        model: nn.Module,
        libraries: Mapping[str, FitLibrary],
        problem: SearchProblem,
        data: ImageData,
        images: torch.Tensor,
    ) -> None:
        self._evaluators = {
            (fit, augmented): PlanEvaluator(
                model,
                libraries[fit.partition(" ")[0]],
                problem,
                ScoredImages(data.heldout, data.mean, data.std, data.augmentation, images),
                options=EvaluatorOptions(augmented=augmented, statistics=statistics),
            )
            for fit, statistics in FITS.items()
            for augmented in (False, True)
        }

    def __call__(self, choices: Choices) -> Row:
        """Return the rewards of a plan by `reward_names`."""
        row = {}
        for (fit, augmented), evaluator in self._evaluators.items():
            logits = evaluator.forward(choices, 0, evaluator.batches)
            for metric in get_args(ScoreMetric):
                row[f"{fit}, {'augmented' if augmented else 'plain'}, {metric}"] = evaluator.metric(
                    logits, metric
                )
        return row


def tuned_accuracies(
    model: nn.Module, plan: CompressionPlan, images: torch.Tensor, data: ImageData, recipe: TrainingRecipe
) -> Row:
    """Return held-out and test accuracy of a plan before and after fine-tuning."""
    network = apply_plan(model, plan, images)

    def measured(when: str) -> Row:
        network.cpu()
        return {
            f"heldout_{when}": accuracy(network, data.heldout, mean=data.mean, std=data.std),
            f"test_{when}": test_accuracy(network, data),
        }

    before = measured("compressed")
    train(network, data, recipe, teacher=model)
    model.cpu()
    return before | measured("finetuned")


def finished_rows(path: Path, setup: str) -> list[Row]:
    """Read the rows of a run that was killed.

    Raises:
        ValueError: They belong to a run with other options.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if any(row["setup"] != setup for row in rows):
        raise ValueError(f"{path} belongs to a run with other options; choose another file with --rows")
    return [{key: float(value) for key, value in row.items() if key != "setup"} for row in rows]


def save_rows(path: Path, rows: Sequence[Row], setup: str) -> None:
    """Write all rows, atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["setup", *rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"setup": setup, **row} for row in rows)
    write_atomically(path, text.getvalue())


def correlations(rows: Sequence[Row], reward: str) -> Iterator[float]:
    """Yield Spearman's correlation with each accuracy of `AFTER`: over all plans, and the best quarter."""
    for after in AFTER:
        ordered = sorted(rows, key=lambda row: -row[after])
        for some in (ordered, ordered[: max(3, len(rows) // 4)]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # equal rewards everywhere: the correlation is nan
                pairs = [row[reward] for row in some], [row[after] for row in some]
                yield float(spearmanr(*pairs).statistic)


def interval(rows: Sequence[Row], reward: str, after: str) -> tuple[float, float]:
    """Return the 95 % interval of Spearman's correlation over all plans (bootstrap)."""
    drawn = np.random.default_rng(0).integers(len(rows), size=(DRAWS, len(rows)))
    first, second = (np.array([row[name] for row in rows])[drawn] for name in (reward, after))
    first, second = (rankdata(values, axis=1) - (len(rows) + 1) / 2 for values in (first, second))
    with np.errstate(invalid="ignore"):  # equal values everywhere: nan, which is left out
        correlations = (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))
    if np.isnan(correlations).all():
        return float("nan"), float("nan")
    low, high = np.nanpercentile(correlations, [2.5, 97.5])
    return float(low), float(high)


def report(rows: Sequence[Row], epochs: int) -> str:
    """Return the table of correlations and a line on the plans."""
    tuned = [100 * row["test_finetuned"] for row in rows]
    before = [100 * row["test_compressed"] for row in rows]
    lines = [
        f"{len(rows)} plans; test accuracy {min(before):.1f} to {max(before):.1f} % after the sequential "
        f"refit, {min(tuned):.1f} to {max(tuned):.1f} % after {counted(epochs, 'epoch')} of fine-tuning.",
        "",
        "Spearman correlation of reward and accuracy after fine-tuning, over all plans with its 95 % "
        "interval (bootstrap) and in the best quarter by that accuracy:",
        "",
        "| fit | images | metric | held-out, all | held-out, best quarter | test, all | test, best quarter |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name in [*reward_names(), "heldout_compressed"]:
        shown = ["–" if np.isnan(value) else f"{value:.2f}" for value in correlations(rows, name)]
        for column, after in zip((0, 2), AFTER, strict=True):
            low, high = interval(rows, name, after)
            shown[column] += "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"
        cells = " | ".join(shown)
        title = name.replace(", ", " | ") if ", " in name else "sequential refit | plain | accuracy"
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines)


def measure(options: argparse.Namespace, setup: str) -> list[Row]:
    """Return the rows of all plans, computing those that are missing."""
    rows = finished_rows(options.rows, setup)
    if len(rows) >= options.plans:
        return rows[: options.plans]
    data = load_dataset(options.dataset, seed=options.seed, heldout=options.heldout)
    model = create_model(options.model, input_shape=data.input_shape, num_classes=data.classes)
    load_checkpoint(model, options.checkpoint)
    model.eval()
    images = calibration_images(data, options.calibration, seed=options.seed)
    candidates = CandidateOptions((options.format,))
    network = ModuleNetwork(model, data.input_shape, images.split(CALIBRATION_BATCH))
    fitted = network.library(candidates, cache=None, seed=options.seed)
    libraries = {"data": fitted, "weights": FitLibrary(model, list(fitted.specs.values()), options.format)}
    sites = fitted.all_candidates(limit=candidates.candidates)
    problem = SearchProblem.from_model(model, sites, data.input_shape, params=options.params, library=fitted)
    plans = draw_plans(problem, options.plans, options.seed, widest=options.noise)
    rewards = Rewards(model, libraries, problem, data, images)
    if options.images is not None:
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(options.seed))
        data = dataclasses.replace(data, train=data.train.subset(order[: options.images]))
    recipe = TrainingRecipe(
        epochs=options.epochs, lr=options.lr, distillation=0.9, restore_best=False, seed=options.seed
    )
    for number, choices in list(enumerate(plans))[len(rows) :]:
        plan = problem.plan(choices, "noise")
        accuracies = tuned_accuracies(model, plan, images, data, recipe)
        row = {"plan": float(number), **rewards(choices), **accuracies}
        rows.append(row)
        save_rows(options.rows, rows, setup)
        reward = row["data, augmented, accuracy"]
        print(
            f"plan {number + 1} of {len(plans)}: reward {reward:.3f}, test accuracy "
            f"{row['test_compressed']:.4f}, fine-tuned {row['test_finetuned']:.4f}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of the network")
    parser.add_argument("--model", choices=list_models(), default="resnet20")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--format", choices=list_formats(), default="tucker")
    parser.add_argument("--params", type=float, default=0.25, help="kept fraction of the parameters")
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--noise", type=float, default=WIDEST, help="on log-importances, at most")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of fine-tuning (default 2)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of fine-tuning (default 1e-4)")
    parser.add_argument("--images", type=int, help="training images of fine-tuning (default all)")
    parser.add_argument("--heldout", type=int, default=5000, help="held-out images (default 5000)")
    parser.add_argument("--calibration", type=int, default=768, help="images that layers are fitted on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=Path("reward_fidelity.csv"), help="table of the plans")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args(arguments)
    if min(options.plans - 2, options.epochs, options.heldout, options.calibration) < 1:
        parser.error("--plans must be at least 3; --epochs, --heldout and --calibration at least 1")
    if options.images is not None and options.images < 1:
        parser.error("--images must be at least 1")
    return options


def main() -> None:
    """Run, print and perhaps save the table."""
    options = parse()
    # Plans drawn depend on how many there are, so that belongs to the setup too.
    deciding = {key: str(value) for key, value in vars(options).items() if key not in ("rows", "output")}
    setup = hashlib.sha256(repr(sorted(deciding.items())).encode()).hexdigest()[:12]
    rows = measure(options, setup)
    short = {str(options.checkpoint): options.checkpoint.name}
    command = shown_command(sys.argv, shortened=short, dropped=["--rows"])
    text = "\n\n".join([f"`{command}`", hardware_line(), report(rows, options.epochs)])
    print(text)
    if options.output:
        write_section(options.output, "reward_fidelity", "Reward fidelity", text)


if __name__ == "__main__":
    reuse_memory()
    main()
