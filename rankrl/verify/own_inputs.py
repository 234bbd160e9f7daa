"""Score networks on a user's held-out inputs, and verify files on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from decomposition import Inputs, without_rounding
from decomposition.network.inputs import input_shape_of, mapped, rows, split
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied
from rankrl.data.sample import UNLABELLED, Sample
from rankrl.device import model_device
from rankrl.errors import DataError
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export import export_onnx, verify_onnx
from rankrl.onnx.export.onnx_file import output_names
from rankrl.onnx.export.tracing import feed_of
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph_edits import Array
from rankrl.onnx.runtimes import Batch, Session
from rankrl.training.accuracy import guessing_share
from rankrl.verify.agreement import (
    OutputAgreement,
    agreement,
    agreement_score,
    agreement_values,
    constant_agreement,
    output_scores,
)
from rankrl.verify.certificate import accuracy_collapse, collapse
from rankrl.verify.fidelity import network_outputs
from rankrl.verify.file_export import FileInputs
from rankrl.verify.simulation import allowed_error

BATCH = 64
_VERIFIED_INPUTS = 64
_LARGEST_ERROR, _SLACK = 0.05, 0.02


class HeldoutScore:
    """The score of a network on held-out inputs: its accuracy, or its agreement with the dense network."""

    def __init__(self, dense: nn.Module, sample: Sample, what: str = "heldout") -> None:
        self.sample, self.what = sample, what
        self._batches = split(sample.inputs, BATCH)
        self._known = _Answers.of(dense, self._batches)
        for index, answers in enumerate(self._known.answers):
            for name, values in zip(self._known.output_names, answers, strict=True):
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    last = min(len(sample), (index + 1) * BATCH) - 1
                    raise DataError(
                        f"{what}: the network's own {name} is NaN or infinite for some of the inputs "
                        f"{index * BATCH} to {last}; check its weights, and how inputs are normalised"
                    )
        self.by_class = sample.scores_classes(dense)
        self.output_scores = output_scores(self._known, range(len(self._batches)), self.by_class)
        self._labelled = sample.labelled()

    def __call__(self, network: nn.Module) -> float:
        """Return the accuracy where there are labels of classes, else the agreement; 1 at most."""
        return (
            float(self._right(network).mean()) if self.by_class else agreement_score(self.agreement(network))
        )

    def values(self, network: nn.Module) -> Array | None:
        """Return the score of every input, shape (N,)."""
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
        answers = _Answers.of(network, split(self._labelled.inputs, BATCH)).answers
        classes = np.concatenate([scores.argmax(1) for (scores,) in answers])
        right: Array = classes == self._labelled.labels.numpy()
        return right

    def agreement(self, network: nn.Module) -> list[OutputAgreement]:
        """Return the agreement of each output with the dense network's."""
        answers = _Answers.of(network, self._batches)
        return agreement(self._known, answers, range(len(self._batches)), self.output_scores)

    def collapsed(self, network: nn.Module) -> str | None:
        """Return a message if a network answers no better than a constant, else None."""
        if self.by_class:
            share, known = guessing_share(self._labelled.labels), self._known.answers
            dense = np.concatenate([each[0].argmax(1) for each in known])
            right = (dense == self.sample.labels.numpy())[(self.sample.labels != UNLABELLED).numpy()]
            return accuracy_collapse(self(network), float(right.mean()), share, len(self._labelled))
        constant = constant_agreement(self._known, range(len(self._batches)))
        return collapse(self.agreement(network), constant, len(self.sample))


