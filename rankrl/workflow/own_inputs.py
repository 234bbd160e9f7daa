"""A user's own inputs: what is fitted to, what is held out, how good a network is on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import Inputs, run_model, without_rounding
from decomposition.calibration_set import CalibrationInputs, labelled_batches
from decomposition.cost import evaluation_mode
from decomposition.inputs import count_inputs, input_shape_of, joined, mapped, rows, split
from decomposition.outputs import Place, leaves
from decomposition.rounding import is_rounded
from decomposition.surgery import copied
from rankrl.agreement import OutputAgreement, agreement, agreement_score, constant_agreement
from rankrl.collapse import accuracy_collapse, collapse
from rankrl.device import model_device
from rankrl.errors import ConfigError, DataError
from rankrl.export import ExportError, export_onnx, verify_onnx
from rankrl.export.feeds import ONLY_INPUT, feed_of
from rankrl.export.outputs import output_names
from rankrl.export.runtimes import Batch
from rankrl.onnx_graph.network import Array, OnnxNetwork
from rankrl.training.chance import guessing_share
from rankrl.workflow.file_export import FileInputs

BATCH = 64
_VERIFIED_INPUTS = 64
_LARGEST_ERROR, _SLACK = 0.05, 0.02


@dataclass(frozen=True)
class Sample:
    """Inputs, with their labels if there are any.

    Attributes:
        inputs: One batch of all of them, on the CPU.
        labels: First axis like the inputs'; or None.
    """

    inputs: Inputs
    labels: Tensor | None = None

    @classmethod
    def read(cls, data: CalibrationInputs, model: nn.Module, what: str) -> Sample:
        """Read inputs into memory: a tensor, a tuple or a dict of tensors, or batches of such.

        Args:
            data: The inputs; batches may come in pairs with labels.
            model: What takes them.
            what: What they are, for messages.

        Raises:
            DataError: There are none, or only some of them have labels.
            DecompositionError: They are no inputs, or of different shapes.
        """
        batches = labelled_batches(data, model)
        if not batches or sum(count_inputs(batch) for batch, _ in batches) == 0:
            raise DataError(f"{what} holds no inputs; give a few hundred")
        labels = [labels for _, labels in batches if labels is not None]
        if labels and (len(labels) < len(batches) or not all(isinstance(y, Tensor) for y in labels)):
            raise DataError(
                f"{what}: labels must be one tensor for each batch, or be left out of all of them"
            )
        inputs = mapped(lambda x: x.detach().cpu(), joined([batch for batch, _ in batches]))
        found = torch.cat([y.detach().cpu() for y in labels]) if labels else None
        if found is not None and len(found) != count_inputs(inputs):
            raise DataError(f"{what} holds {count_inputs(inputs)} inputs, but {len(found)} labels")
        return cls(inputs, found)

    def __len__(self) -> int:
        return count_inputs(self.inputs)

    def part(self, index: Tensor) -> Sample:
        """Return some of them."""
        return Sample(rows(self.inputs, index), None if self.labels is None else self.labels[index])

    def parted(self, heldout: float, seed: int) -> tuple[Sample, Sample]:
        """Return what is left and what is held out, drawn at random.

        Raises:
            DataError: There are fewer than two.
        """
        count = len(self)
        if count < 2:
            raise DataError(f"{count} inputs are too few to hold some out; give a few hundred")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        held = min(max(1, round(heldout * count)), count - 1)
        return self.part(order[held:].sort().values), self.part(order[:held].sort().values)

    @property
    def has_classes(self) -> bool:
        """Whether the labels are numbers of classes."""
        return self.labels is not None and self.labels.ndim == 1 and not self.labels.is_floating_point()


class HeldoutScore:
    """How good a network is on held-out inputs: its accuracy, or its agreement with the dense network.

    Args:
        dense: The dense network.
        sample: The held-out inputs.
    """

    def __init__(self, dense: nn.Module, sample: Sample) -> None:
        self.sample = sample
        self._batches = split(sample.inputs, BATCH)
        self._known = _Answers.of(dense, self._batches)
        scores = self._known.answers[0][0] if self._known.answers[0] else np.zeros(0)
        self.by_class = sample.has_classes and scores.ndim == 2 and len(self._known.answers[0]) == 1

    def __call__(self, network: nn.Module) -> float:
        """Return the accuracy where there are labels of classes, else the agreement; 1 at most."""
        if not self.by_class or self.sample.labels is None:
            return agreement_score(self.agreement(network))
        (classes,) = zip(*_Answers.of(network, self._batches).answers, strict=True)
        found = np.concatenate(classes).argmax(1)
        return float((found == self.sample.labels.numpy()).mean())

    def agreement(self, network: nn.Module) -> list[OutputAgreement]:
        """Return how far each output agrees with the dense network's."""
        answers = _Answers.of(network, self._batches)
        return agreement(self._known, answers, range(len(self._batches)))

    def collapsed(self, network: nn.Module) -> str | None:
        """Return what to tell a reader if a network answers no better than a constant, else None."""
        if self.by_class and self.sample.labels is not None:
            share, known = guessing_share(self.sample.labels), self._known.answers
            dense = np.concatenate([each[0].argmax(1) for each in known])
            baseline = float((dense == self.sample.labels.numpy()).mean())
            return accuracy_collapse(self(network), baseline, share, len(self.sample))
        constant = constant_agreement(self._known, range(len(self._batches)))
        return collapse(self.agreement(network), constant, len(self.sample))


