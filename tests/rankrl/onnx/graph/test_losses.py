"""Losses of single nodes are those of the whole graph with that node compressed, and scale its candidates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from small_graphs import FRAMES, MAPS, classifier, convolutions, images, sentences, shared, tokens, upsampling

from decomposition import CandidateSet, Factorise, memory
from decomposition.calibration.moments import fit_sizes
from decomposition.network.rounding import REDUCED_BITS, largest_integer
from rankrl.networks.graph import fit_library
from rankrl.networks.graph_scoring import GraphLibrary, NodeLosses, NodeTail, ScoringGraph
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.static_quantiser import sums_overflow
from rankrl.onnx.graph import OnnxNetwork, PreparedFile
from rankrl.onnx.output_scores import output_score

GRAPHS: dict[str, tuple[onnx.ModelProto, Any]] = {
    "convolutions": (convolutions(), images(100)),
    "tokens": (tokens(), sentences(100)),
    "upsampling": (upsampling(), MAPS),
    "shared": (shared(bias=True), FRAMES),
}
OPTIONS = CandidateOptions(("tucker", "spatial_svd"), candidates=3, iterations=5)


def prepared(name: str, folder: Path) -> PreparedFile:
    model, inputs = GRAPHS[name]
    onnx.save(model, folder / "net.onnx")
    return PreparedFile.read(folder / "net.onnx", inputs)


def expected_loss(file: PreparedFile, before: list[list[np.ndarray]], after: list[list[np.ndarray]]) -> float:
    """Return what the outputs lose over all batches, averaged over them, written out."""
    losses = []
    for index, name in enumerate(file.network.session().output_names):
        pairs = zip(before, after, strict=True)
        known, found = (
            np.concatenate([np.atleast_1d(file.network.axes.first_axis(name, row[index])) for row in rows])
            for rows in zip(*pairs, strict=True)
        )
        losses.append(output_score(name, [known]).loss(known, found).mean())
    return float(np.mean(losses))


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_a_loss_is_that_of_the_whole_graph(name: str, tmp_path: Path) -> None:
    file = prepared(name, tmp_path)
    library = fit_library(file, OPTIONS, measure=False)
    sites = library.all_candidates(limit=3)
    losses = NodeLosses(file.network, file.usable, file.split.calibration)
    graph = ScoringGraph(file.network, file.sites, library, sites)
    feeds = losses._feeds

    def outputs(choices: list[int]) -> list[list[np.ndarray]]:
        session = graph.session(choices)
        return [list(session.run(None, dict(feed))) for feed in feeds]

    dense = [site.dense for site in sites]
    before = outputs(dense)
    for index, site in enumerate(sites):
        weights = [library.weight(site.name, each.operations) for each in site.candidates]
        measured = losses.of(library, site.name, weights, [False] * len(weights))
        expected = [
            expected_loss(file, before, outputs([*dense[:index], choice, *dense[index + 1 :]]))
            for choice in range(len(site))
        ]
        np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-9)
        assert measured[-1] == pytest.approx(0, abs=1e-9)


def test_probabilities_tell_what_their_logits_tell(tmp_path: Path) -> None:
    sites: dict[bool, list[CandidateSet]] = {}
    for probabilities in (False, True):
        path = tmp_path / f"{probabilities}.onnx"
        onnx.save(classifier(probabilities=probabilities), path)
        file = PreparedFile.read(path, images(100))
        answers = file.network.session().run(file.split.calibration[0])[0]
        assert not probabilities or np.median(answers.max(1)) > 0.9
        library = fit_library(file, replace(OPTIONS, precisions=("float32", "int8"), weigh_outputs=True))
        sites[probabilities] = library.all_candidates(limit=3)
    for logits, hidden in zip(sites[False], sites[True], strict=True):
        assert logits.losses.max() > 0.1
        np.testing.assert_allclose(hidden.losses, logits.losses, rtol=0.05, atol=1e-12)


@pytest.mark.parametrize("name", ["convolutions", "tokens"])
def test_integers_lose_what_onnxruntimes_own_lose(name: str, tmp_path: Path) -> None:
    file = prepared(name, tmp_path)
    library = fit_library(file, OPTIONS, measure=False)
    losses = NodeLosses(file.network, file.usable, file.split.calibration)
    feeds = losses._feeds
    session = file.network.session()
    before = [session.run(feed) for feed in feeds]
    largest = largest_integer(REDUCED_BITS if sums_overflow() else 8)  # as the quantiser has it here
    for node in file.usable:
        weight = file.network.weight_inputs[node.name]
        quantise_onnx(tmp_path / "net.onnx", tmp_path / "int8.onnx", feeds, weights=[weight])
        rounded = OnnxNetwork.load(tmp_path / "int8.onnx").session()
        expected = expected_loss(file, before, [rounded.run(feed) for feed in feeds])
        spec = library.specs[node.name]
        steps = library.weights[node.name].flatten(1).abs().amax(1) / largest
        steps = steps.reshape(-1, *[1] * (library.weights[node.name].ndim - 1))
        written = torch.round(library.weights[node.name] / steps) * steps
        (found,) = losses.of(library, spec.name, [written], [True])
        assert found < 3 * expected
        if node.absorber != "batch_norm":  # which makes up for the mean error of those in front of it
            assert found > 0.3 * expected


def test_candidates_keep_their_order_within_a_format_and_match_what_was_measured(tmp_path: Path) -> None:
    file = prepared("convolutions", tmp_path)
    options = CandidateOptions(
        ("tucker", "spatial_svd"), precisions=("float32", "int8"), candidates=4, iterations=5
    )
    measured = fit_library(file, options)
    assert isinstance(measured, GraphLibrary)
    predicted = fit_library(file, options, measure=False)
    losses = NodeLosses(file.network, file.usable, file.split.calibration)
    for site, before in zip(measured.all_candidates(limit=4), predicted.all_candidates(limit=4), strict=True):
        for index, candidate in enumerate(before.candidates):
            others = [
                each
                for each, other in enumerate(before.candidates)
                if other.generator == candidate.generator and len(other.operations) == 1
            ]
            if index in others and isinstance(candidate.operations[0], Factorise):
                ratio = site.losses[others] / before.losses[others]
                np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
        matches = []
        for index, candidate in enumerate(site.candidates[:-1]):
            if candidate.operations and len(candidate.operations) == 1:
                weight = measured.weight(site.name, candidate.operations)
                (loss,) = losses.of(measured, site.name, [weight], [candidate.integer])
                matches.append(np.isclose(loss, site.losses[index], rtol=1e-3))
        assert sum(matches) >= 3  # one of each format, and the rounding


def test_losses_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = prepared("convolutions", tmp_path)
    opened: list[str] = []
    begin = NodeTail.__init__

    def spied(self: NodeTail, *arguments: Any) -> None:
        opened.append(arguments[1].name)
        begin(self, *arguments)

    monkeypatch.setattr(NodeTail, "__init__", spied)

    def losses() -> list[np.ndarray]:
        library = fit_library(file, OPTIONS, folder=tmp_path / "fits")
        sites: list[CandidateSet] = library.all_candidates(limit=3)
        return [site.losses for site in sites]

    first = losses()
    assert opened == [site.name for site in file.usable]
    for known, found in zip(first, losses(), strict=True):
        np.testing.assert_array_equal(known, found)
    assert opened == [site.name for site in file.usable]


def test_losses_are_measured_without_weights_of_channels_too(tmp_path: Path) -> None:
    file = prepared("convolutions", tmp_path)
    options = CandidateOptions(("tucker",), candidates=3, weigh_outputs=False)
    plain = fit_library(file, options, measure=False)
    assert all(site.importance == 1 for site in plain.all_candidates(limit=3))
    library = fit_library(file, options)
    assert not library.sensitivities
    losses = NodeLosses(file.network, file.usable, file.split.calibration)
    for site in library.all_candidates(limit=3):
        weights = [library.weight(site.name, each.operations) for each in site.candidates[:-1]]
        measured = losses.of(library, site.name, weights, [False] * len(weights))
        assert any(np.isclose(measured, site.losses[:-1], rtol=1e-3))


def test_a_node_whose_fit_would_take_too_much_stays_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = prepared("convolutions", tmp_path)
    inputs = sum(map(file.network.axes.size, file.split.calibration))
    sizes = {site.name: memory.fit_bytes(*fit_sizes(site.spec, inputs)) for site in file.usable}
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * sizes["second"])  # without what is held
    sites = {site.name: site for site in fit_library(file, OPTIONS).all_candidates(limit=3)}
    assert len(sites["second"]) == 1
    assert "its fit takes 0.0 GB, more than half of the" in str(sites["second"].candidates[0].reason)
    assert "second: its fit takes" in caplog.text
    assert all(len(sites[name]) > 1 for name in ("first", "last"))