class OwnInputs(FileInputs):
    """A user's inputs, for the file of a network."""

    def __init__(self, model: nn.Module, calibration: Sample, heldout: Sample, batch: int) -> None:
        self.shape = input_shape_of(heldout.inputs)
        self.model, self.calibration, self.heldout = model, calibration, heldout
        wanted = torch.arange(batch) % len(calibration)
        self._timed = feed_of(model, rows(calibration.inputs, wanted))
        self._by_class = heldout.scores_classes(model)

    @property
    def timed(self) -> Batch:
        """A batch of real inputs."""
        return self._timed

    def ranges(self) -> Iterator[Inputs]:
        """Yield the calibration inputs on the network's device."""
        device = model_device(self.model)
        return (mapped(lambda x: x.to(device), each) for each in split(self.calibration.inputs, BATCH))

    def feeds(self) -> Iterator[Batch]:
        """Yield the same inputs as the file takes them."""
        return (feed_of(self.model, each) for each in split(self.calibration.inputs, BATCH))

    def agreement(self, baseline: Path, path: Path) -> list[OutputAgreement]:
        """Return the agreement of the outputs of two files on the held-out inputs."""
        return self._agreement(self._answers(baseline), self._answers(path))

    def score(self, baseline: Path) -> Callable[[Session], float]:
        """Return the function that measures an open file's agreement with `baseline` on held-out inputs."""
        known = self._answers(baseline)

        def agreeing(session: Session) -> float:
            feeds = (feed_of(self.model, each) for each in split(self.heldout.inputs, BATCH))
            answers = _Answers(known.output_names, [list(session.run(feed)) for feed in feeds])
            return agreement_score(self._agreement(known, answers))

        return agreeing

    def accuracy(self, path: Path) -> float:
        """Return a file's accuracy on the labelled held-out inputs, a fraction."""
        classes = np.concatenate([scores.argmax(1) for (scores,) in self._answers(path).answers])
        labels = self.heldout.labels.numpy()
        known = labels != UNLABELLED
        return float((classes == labels)[known].mean())

    def verified(self, network: nn.Module, path: Path, scratch: Path) -> tuple[float, float | None]:
        """Compare a file with its network on held-out inputs."""
        some = rows(self.heldout.inputs, slice(_VERIFIED_INPUTS))
        if not is_rounded(network):
            return verify_onnx(network, path, some), None
        plain, floats = without_rounding(copied(network)), scratch / "floats.onnx"
        export_onnx(plain, floats, self.shape)
        difference = verify_onnx(plain, floats, some)
        simulated = _Answers.of(network, split(self.heldout.inputs, BATCH))
        # Errors, not classes: on few inputs a single near tie would decide.
        file, exact = self._answers(path), self._answers(floats)
        error, unrounded, moved = (
            max(each.largest_error for each in self._agreement(known, found))
            for known, found in ((simulated, file), (simulated, exact), (exact, file))
        )
        floats.unlink()
        allowed = min(max(_LARGEST_ERROR, unrounded + _SLACK), allowed_error(unrounded, moved))
        if not error <= allowed:  # also true of NaN
            raise ExportError(
                f"the file in integers differs from its simulation in PyTorch by {error:.3f} of the outputs "
                f"on the held-out inputs, the network without rounding by {unrounded:.3f}. Do not use the "
                "file; leave out the precision (precisions=('float32',))"
            )
        return difference, 1 - error

    def _agreement(self, known: _Answers, found: _Answers) -> list[OutputAgreement]:
        batches = range(len(known.answers))
        return agreement(known, found, batches, output_scores(known, batches, self._by_class))

    def _answers(self, path: Path) -> _Answers:
        """Return a file's outputs on the held-out inputs."""
        session = OnnxNetwork.load(path).session()
        feeds = (feed_of(self.model, each) for each in split(self.heldout.inputs, BATCH))
        (first, *_) = session.input_names
        named = ({first: feed} if isinstance(feed, np.ndarray) else feed for feed in feeds)
        return _Answers(session.output_names, [session.run(feed) for feed in named])


@dataclass(frozen=True)
class _Answers:
    """Stored outputs, by the number of their batch."""

    output_names: list[str]
    answers: Sequence[list[Array]]

    @classmethod
    def of(cls, network: nn.Module, batches: Iterable[Inputs]) -> _Answers:
        """Store a network's outputs on batches of inputs."""
        found = [network_outputs(network, each) for each in batches]
        return cls(output_names(list(found[0])), [list(each.values()) for each in found])

    def run(self, feed: int) -> list[Array]:
        """Return the outputs of a batch."""
        return self.answers[feed]
