"""Measure compressed networks and their files: stored bytes, rows of layers, accuracy, verification, int8."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    FactorisedLayer,
    Inputs,
    LayerPlan,
    LayerSpec,
    Quantise,
    count_macs,
    count_parameters,
    factorised_layers,
    inspect_layers,
    without_rounding,
)
from decomposition.cache import Cache, digest
from decomposition.network.inputs import input_shape_of, mapped, random_batch, rows, split
from decomposition.network.layers import FLOAT_BYTES
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied
from rankrl.data import ImageData, Images, Preprocessing, batches
from rankrl.data.sample import UNLABELLED, Sample
from rankrl.device import model_device, select_device
from rankrl.errors import DataError, ExportError
from rankrl.models.classifiers import behaviour_digest
from rankrl.onnx.export import class_agreement, export_onnx, onnx_accuracy, verify_onnx
from rankrl.onnx.export.onnx_file import output_names
from rankrl.onnx.export.tracing import feed_of
from rankrl.onnx.graph_edits import Array
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import Batch, Session, open_session
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions
from rankrl.plan_search.scores.evaluators import Score, answer, values_of_inputs
from rankrl.report import LayerRow
from rankrl.training.accuracy import correct_test_images, guessing_share, share
from rankrl.training.networks import images_for_ranges, range_images
from rankrl.verify.agreement import (
    OWN_SCORE,
    Basis,
    OutputAgreement,
    Outputs,
    accuracy_collapse,
    agreement,
    agreement_score,
    agreement_values,
    collapse,
    constant_agreement,
    output_scores,
)
from rankrl.verify.fidelity import network_outputs
from rankrl.verify.file_export import NO_CACHE, FileInputs, allowed_error

log = logging.getLogger(__name__)

_Network = TypeVar("_Network")
_Answer = TypeVar("_Answer")


def once_per_network(function: Callable[[_Network], _Answer]) -> Callable[[_Network], _Answer]:
    """Memoise a function per network, by identity and without keeping it alive; it must not change."""
    answers: WeakKeyDictionary[_Network, _Answer] = WeakKeyDictionary()

    def known(network: _Network) -> _Answer:
        if network not in answers:
            answers[network] = function(network)
        return answers[network]

    return known


def stored_bytes(plan: CompressionPlan, dense: nn.Module, network: nn.Module) -> int:
    """Return the bytes of a compressed network's parameters as its plan stores them."""
    rest = {spec.name: spec for spec in plan.specs(plan.prepared(dense))}
    costs = [layer.cost(rest[layer.name]) for layer in plan if layer.name in rest]
    return FLOAT_BYTES * count_parameters(network) + sum(
        cost.bytes - FLOAT_BYTES * cost.params for cost in costs
    )


def layer_rows(plan: CompressionPlan, dense: nn.Module, network: nn.Module | None = None) -> list[LayerRow]:
    """Return the report's row of every layer, with the fit's error as the compressed `network` records it."""
    dense = plan.prepared(dense)
    pruned = {spec.name: spec for spec in plan.specs(dense)}
    fitted = {} if network is None else factorised_layers(network)
    by_name = {spec.name: spec for spec in inspect_layers(dense, plan.input_shape)}
    pruning = bool(plan.group_kinds)
    rows = []
    for layer in plan:
        spec = by_name[layer.name]
        rest = pruned.get(layer.name)
        error = _error(layer, fitted.get(layer.name), pruning=pruning)
        row = layer_row(layer, spec, rest or spec, error=error)
        channels = (0 if rest is None else rest.out_channels, spec.out_channels) if pruning else None
        rows.append(replace(row, channels=channels))
    return rows


def layer_row(layer: LayerPlan, spec: LayerSpec, rest: LayerSpec, *, error: float | None) -> LayerRow:
    factorise, rounding, cost = layer.operation(Factorise), layer.operation(Quantise), layer.cost(rest)
    removed = next((str(each) for each in layer.operations if each.removes), None)
    return LayerRow(
        name=layer.name,
        shape=spec.weight_shape,
        ranks=() if factorise is None else factorise.ranks,
        params_before=spec.params,
        params_after=cost.params,
        macs_before=spec.macs,
        macs_after=cost.macs,
        error=error,
        reason=layer.reason or removed or "",
        format="" if factorise is None else factorise.format,
        precision="" if rounding is None else str(rounding),
    )


