"""Plans are scored on one graph, whose answers are those of the file with the plan's weights in it."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from small_graphs import FRAMES, MAPS, Array, convolutions, images, sentences, shared, tokens, upsampling

from decomposition import FitLibrary
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.networks.graph import fit_library
from rankrl.networks.graph_scoring import OnnxPlanEvaluator, OnnxScoring, ScoringGraph
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.graph import OnnxNetwork, PreparedFile
from rankrl.onnx.output_scores import output_score
from rankrl.plan_search.space.problem import SearchProblem

Searched = Callable[..., tuple[PreparedFile, FitLibrary, SearchProblem]]
# Constants of each graph that take up what is lost of the mean of a node's output, and with which sign.
GRAPHS: dict[str, tuple[onnx.ModelProto, Any, dict[str, tuple[str, str, int]]]] = {
    "convolutions": (
        convolutions(),
        images(100),
        {
            "first": ("first", "first_bias", 1),
            "second": ("second", "mean", -1),
            "last": ("last", "last_bias", 1),
        },
    ),
    "tokens": (tokens(), sentences(100), {"mix": ("mix", "mix_bias", 1), "along": ("along", "", 1)}),
    "upsampling": (
        upsampling(),
        MAPS,
        {"up": ("up", "", 1), "flat": ("flat", "", 1), "along": ("along", "", 1)},
    ),
    "shared": (shared(bias=True), FRAMES, {"one": ("weight", "bias", 1), "last_conv": ("last", "", 1)}),
}


@pytest.fixture(params=sorted(GRAPHS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Return `searched(name, precisions)`: a graph, its fits and a problem, made once."""

    @functools.cache
    def made(
        name: str, precisions: tuple[str, ...] = ("float32",)
    ) -> tuple[PreparedFile, FitLibrary, SearchProblem]:
        model, inputs, _ = GRAPHS[name]
        path = tmp_path_factory.mktemp(name) / "net.onnx"
        onnx.save(model, path)
        given = PreparedFile.read(path, inputs, scored=0.2)
        options = CandidateOptions(("tucker",), precisions=precisions, candidates=4, iterations=5)
        library = fit_library(given, options)
        sites = library.all_candidates(limit=4)
        specs = [site.spec for site in given.sites]
        problem = SearchProblem.from_costs(specs, sites, given.shape, given.totals, {"params": 0.9})
        return given, library, problem

    return made


def plan_of(problem: SearchProblem, choice: int) -> tuple[int, ...]:
    """The candidate of that number at every site, or the dense one where there are fewer."""
    return tuple(min(choice, site.dense) for site in problem.sites)


def with_weights(name: str, library: FitLibrary, problem: SearchProblem, choices: tuple[int, ...]) -> bytes:
    """The oracle: the file with its constants replaced."""
    model = onnx.ModelProto()
    model.CopyFrom(GRAPHS[name][0])
    values = {each.name: numpy_helper.to_array(each).copy() for each in model.graph.initializer}
    for site, choice in zip(problem.sites, choices, strict=True):
        weight_name, mean_name, sign = GRAPHS[name][2][site.name]
        dense, weight = (
            library.weights[site.name],
            library.weight(site.name, site.candidates[choice].operations),
        )
        lost = ((dense - weight).flatten(1) @ library.moments[site.name].mean).numpy()
        if mean_name:
            values[mean_name] += sign * lost.astype(np.float32)
        else:
            assert not lost.any()
        turned = weight_name == "mix" or (name == "upsampling" and weight_name != "flat")
        written = weight.numpy().squeeze(-1).T if turned else weight.numpy()
        values[weight_name] = written.astype(np.float32).reshape(values[weight_name].shape)
    for each in model.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(values[each.name], each.name))
    return bytes(model.SerializeToString())


def answers(session: onnxruntime.InferenceSession, feed: dict[str, Array]) -> list[Array]:
    return list(session.run(None, feed))


