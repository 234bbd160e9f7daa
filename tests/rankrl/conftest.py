"""A small network with fits, and a synthetic search problem, for everything that chooses ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from decomposition.calibration.moments import collect_moments
from decomposition.choose.library import FitLibrary
from decomposition.network.layers import compressible_layers
from decomposition.operations import Factorise
from rankrl.cli.config.schema import GROUPS, config_folder, group_choices, store_groups
from rankrl.data import Images
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.space.problem import Choices, SearchProblem

SHAPE = (1, 8, 8)
store_groups()  # for tests that compose with Hydra alone


class SmallNetwork(nn.Module):
    """Three convolutions, with and without batch norm and bias, and a linear layer; 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.third = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x))
        return self.last(torch.relu(self.third(x)).mean((2, 3)))


def rank_sums(problem: SearchProblem, choices: Choices) -> list[int]:
    """Sum of the ranks of every layer under a plan, 0 for dense layers."""
    chosen = [site.candidates[choice] for site, choice in zip(problem.sites, choices, strict=True)]
    return [
        sum(sum(each.ranks) for each in candidate.operations if isinstance(each, Factorise))
        for candidate in chosen
    ]


def measured(problem: SearchProblem) -> SearchProblem:
    """The problem with divergences, which are the squared errors here."""
    return replace(problem, divergences=lambda batches: [site.errors**2 for site in problem.sites])


class SyntheticEvaluator:
    """Scores a plan by a fixed smooth function of its ranks; no network, no images."""

    fingerprint = "synthetic"

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.calls = 0
        self._known: dict[Choices, Evaluation] = {}

    def evaluate(self, plans: list[Choices]) -> list[Evaluation]:
        return [self._evaluate(choices) for choices in plans]

    def _evaluate(self, choices: Choices) -> Evaluation:
        cached = choices in self._known
        if not cached:
            self.calls += 1
            sizes = np.array([size or 40 for size in rank_sums(self.problem, choices)], dtype=float)
            weights = np.cos(np.arange(len(sizes)) * 2.4) + 1.2
            score = float(np.tanh((weights * np.sqrt(sizes)).sum() / (4 * len(sizes))))
            cost = self.problem.cost(choices)
            kept = cost.params / self.problem.params, cost.macs / self.problem.macs
            self._known[choices] = Evaluation(score, score, cost.params, cost.macs, *kept, 0.0)
        evaluation = self._known[choices]
        return Evaluation(**{**vars(evaluation), "cached": cached})

    def restore(self, known: dict) -> None:
        self._known = dict(known)


@pytest.fixture(scope="session")
def three_convolutions() -> nn.Module:
    """Made of torch's own layers: what a test defines cannot be imported in another process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).eval()


@pytest.fixture(scope="session")
def with_each_choice(made_once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, dict[str, Any]]:
    """A configuration with every choice of every group, by `GROUP=CHOICE`; one has choices of several."""

    def fill(folder: Path) -> None:
        found = {}
        choices = [[f"{group}={choice}" for choice in group_choices(group)] for group in GROUPS]
        with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
            for row in zip_longest(*choices):
                overrides = [each for each in row if each is not None]
                config = OmegaConf.to_container(hydra.compose("config", overrides))
                found |= dict.fromkeys(overrides, config)
        (folder / "choices.json").write_text(json.dumps(found))

    found: dict[str, dict[str, Any]] = json.loads((made_once("choices", fill) / "choices.json").read_text())
    return found


@pytest.fixture(scope="session")
def small_network() -> nn.Module:
    torch.manual_seed(0)
    network = SmallNetwork()
    for _ in range(3):  # batch norm statistics that are not trivial
        network(torch.randn(32, *SHAPE) * 1.5 + 0.3)
    return network.eval()


@pytest.fixture(scope="session")
def small_images() -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(256, (96, *SHAPE), generator=generator, dtype=torch.uint8)
    return Images(x, torch.randint(5, (96,), generator=generator))


@pytest.fixture(scope="session")
def small_library(small_network: nn.Module) -> FitLibrary:
    generator = torch.Generator().manual_seed(2)
    layers = compressible_layers(small_network, SHAPE)
    inputs = torch.randn(64, *SHAPE, generator=generator)
    moments = collect_moments(small_network, layers, inputs)
    return FitLibrary(small_network, layers, "tucker", moments=moments)


@pytest.fixture(scope="session")
def small_problem(small_network: nn.Module, small_library: FitLibrary) -> SearchProblem:
    sites = small_library.all_candidates(limit=16)
    return measured(SearchProblem.from_model(small_network, sites, SHAPE, params=0.5, library=small_library))


@pytest.fixture(scope="module")
def small_evaluator(
    small_network: nn.Module, small_library: FitLibrary, small_problem: SearchProblem, small_images: Images
) -> PlanEvaluator:
    """Scores plans on the images as they are, in three batches."""
    return PlanEvaluator(
        small_network,
        small_library,
        small_problem,
        ScoredImages(small_images, (0.5,), (0.3,)),
        options=EvaluatorOptions(augmented=False, batch_size=32),
    )


@pytest.fixture
def staged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write networks as they are: which form of a file is faster takes most of the exports of a small one."""
    monkeypatch.setattr(
        "rankrl.verify.file_export.fastest_form", lambda network, *_, **__: (network, "staged", None)
    )


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of `rankrl.compress` draw no figures."""
    monkeypatch.setattr("rankrl.result.write_report", lambda *_, **__: None)


@pytest.fixture
def synthetic_evaluator(small_problem: SearchProblem) -> SyntheticEvaluator:
    return SyntheticEvaluator(small_problem)
