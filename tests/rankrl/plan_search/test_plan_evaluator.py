"""Scores equal those of the network that really has the plan's weights; test images are refused."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from decomposition.choose.library import FitLibrary
from decomposition.choose.quick_refit import QuickRefit
from decomposition.network.layers import compressible_layers
from rankrl.data import Augmentation, TestImages, augmented_copy, batches
from rankrl.device import Precision
from rankrl.errors import ConfigError, DataError, NonFiniteError
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.scores.scoring_network import RefittingNetwork, ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

EXACT = Precision(torch.device("cpu"), torch.float32)
NORMALISATION = {"mean": (0.5,), "std": (0.25,)}


def make(network, library, problem, images, precision=EXACT, calibration=None, **options) -> PlanEvaluator:
    return PlanEvaluator(
        network,
        library,
        problem,
        ScoredImages(images, augmentation=Augmentation(padding=1), calibration=calibration, **NORMALISATION),
        precision=precision,
        options=EvaluatorOptions(**{"augmented": False, **options}),
    )


@pytest.fixture
def evaluator(small_network, small_library, small_problem, small_images) -> PlanEvaluator:
    return make(small_network, small_library, small_problem, small_images)


def rewritten(network: nn.Module, library: FitLibrary, problem: SearchProblem, choices) -> nn.Module:
    """The oracle: a plain copy of the network with weights and mean corrections set layer by layer."""
    network = copy.deepcopy(network)
    modules = dict(network.named_modules())
    for site, choice in zip(problem.sites, choices, strict=True):
        spec, operations = site.spec, site.candidates[choice].operations
        if not operations:
            continue
        weight = library.weight(spec.name, operations)
        lost = (library.weights[spec.name] - weight).flatten(1) @ library.moments[spec.name].mean
        with torch.no_grad():
            modules[spec.name].weight.copy_(weight.reshape(modules[spec.name].weight.shape))
            if spec.batch_norm:
                modules[spec.batch_norm].running_mean.sub_(lost)
            elif modules[spec.name].bias is not None:
                modules[spec.name].bias.add_(lost)
    return network


def logits(network: nn.Module, images) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([network(x) for x, _ in batches(images, 32, **NORMALISATION)])


def random_choices(problem: SearchProblem, seed: int) -> Choices:
    generator = np.random.default_rng(seed)
    return tuple(int(generator.integers(len(site))) for site in problem.sites)


@pytest.mark.parametrize("fold", [True, False])
def test_the_static_network_computes_what_the_rewritten_one_does(
    small_network, small_library, small_problem, small_images, fold, monkeypatch
) -> None:
    if not fold:  # as where it would change what the network computes
        monkeypatch.setattr(ScoringNetwork, "_fold", lambda *_: False)
    x = next(iter(batches(small_images, len(small_images), **NORMALISATION)))[0]
    static = ScoringNetwork(small_network, small_library, small_problem.sites, EXACT, x)
    assert static.folded is fold
    for seed in range(5):  # one after the other in the same network, so that leftovers would show
        choices = random_choices(small_problem, seed)
        static.write(choices)
        expected = logits(rewritten(small_network, small_library, small_problem, choices), small_images)
        torch.testing.assert_close(static.logits([x]), expected, rtol=1e-4, atol=1e-5)


def test_a_tiny_weight_cache_changes_nothing(
    small_network, small_library, small_problem, small_images, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy, tight = (
        make(small_network, small_library, small_problem, small_images, metric="soft_agreement")
        for _ in range(2)
    )
    plans = [random_choices(small_problem, seed) for seed in (0, 1, 0, 2)]
    scores = [roomy(plan).score for plan in plans]
    monkeypatch.setattr("rankrl.plan_search.scores.scoring_network.CACHE_BYTES", 1)
    assert [tight(plan).score for plan in plans] == scores


def test_accuracy_and_agreement_are_those_of_the_rewritten_network(
    small_network, small_library, small_problem, small_images
) -> None:
    choices = random_choices(small_problem, 4)
    scores = logits(rewritten(small_network, small_library, small_problem, choices), small_images)
    dense = logits(small_network, small_images)
    expected = {
        "accuracy": (scores.argmax(1) == small_images.y).double().mean(),
        "agreement": (scores.argmax(1) == dense.argmax(1)).double().mean(),
        "soft_agreement": torch.minimum(scores.softmax(1), dense.softmax(1)).sum(1).double().mean(),
    }
    for metric, value in expected.items():
        evaluation = make(small_network, small_library, small_problem, small_images, metric=metric)(choices)
        assert evaluation.score == pytest.approx(float(value), abs=1e-5)
        assert evaluation.accuracy == pytest.approx(float(expected["accuracy"]))
    cost = small_problem.cost(choices)
    assert (evaluation.params, evaluation.macs) == (cost.params, cost.macs)
    assert evaluation.params_kept == evaluation.params / small_problem.params


@pytest.mark.parametrize("metric", ["agreement", "soft_agreement"])
def test_the_dense_plan_agrees_with_the_dense_network(
    small_network, small_library, small_problem, small_images, metric
) -> None:
    dense = tuple(site.dense for site in small_problem.sites)
    evaluation = make(small_network, small_library, small_problem, small_images, metric=metric)(dense)
    assert evaluation.score == pytest.approx(1.0)
    assert evaluation.params_kept == 1.0


def test_augmented_scores_are_those_of_one_fixed_augmented_copy(
    small_network, small_library, small_problem, small_images
) -> None:
    choices = tuple(small_problem.preset.tolist())
    copied = augmented_copy(small_images, Augmentation(padding=1), 7)
    direct = make(small_network, small_library, small_problem, copied, metric="soft_agreement")(choices)
    augmented = make(
        small_network,
        small_library,
        small_problem,
        small_images,
        metric="soft_agreement",
        augmented=True,
        seed=7,
    )(choices)
    assert augmented.score == direct.score


def test_equal_plans_are_scored_once(evaluator, small_problem, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = tuple(small_problem.preset.tolist())
    first = evaluator(choices)
    monkeypatch.setattr(evaluator, "value", None)
    second = evaluator(tuple(small_problem.preset.tolist()))
    assert (first.cached, second.cached) == (False, True)
    assert second.score == first.score


def test_test_images_are_refused(small_network, small_library, small_problem, small_images) -> None:
    with pytest.raises(TypeError, match="TestImages"):
        make(small_network, small_library, small_problem, TestImages(small_images))


def test_no_images_are_refused(small_network, small_library, small_problem, small_images) -> None:
    with pytest.raises(DataError, match="no images"):
        make(small_network, small_library, small_problem, small_images.subset(torch.arange(0)))


def test_refitted_plans_are_scored_as_the_network_that_they_become(
    small_network, small_library, small_problem, small_images
) -> None:
    calibration = next(iter(batches(small_images, len(small_images), **NORMALISATION)))[0]
    given = {"calibration": calibration, "statistics": "refitted"}
    evaluator = make(small_network, small_library, small_problem, small_images, **given)
    plan = random_choices(small_problem, 1)
    names = [
        (site.name, site.candidates[j].operations) for site, j in zip(small_problem.sites, plan, strict=True)
    ]
    network = copy.deepcopy(small_network)
    QuickRefit(network, small_library, calibration).take(dict(names))
    found = logits(network, small_images)
    evaluation = evaluator(plan)
    assert evaluation.accuracy == pytest.approx(float((found.argmax(1) == small_images.y).float().mean()))
    np.testing.assert_allclose(evaluator.forward(plan, 0, evaluator.batches), found, rtol=1e-4, atol=1e-4)
    apart = make(small_network, small_library, small_problem, small_images)
    assert apart.fingerprint != evaluator.fingerprint
    assert (apart.forward(plan, 0, 1) - evaluator.forward(plan, 0, 1)).abs().max() > 1e-3


def test_refitting_needs_training_images_and_layers_that_stay(
    small_network, small_library, small_problem, small_images
) -> None:
    with pytest.raises(ConfigError, match="training images"):
        make(small_network, small_library, small_problem, small_images, statistics="refitted")
    site = small_problem.sites[0]
    narrow = replace(site.candidates[0], reads=(0,))
    sites = (replace(site, candidates=(narrow, *site.candidates[1:])), *small_problem.sites[1:])
    with pytest.raises(ConfigError, match=rf"{site.name}.* may lose channels .*statistics=corrected"):
        RefittingNetwork(small_network, small_library, sites, EXACT, torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "loss"},
        {"statistics": "moving"},
        {"batch_size": 0},
        {"refit_images": 0},
    ],
)
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EvaluatorOptions(**options)


def test_scores_that_are_not_finite_name_the_plan(evaluator, small_problem) -> None:
    with torch.no_grad():
        evaluator.network.model.last.bias.fill_(float("nan"))
    second = re.escape(str(small_problem.sites[1].candidates[0]))
    with pytest.raises(
        NonFiniteError, match=rf"infinite for the plan .*'second': '{second}'.*'last': 'dense'"
    ):
        evaluator((0, 0, 0, small_problem.sites[3].dense))


def test_a_batch_norm_with_other_inputs_is_not_folded(small_images) -> None:
    class Branching(nn.Module):
        """The convolution's output is also used beside its batch norm."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.last = nn.Linear(6, 5)

        def forward(self, x):
            out = self.conv(x)
            return self.last((self.norm(out) + out).mean((2, 3)))

    network = Branching().eval()
    with torch.no_grad():
        network.norm.running_mean.fill_(0.4)
    library = FitLibrary(network, compressible_layers(network, (1, 8, 8)), "tucker")
    x = next(iter(batches(small_images, 8, **NORMALISATION)))[0]
    static = ScoringNetwork(network, library, library.all_candidates(limit=1), EXACT, x)
    assert not static.folded
    with torch.no_grad():
        torch.testing.assert_close(static.logits([x]), network(x))


def test_fingerprints_tell_images_and_options_apart(
    small_network, small_library, small_problem, small_images
) -> None:
    parts = (small_network, small_library, small_problem)
    fingerprints = {
        make(*parts, small_images).fingerprint,
        make(*parts, small_images, metric="agreement").fingerprint,
        make(*parts, small_images.subset(torch.arange(50))).fingerprint,
    }
    assert len(fingerprints) == 3
    assert make(*parts, small_images).fingerprint in fingerprints


class NormAndActivate(nn.BatchNorm2d):
    """A batch norm that does more than normalise, as timm's BatchNormAct2d does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


def test_a_batch_norm_of_a_kind_of_its_own_stays_while_others_are_folded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), NormAndActivate(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    ).eval()
    x = torch.randn(8, 3, 8, 8)
    library = FitLibrary(model, compressible_layers(model, x.shape[1:]), "tucker")
    static = ScoringNetwork(model, library, library.all_candidates(limit=1), EXACT, x)
    assert static.folded
    assert isinstance(static.model[1], NormAndActivate)
    assert isinstance(static.model[3], nn.Identity)
    torch.testing.assert_close(static.logits([x]), model(x).detach())