def _error(layer: LayerPlan, module: FactorisedLayer | None, *, pruning: bool) -> float | None:
    """Return the relative error of a layer's fit, 0 for a dense one; a removal of channels has none."""
    if not layer.layer_operations:
        return None if pruning else 0.0
    return None if module is None else module.error


ONNX_TEST_BATCH = 500
COMPARED_BATCH = 250
_VERIFIED = 64
_COMPARED_IMAGES = 1000
_LEAST_AGREEMENT = 0.99
_SLACK = 0.02  # of the images


def network_numbers(network: nn.Module, data: ImageData) -> dict[str, Any]:
    """Return test accuracy, parameters and multiply-accumulates of a network."""
    return {
        "accuracy": test_accuracy(network, data),
        "params": count_parameters(network),
        "macs": count_macs(network, data.input_shape),
    }


def cost_ratios(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return original ÷ compressed parameters and multiply-accumulates, from two `network_numbers`."""
    return {measure: before[measure] / after[measure] for measure in ("params", "macs")}


def test_accuracy(network: nn.Module, data: ImageData) -> float:
    """Return the accuracy on the test set in float32; the network goes back to the CPU."""
    return share(correct_tests(network, data))


def kept_correct_tests(dense: nn.Module, data: ImageData, cache: Cache) -> torch.Tensor:
    """Return `correct_tests` of a dense network, cached for other runs of it."""
    if cache.folder is None:
        return correct_tests(dense, data)
    images = [data.test.for_report().digest(), data.preprocessing.to_dict()]
    behaviour = behaviour_digest(dense, random_batch(dense, data.input_shape, 2))
    key = digest(behaviour, images, str(select_device()))
    return cache.tensors("dense-tests", key, lambda: {"correct": correct_tests(dense, data)})["correct"]


def correct_tests(network: nn.Module, data: ImageData) -> torch.Tensor:
    """Return the mask (N,) of the test images classified right in float32; the network returns to the CPU."""
    device = select_device()
    try:
        return correct_test_images(network.to(device), data.test, mean=data.mean, std=data.std).cpu()
    finally:
        network.to("cpu")


class Measure(Protocol):
    """The score of finished networks, on inputs that chose nothing."""

    unit: str
    """Key of the score in metrics.json."""

    @property
    def basis(self) -> Basis:
        """Kind and inputs of the scores that `values` returns."""

    def __len__(self) -> int:
        """Return the number of inputs that `score` uses."""

    def score(self, network: nn.Module) -> Any:
        """Return the score of a network, a number or one for each input."""

    def values(self, network: nn.Module) -> Array | None:
        """Return the score of every input, shape (N,), by which a loss is certified."""

    def collapsed(self, network: nn.Module, score: float) -> str | None:
        """Return a message if a network's answers are no better than a constant, else None."""


class TestAccuracy:
    """Accuracy on the test images, which choose nothing and are read for the report alone; a `Measure`."""

    basis = Basis("accuracy", "test images")
    unit = "accuracy"

    def __init__(self, dense: nn.Module, data: ImageData, cache: Cache = NO_CACHE) -> None:
        self.dense, self.data = dense, data

        def correct(network: nn.Module) -> torch.Tensor:
            known = network is dense
            return kept_correct_tests(dense, data, cache) if known else correct_tests(network, data)

        self._correct = once_per_network(correct)

    def __len__(self) -> int:
        return len(self.data.test)

    def score(self, network: nn.Module) -> float:
        return share(self._correct(network))

    def values(self, network: nn.Module) -> Array:
        """Return the mask of the images that are classified right, (N,)."""
        right: Array = self._correct(network).numpy().astype(np.float64)
        return right

    def collapsed(self, network: nn.Module, score: float) -> str | None:
        del network
        guessing = guessing_share(self.data.heldout.y)
        return accuracy_collapse(score, self.score(self.dense), guessing, len(self))


class ImageInputs(FileInputs):
    """Images of a dataset: held-out ones verify a file, test images score it."""

    def __init__(self, data: ImageData, options: LatencyOptions) -> None:
        self.data, self.options = data, options
        self.shape = data.input_shape
        self.preprocessing = data.preprocessing if options.preprocess else None

    def ranges(self) -> Iterator[Inputs]:
        return range_images(self.data)

    def feeds(self) -> Iterator[Batch]:
        return range_batches(self.data, self.options)

    @property
    def identity(self) -> object:
        """The held-out images, the test images, and how the file takes them."""
        data = self.data
        images = [data.heldout.digest(), data.test.for_report().digest(), data.preprocessing.to_dict()]
        return [*images, self.options.preprocess]

    def scores(self, path: Path) -> dict[str, float]:
        walk = file_batches(self.data.test.for_report(), ONNX_TEST_BATCH, self.data, self.options)
        return {"accuracy": onnx_accuracy(path, walk)}

    def worth(self, baseline: Path, path: Path) -> dict[str, float]:
        del baseline
        return self.scores(path)

    def score(self, baseline: Path) -> Callable[[Session], float]:
        del baseline

        def accuracy(session: Session) -> float:
            right = [session.run(x.numpy())[0].argmax(1) == y.numpy() for x, y in self._compared()]
            return float(np.concatenate(right).mean())

        return accuracy

    def verified(
        self, network: nn.Module, path: Path, scratch: Path, runtime: str = DEFAULT_RUNTIME
    ) -> tuple[float, float | None]:
        data, options, inside = self.data, self.options, self.preprocessing
        images = data.heldout.first(_VERIFIED)
        (inputs, _), *_ = file_batches(images, len(images), data, options)
        if not is_rounded(network):
            return verify_onnx(network, path, inputs, preprocessing=inside, runtime=runtime), None
        plain, floats = without_rounding(copied(network)), scratch / "floats.onnx"
        export_onnx(plain, floats, self.shape, opset=options.opset, preprocessing=inside)
        difference = verify_onnx(plain, floats, inputs, preprocessing=inside, runtime=runtime)

        def agreement_with(file: Path) -> float:
            as_read = (x for x, _ in self._compared())
            few = compared_images(data)
            normalised = (x for x, _ in batches(few, COMPARED_BATCH, mean=data.mean, std=data.std))
            return class_agreement(network, file, zip(normalised, as_read, strict=True), runtime=runtime)

        # Two roundings of one network drift apart, step by step, as far as rounding moves it at all.
        agreement, unrounded = agreement_with(path), agreement_with(floats)
        floats.unlink()
        if agreement < min(_LEAST_AGREEMENT, unrounded - _SLACK):
            raise ExportError(
                f"in {runtime}, the file in integers gives the class of its simulation in PyTorch on "
                f"{100 * agreement:.1f} % of {len(compared_images(data))} held-out images, the network "
                f"without rounding on {100 * unrounded:.1f} %. Do not use the file there; leave out the "
                "precision (decomposition.precisions=[float32])"
            )
        return difference, agreement

    def _compared(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return file_batches(compared_images(self.data), COMPARED_BATCH, self.data, self.options)


def compared_images(data: ImageData) -> Images:
    """Return the held-out images on which classes are compared, at `COMPARED_BATCH` a time."""
    return data.heldout.first(_COMPARED_IMAGES)


def range_batches(data: ImageData, options: LatencyOptions) -> Iterator[np.ndarray]:
    """Yield the held-out images that set ranges of activations, as the file takes them."""
    images = images_for_ranges(data)
    return (x.numpy() for x, _ in file_batches(images, min(options.batch, len(images)), data, options))


def file_batches(
    images: Images, batch_size: int, data: ImageData, options: LatencyOptions
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images as the file takes them, normalised or as bytes with channels last, and their labels."""
    if not options.preprocess:
        yield from batches(images, batch_size, mean=data.mean, std=data.std)
        return
    for part in torch.arange(len(images)).split(batch_size):
        some = images.subset(part)
        yield some.x.permute(0, 2, 3, 1), some.y


def with_preprocessing(plan: CompressionPlan, preprocessing: Preprocessing) -> CompressionPlan:
    """Return the plan with the preprocessing of the network's images in its metadata (`preprocessing`)."""
    noted = {**plan.metadata, "preprocessing": preprocessing.to_dict()}
    return dataclasses.replace(plan, metadata=noted)


BATCH = 64
_LARGEST_ERROR, _ERROR_SLACK = 0.05, 0.02


class HeldoutScore:
    """The score of a network on held-out inputs: its accuracy, or its agreement with the dense network."""

    def __init__(self, dense: nn.Module, sample: Sample, what: str = "heldout") -> None:
        self.sample, self.what = sample, what
        self._batches = split(sample.inputs, BATCH)
        self._known = _outputs(dense, self._batches)
        for index, outputs in enumerate(self._known.batches):
            for name, values in zip(self._known.names, outputs, strict=True):
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    last = min(len(sample), (index + 1) * BATCH) - 1
                    raise DataError(
                        f"{what}: the network's own {name} is NaN or infinite for some of the inputs "
                        f"{index * BATCH} to {last}; check its weights, and how inputs are normalised"
                    )
        self.by_class = sample.scores_classes(dense)
        self.output_scores = output_scores(self._known, self.by_class)
        self._labelled = sample.labelled()

    def __call__(self, network: nn.Module) -> float:
        """Return the accuracy where there are labels of classes, else the agreement; 1 at most."""
        return (
            float(self._right(network).mean()) if self.by_class else agreement_score(self.agreement(network))
        )

    def values(self, network: nn.Module) -> Array | None:
        return (
            self._right(network)
            if self.by_class
            else agreement_values(self.agreement(network), len(self.sample))
        )

    @property
    def unit(self) -> str:
        """Name of the score: `accuracy`, or `agreement` with the dense network."""
        return "accuracy" if self.by_class else "agreement"

    def _right(self, network: nn.Module) -> Array:
        """Return the mask of the labelled inputs that are classified right."""
        outputs = _outputs(network, split(self._labelled.inputs, BATCH))
        right: Array = _classes(outputs) == self._labelled.labels.numpy()
        return right

    def agreement(self, network: nn.Module) -> list[OutputAgreement]:
        return agreement(self._known, _outputs(network, self._batches).batches, self.output_scores)

    def collapsed(self, network: nn.Module) -> str | None:
        if self.by_class:
            share = guessing_share(self._labelled.labels)
            dense = _class_accuracy(self._known, self.sample)
            return accuracy_collapse(self(network), dense, share, len(self._labelled))
        return collapse(self.agreement(network), constant_agreement(self._known), len(self.sample))


class OwnMeasure:
    """The score of a user's network, by `judge` or on `heldout`; inputs in `unseen` certify a loss."""

    unit = "score"

    def __init__(self, judge: Score, heldout: HeldoutScore, unseen: HeldoutScore | None = None) -> None:
        self.judge, self.heldout, self.unseen = judge, heldout, unseen
        self.score = once_per_network(partial(answer, judge))

    def __len__(self) -> int:
        return len(self.heldout.sample)

    @property
    def basis(self) -> Basis:
        """The held-out inputs, which choose no plan, or those of the user's own score."""
        if self.judge is not self.heldout:
            return OWN_SCORE
        measure = self.heldout if self.unseen is None else self.unseen
        return Basis(measure.unit, f"{measure.what} inputs")

    def values(self, network: nn.Module) -> Array | None:
        if self.judge is self.heldout:
            return None if self.unseen is None else self.unseen.values(network)
        return values_of_inputs(self.score(network))

    def collapsed(self, network: nn.Module, score: float) -> str | None:
        del score
        return self.heldout.collapsed(network)


class OwnInputs(FileInputs):
    def __init__(
        self, model: nn.Module, calibration: Sample, heldout: Sample, options: LatencyOptions
    ) -> None:
        self.shape, self.options = input_shape_of(heldout.inputs), options
        self.model, self.calibration, self.heldout = model, calibration, heldout
        wanted = torch.arange(options.batch) % len(calibration)
        self._timed = feed_of(model, rows(calibration.inputs, wanted))
        self._by_class = heldout.scores_classes(model)

    @property
    def timed(self) -> Batch:
        return self._timed

    def ranges(self) -> Iterator[Inputs]:
        device = model_device(self.model)
        return (mapped(lambda x: x.to(device), each) for each in split(self.calibration.inputs, BATCH))

    def feeds(self) -> Iterator[Batch]:
        return (feed_of(self.model, each) for each in split(self.calibration.inputs, BATCH))

    def agreement(self, baseline: Path, path: Path) -> list[OutputAgreement]:
        return self._agreement(self._answers(baseline), self._answers(path).batches)

    def score(self, baseline: Path) -> Callable[[Session], float]:
        known = self._answers(baseline)

        def agreeing(session: Session) -> float:
            return agreement_score(self._agreement(known, self._run(session)))

        return agreeing

    def worth(self, baseline: Path, path: Path) -> dict[str, float]:
        found = self._answers(path)
        worth = {"agreement": agreement_score(self._agreement(self._answers(baseline), found.batches))}
        if self._by_class:
            worth["score"] = _class_accuracy(found, self.heldout)
        return worth

    def verified(
        self, network: nn.Module, path: Path, scratch: Path, runtime: str = DEFAULT_RUNTIME
    ) -> tuple[float, float | None]:
        some = rows(self.heldout.inputs, slice(_VERIFIED))
        if not is_rounded(network):
            return verify_onnx(network, path, some, runtime=runtime), None
        plain, floats = without_rounding(copied(network)), scratch / "floats.onnx"
        export_onnx(plain, floats, self.shape)
        difference = verify_onnx(plain, floats, some, runtime=runtime)
        simulated = _outputs(network, split(self.heldout.inputs, BATCH))
        # Errors, not classes: on few inputs a single near tie would decide.
        file, exact = self._answers(path, runtime), self._answers(floats, runtime)
        error, unrounded, moved = (
            max(each.largest_error for each in self._agreement(known, found.batches))
            for known, found in ((simulated, file), (simulated, exact), (exact, file))
        )
        floats.unlink()
        allowed = min(max(_LARGEST_ERROR, unrounded + _ERROR_SLACK), allowed_error(unrounded, moved))
        if not error <= allowed:  # also true of NaN
            raise ExportError(
                f"in {runtime}, the file in integers differs from its simulation in PyTorch by {error:.3f} "
                f"of the outputs on the held-out inputs, the network without rounding by {unrounded:.3f}. "
                "Do not use the file; leave out the precision (precisions=('float32',))"
            )
        return difference, 1 - error

    def _agreement(self, known: Outputs, found: Iterable[Sequence[Array]]) -> list[OutputAgreement]:
        return agreement(known, found, output_scores(known, self._by_class))

    def _answers(self, path: Path, runtime: str = DEFAULT_RUNTIME) -> Outputs:
        """Return a file's outputs on the held-out inputs."""
        names = [str(each.name) for each in load_model(path).graph.outputs]
        return Outputs(names, self._run(open_session(path, runtime=runtime)))

    def _run(self, session: Session) -> list[Sequence[Array]]:
        return [session.run(feed_of(self.model, each)) for each in split(self.heldout.inputs, BATCH)]


def _outputs(network: nn.Module, batches: Iterable[Inputs]) -> Outputs:
    found = [network_outputs(network, each) for each in batches]
    return Outputs(output_names(list(found[0])), [list(each.values()) for each in found])


def _classes(outputs: Outputs) -> Array:
    classes: Array = np.concatenate([scores.argmax(1) for (scores,) in outputs.batches])
    return classes


def _class_accuracy(outputs: Outputs, sample: Sample) -> float:
    """Return the share of the labelled inputs that get the class of their label."""
    labels = sample.labels.numpy()
    return float((_classes(outputs) == labels)[labels != UNLABELLED].mean())