class OwnInputs(FileInputs):
    """A user's inputs, for the file of a network.

    Args:
        model: The network before it was compressed.
        calibration: What ranges of activations are set on.
        heldout: What files are verified on.
        batch: Inputs of a timed batch.
    """

    def __init__(self, model: nn.Module, calibration: Sample, heldout: Sample, batch: int) -> None:
        self.shape = input_shape_of(heldout.inputs)
        self.model, self.calibration, self.heldout = model, calibration, heldout
        wanted = torch.arange(batch) % len(calibration)
        self._timed = feed_of(model, rows(calibration.inputs, wanted))

    @property
    def timed(self) -> Batch:
        """A batch of real inputs."""
        return self._timed

    def ranges(self) -> Iterator[Inputs]:
        """Walk through the calibration inputs on the network's device."""
        device = model_device(self.model)
        return (mapped(lambda x: x.to(device), each) for each in split(self.calibration.inputs, BATCH))

    def feeds(self) -> Iterator[Batch]:
        """Walk through the same as the file takes them."""
        return (feed_of(self.model, each) for each in split(self.calibration.inputs, BATCH))

    def agreement(self, baseline: Path, path: Path) -> list[OutputAgreement]:
        """Return how far the outputs of one file agree with another's on the held-out inputs."""
        return self._agreement(self._answers(baseline), path)

    def verified(self, network: nn.Module, path: Path, scratch: Path) -> tuple[float, float | None]:
        """Compare a file with its network on held-out inputs."""
        some = rows(self.heldout.inputs, slice(_VERIFIED_INPUTS))
        if not is_rounded(network):
            return verify_onnx(network, path, some), None
        plain, floats = without_rounding(copied(network)), scratch / "floats.onnx"
        export_onnx(plain, floats, self.shape)
        difference = verify_onnx(plain, floats, some)
        # Two roundings of one network drift apart, step by step, as far as rounding moves it at all.
        simulated = _Answers.of(network, split(self.heldout.inputs, BATCH))
        # Errors, not classes: of few inputs, a single near tie would decide.
        error, unrounded = (
            max(each.error for each in self._agreement(simulated, file)) for file in (path, floats)
        )
        floats.unlink()
        if not error <= max(_LARGEST_ERROR, unrounded + _SLACK):  # also true of NaN
            raise ExportError(
                f"the file in integers differs from its simulation in PyTorch by {error:.3f} of the outputs "
                f"on the held-out inputs, the network without rounding by {unrounded:.3f}. Do not use the "
                "file; leave out the precision (precisions=('float32',))"
            )
        return difference, 1 - error

    def _agreement(self, known: _Answers, path: Path) -> list[OutputAgreement]:
        return agreement(known, self._answers(path), range(len(known.answers)))

    def _answers(self, path: Path) -> _Answers:
        """Return what a file says to the held-out inputs."""
        session = OnnxNetwork.load(path).session()
        feeds = (feed_of(self.model, each) for each in split(self.heldout.inputs, BATCH))
        named = ({ONLY_INPUT: feed} if isinstance(feed, np.ndarray) else feed for feed in feeds)
        return _Answers(session.output_names, [session.run(feed) for feed in named])


@dataclass(frozen=True)
class _Answers:
    """Outputs that are known, by the number of their batch.

    Attributes:
        output_names: Names of the outputs.
        answers: The outputs of every batch.
    """

    output_names: list[str]
    answers: Sequence[list[Array]]

    @classmethod
    def of(cls, network: nn.Module, batches: Iterable[Inputs]) -> _Answers:
        """Return what a network answers to batches of inputs."""
        found = [_outputs(network, each) for each in batches]
        return cls(output_names(list(found[0])), [list(each.values()) for each in found])

    def run(self, feed: int) -> list[Array]:
        """Return the outputs of a batch."""
        return self.answers[feed]


def _outputs(network: nn.Module, inputs: Inputs) -> dict[Place, Array]:
    """Return all tensors that a network returns, in order, as arrays, by their places."""
    device = model_device(network)
    with evaluation_mode(network):
        output = run_model(network, mapped(lambda x: x.to(device), inputs))
    tensors = {place: y for place, y in leaves(output) if isinstance(y, Tensor)}
    if not tensors:
        raise ConfigError("the network returns no tensor, so that nothing can be compared; give score=")
    return {p: (y.float() if y.is_floating_point() else y).cpu().numpy() for p, y in tensors.items()}
