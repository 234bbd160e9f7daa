"""Losses of layers are weighed by one measured divergence each, where a network has a data set."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from decomposition import FitLibrary
from decomposition.choose.quick_refit import QuickRefit
from rankrl.data import ImageData, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.models import create_model
from rankrl.module_compression import image_classifier
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.plan_search.scores import scoring as scoring_module
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, probes
from rankrl.plan_search.scores.scoring import FunctionScoring, ImageScoring
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.request import Request


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load_dataset("digits", seed=0)


@pytest.fixture(scope="module")
def dense(data: ImageData) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()


@pytest.fixture(scope="module")
def library(dense: nn.Module, data: ImageData) -> FitLibrary:
    images = calibration_images(data, 128, seed=0)
    return FitLibrary.calibrated(dense, data.input_shape, "tucker", images)


@pytest.fixture(scope="module")
def problem(dense: nn.Module, data: ImageData, library: FitLibrary) -> SearchProblem:
    return SearchProblem.from_model(dense, library.all_candidates(limit=4), data.input_shape, library=library)


@pytest.fixture
def scoring(dense: nn.Module, data: ImageData) -> ImageScoring:
    return ImageScoring(dense, data, EvaluatorOptions(augmented=False, refit_images=128), images=100)


def test_a_layer_counts_by_what_the_answers_lose_after_the_refit(
    scoring: ImageScoring, library: FitLibrary, problem: SearchProblem, dense: nn.Module, data: ImageData
) -> None:
    """The oracle refits a copy of the network by hand, and torch's own distribution compares."""
    sites, only = problem.sites, probes(problem)
    images = data.heldout.first(100)
    x = (images.x.float() / 255 - torch.tensor(data.mean).view(-1, 1, 1)) / torch.tensor(data.std).view(
        -1, 1, 1
    )
    calibration = calibration_images(data, 128, seed=0)
    ratios = []
    for site, probe in zip(sites, only, strict=True):
        network = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
        network.load_state_dict(dense.state_dict())
        QuickRefit(network.requires_grad_(False), library, calibration).take(
            {site.name: site.candidates[probe].operations}
        )
        with torch.no_grad():
            before, after = (torch.distributions.Categorical(logits=each(x)) for each in (dense, network))
        divergence = torch.distributions.kl_divergence(before, after).mean()
        ratios.append(float(divergence) / site.losses[probe])
    wanted = torch.tensor(ratios) ** 0.75
    found = scoring.weighed(library, problem)
    factors = [one.importance / site.importance for one, site in zip(found, sites, strict=True)]
    assert (torch.tensor(factors) / factors[0]).tolist() == pytest.approx(
        (wanted / wanted[0]).tolist(), rel=0.1
    )


def test_large_networks_get_fewer_images(
    scoring: ImageScoring, library: FitLibrary, problem: SearchProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    real = ImageScoring.plan_evaluator

    def counted(self: ImageScoring, *arguments: object) -> object:
        counts.append((self.images, self.options.refit_images))
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageScoring, "plan_evaluator", counted)
    scoring.weighed(library, problem)
    monkeypatch.setattr(scoring_module, "_WEIGHING_MACS", 40.0 * len(problem.sites) * problem.macs)
    scoring.weighed(library, problem)
    monkeypatch.setattr(scoring_module, "_WEIGHING_MACS", 1.0)
    scoring.weighed(library, problem)
    assert counts == [(100, 128), (40, 40), (16, 16)]


def test_what_cannot_be_refitted_quickly_stays_as_it_is(
    scoring: ImageScoring, dense: nn.Module, data: ImageData
) -> None:
    images = calibration_images(data, 128, seed=0)
    network = ModuleNetwork(dense, data.input_shape, [images])
    library = network.library(CandidateOptions(("tucker",), channels=(0.5,)), cache=None, seed=0)
    sites = library.all_candidates(limit=2)
    problem = SearchProblem.from_model(dense, sites, data.input_shape, library=library)
    assert any(site.narrows for site in sites)
    assert scoring.weighed(library, problem) is problem.sites


def test_a_users_score_is_not_called(dense: nn.Module, library: FitLibrary, problem: SearchProblem) -> None:
    def score(_: nn.Module) -> float:
        raise AssertionError

    assert FunctionScoring(dense, score, []).weighed(library, problem) is problem.sites


def test_searches_begin_with_weighed_losses(dense: nn.Module, data: ImageData, tmp_path) -> None:
    goal = SearchGoal(BudgetOptions(params=0.3), SearchOptions(images=100, refit_images=128))
    request = Request(goal, DecompositionOptions(format="tucker"), calibration=128)
    network = image_classifier(dense, data, request, tmp_path)
    kinds = CandidateOptions(("tucker",))
    library = network.library(kinds, cache=None, seed=0)
    with SearchSession(network, library, goal, candidates=4, progress=False) as session:
        predicted = [library.fitted(site) for site in session.problem.sites]
        unbounded = replace(session.problem, sites=tuple(predicted), budget=None)
        wanted = network.scoring.weighed(library, unbounded)
        assert [site.importance for site in session.problem.sites] == [site.importance for site in wanted]
        assert any(
            site.importance != known.importance
            for site, known in zip(session.problem.sites, predicted, strict=True)
        )
        assert session.problem.budget is not None
