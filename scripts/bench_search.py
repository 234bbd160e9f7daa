"""Time a search against the bare forward passes that it cannot do without.

    RANKRL_DATA=DIR python scripts/bench_search.py --checkpoints DIR [--models resnet20 resnet32 resnet56]

Measures, for each model, the wall time of a DDPG search (fitting, 300 episodes on 2,000 held-out images,
state written after every episode) and, in the same process right before and after it, the forward time of as
many images through the dense network in the same precision, at its best batch size. Prints a Markdown table;
the last line is `ratio N` for the first model.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_frame import command_line, markdown, publish, seconds_of, zoo_network

from rankrl.data import ImageData, batches, load_dataset
from rankrl.device import inference_precision
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions
from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.evaluators import PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import SearchProblem

CALIBRATION_IMAGES = 768
# The fastest of these is the bare forward pass: a search is not to look good against a bad choice.
BATCH_SIZES = (125, 250, 500, 1000)
# Batches of the bare pass that are timed before and after the search, as a share of all.
SAMPLE = 20


@dataclass
class Costs:
    """Seconds of one search, by what they were spent on."""

    model: str
    forward: float = 0.0
    total: float = 0.0
    fitting: float = 0.0
    scoring: float = 0.0
    agent: float = 0.0
    first_reward: float = 0.0
    best_reward: float = 0.0

    @property
    def bookkeeping(self) -> float:
        """State, table and everything else."""
        return self.total - self.fitting - self.scoring - self.agent

    @property
    def ratio(self) -> float:
        """Wall time of the search / bare forward time."""
        return self.total / self.forward


def main() -> None:
    """Run the searches, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of cifar10-MODEL.th")
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--format", default="tensor_ring")
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--params", type=float, default=0.25, help="kept fraction of the parameters")
    options = parser.parse_args()
    costs = [measure(name, options) for name in options.models]
    short: dict[Path | None, str] = {options.checkpoints: "CHECKPOINTS"}
    text = report(costs, options)
    publish(text, options.output, section="bench_search", title="What a search costs", shortened=short)
    print(f"ratio {costs[0].ratio:.2f}")


def report(costs: list[Costs], options: argparse.Namespace) -> str:
    """Make the table."""
    precision = inference_precision()
    parts = ("fitting", "scoring", "agent", "bookkeeping")
    rows = [
        (
            *(each.model, f"{each.forward:.1f}", f"{each.total:.1f}", f"{each.ratio:.2f}"),
            *(f"{getattr(each, part):.1f} s ({getattr(each, part) / each.total:.0%})" for part in parts),
            *(f"{each.first_reward:.3f}", f"{each.best_reward:.3f}"),
        )
        for each in costs
    ]
    head = (
        "model",
        "forward s",
        "search s",
        "ratio",
        "fitting",
        "forward passes",
        *parts[2:],
        "greedy",
        "best",
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{options.episodes} DDPG episodes, {options.images} held-out CIFAR-10 images, {options.format}, "
        f"budget.params={options.params}, {precision.device.type} {precision.dtype}.\n\n"
        f"{markdown(head, rows)}\n\nPeak memory of the process: {peak:.2f} GiB."
    )


def measure(name: str, options: argparse.Namespace) -> Costs:
    """Measure the costs of a search over one model."""
    data = load_dataset("cifar10", heldout=options.images)
    model = zoo_network(name, data, options.checkpoints / f"cifar10-{name}.th")
    before = bare_forward(model, data)
    with tempfile.TemporaryDirectory() as folder:
        costs = search(name, model, data, options, Path(folder))
    per_image = (before + bare_forward(model, data)) / 2
    costs.forward = per_image * options.images * options.episodes
    return costs


def bare_forward(model: torch.nn.Module, data: ImageData) -> float:
    """Measure the seconds that an image takes through the dense network, at the best batch size."""
    precision = inference_precision()
    network = model.to(precision.device).to(memory_format=torch.channels_last)
    best = float("inf")
    for size in BATCH_SIZES:
        x = next(iter(batches(data.heldout, size, mean=data.mean, std=data.std, device=precision.device)))[0]
        with torch.inference_mode(), precision.autocast():
            repeats = max(2, SAMPLE * BATCH_SIZES[0] * 4 // size)
            network(x)
            best = min(best, seconds_of(partial(network, x), repeats, precision.device) / len(x))
    return best


def search(
    name: str, model: torch.nn.Module, data: ImageData, options: argparse.Namespace, folder: Path
) -> Costs:
    """Run the search with a clock on each of its parts."""
    costs = Costs(name)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(data.train), generator=generator)[:CALIBRATION_IMAGES]
    calibration = [x for x, _ in batches(data.train.subset(drawn), 128, mean=data.mean, std=data.std)]
    network = ModuleNetwork(model, data.input_shape, calibration)
    library = network.library(CandidateOptions((options.format,)), cache=None, seed=0)
    sites = library.all_candidates()
    costs.fitting = time.perf_counter() - start
    problem = SearchProblem.from_model(model, sites, data.input_shape, params=options.params, library=library)
    images = ScoredImages(data.heldout, data.mean, data.std, data.augmentation)
    evaluator = PlanEvaluator(model, library, problem, images)
    selector = create_selector("ddpg", problem, seed=0, episodes=options.episodes)
    evaluator.evaluate = clocked(evaluator.evaluate, costs, "scoring")  # type: ignore[method-assign]
    selector.propose = clocked(selector.propose, costs, "agent")  # type: ignore[method-assign]
    selector.observe = clocked(selector.observe, costs, "agent")  # type: ignore[method-assign]
    result = run_search(problem, evaluator, selector, episodes=options.episodes, folder=folder)
    costs.total = time.perf_counter() - start
    costs.first_reward, costs.best_reward = result.rows[0].reward, result.best.reward
    return costs


def clocked(function: Callable[..., Any], costs: Costs, part: str) -> Callable[..., Any]:
    """Add the time of a function's calls to a part of the costs."""

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            setattr(costs, part, getattr(costs, part) + time.perf_counter() - start)

    return timed


if __name__ == "__main__":
    main()