@pytest.mark.parametrize("precisions", [("float32",), ("float32", "int8_weights")])
def test_a_session_gives_what_the_file_with_these_weights_gives(
    name: str, precisions: tuple[str, ...], searched: Searched
) -> None:
    given, library, problem = searched(name, precisions)
    graph = ScoringGraph(given.network, given.sites, library, problem.sites)
    feed = dict(given.split.heldout[0])
    for choices in (plan_of(problem, 0), plan_of(problem, 1), plan_of(problem, 99), plan_of(problem, 0)):
        content = with_weights(name, library, problem, choices)
        oracle = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        for found, expected in zip(answers(graph.session(choices), feed), answers(oracle, feed), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_divergences_are_those_of_one_compressed_node(name: str, searched: Searched) -> None:
    given, library, problem = searched(name)
    feeds = given.split.scored
    scoring = OnnxScoring(given.network, given.sites, given.split.heldout, single=feeds)
    found = OnnxPlanEvaluator(scoring, library, problem).divergences(len(feeds))
    dense = plan_of(problem, 99)

    def whole(choices: tuple[int, ...]) -> list[Array]:
        content = with_weights(name, library, problem, choices)
        oracle = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        parts = zip(*(answers(oracle, dict(feed)) for feed in feeds), strict=True)
        return [np.concatenate(each) for each in parts]

    for index, site in enumerate(problem.sites):
        assert found[index].shape == (len(site),)
        assert found[index][site.dense] == 0
        changed = whole((*dense[:index], 0, *dense[index + 1 :]))
        losses = [
            output_score("", [before]).loss(before, after).mean()
            for before, after in zip(whole(dense), changed, strict=True)
        ]
        assert found[index][0] == pytest.approx(np.mean(losses), rel=1e-2, abs=1e-8)


def test_the_graph_is_rewritten_once(searched: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    given, library, problem = searched("convolutions")
    graph = ScoringGraph(given.network, given.sites, library, problem.sites)
    reconstructed, weight = [], library.weight

    def counted(name: str, *operations: Any) -> Any:
        reconstructed.append(name)
        return weight(name, *operations)

    monkeypatch.setattr(OnnxNetwork, "graph_model", lambda _: pytest.fail("the graph is built anew"))
    monkeypatch.setattr(library, "weight", counted)
    first, other = plan_of(problem, 0), (problem.sites[0].dense, *plan_of(problem, 0)[1:])
    for choices in (first, other, first, other):
        graph.session(choices)
    sites = [site.name for site in problem.sites]
    assert sorted(reconstructed) == sorted([*sites, sites[0]])  # two candidates of the first one


def test_the_original_scores_one_and_a_harder_plan_less(name: str, searched: Searched) -> None:
    given, library, problem = searched(name)
    for metric in ("agreement", "soft_agreement"):
        scoring = OnnxScoring(given.network, given.sites, given.split.scored, metric=metric)
        evaluator = OnnxPlanEvaluator(scoring, library, problem)
        dense, hard = evaluator.evaluate([plan_of(problem, 99), plan_of(problem, 0)])
        assert dense.score == pytest.approx(1, abs=1e-5)
        assert hard.score < dense.score or metric == "agreement"  # which may not see it
        assert hard.params < dense.params == given.totals["params"]
        assert evaluator.evaluate([plan_of(problem, 0)])[0].cached


def test_soft_agreement_is_one_less_the_error_of_the_outputs(searched: Searched) -> None:
    given, library, problem = searched("tokens")
    scoring = OnnxScoring(given.network, given.sites, given.split.scored)
    session = ScoringGraph(given.network, given.sites, library, problem.sites).session(plan_of(problem, 0))
    original = given.network.session()
    errors = []
    for number in range(2):
        wanted = np.concatenate([original.run(feed)[number].ravel() for feed in given.split.scored])
        found = np.concatenate([session.run(None, dict(feed))[number].ravel() for feed in given.split.scored])
        errors.append(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    assert scoring.of_session(session, "a plan") == pytest.approx(1 - np.mean(errors), abs=1e-6)


def test_what_scores_depend_on_is_in_the_fingerprint(searched: Searched) -> None:
    given, *_ = searched("convolutions")

    def fingerprint(**changes: Any) -> str:
        arguments = {"feeds": given.split.scored, **changes}
        return OnnxScoring(given.network, given.sites, **arguments).fingerprint

    others = [
        fingerprint(),
        fingerprint(metric="agreement"),
        fingerprint(feeds=given.split.heldout),
        fingerprint(score=lambda _: 1.0),
        fingerprint(score=lambda _: 2.0),
    ]
    assert len(set(others)) == len(others)
    assert fingerprint() == others[0]


def test_a_score_that_fails_does_so_before_nodes_are_fitted(searched: Searched) -> None:
    given, *_ = searched("convolutions")
    for value, error in (("0.5", ConfigError), (None, ConfigError), (float("inf"), NonFiniteError)):
        scoring = OnnxScoring(given.network, given.sites, given.split.scored, lambda _, value=value: value)
        with pytest.raises(error, match=r"score returned .* for the original network"):
            scoring.check()
