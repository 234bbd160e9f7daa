"""Operations that layers choose from, and how they are fitted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decomposition.fit.fit_options import FitOptions
from rankrl.errors import ConfigError
from rankrl.option_types import check_fields, check_known, check_least
from rankrl.options.search import BudgetOptions

AUTO = "auto"
AUTO_FORMATS = ("cp", "tucker", "tensor_ring", "pifa")
"""Formats that layers choose from with format `AUTO` where nothing is listed."""
FILE_FORMATS = ("cp", "pifa", "spatial_svd", "tucker")
"""The same for nodes of an ONNX file: those that become plain nodes, one behind the other."""
PRECISIONS = ("float32", "int8", "int7", "int8_weights", "int4_weights")
"""Names of what layers may compute with or be stored in (`decomposition.operations`)."""


@dataclass(frozen=True, kw_only=True)
class FittingOptions:
    """Settings of the fits while ranks are chosen.

    Attributes:
        tensorised: Whether channel counts are split into small factors (64 = 4x4x4), for very high
            compression; tensor ring and tensor train alone.
        candidates: Candidate ranks a layer and format at most.
        iterations: L-BFGS iterations of each fit.
        weigh_outputs: Whether errors count by their effect on the network's output (one backward pass, no
            labels; for a file some minutes of forward passes, and its layers count by measured losses in any
            case).
        channels: Fractions of the channels between two layers that may be kept, for example [0.75, 0.5]: the
            first layer loses the others, where the second alone reads them. Empty keeps all of them.
        blocks: Whether whole residual blocks may be removed.
        skip: Layers that stay as they are: names of layers or of modules that hold some, or patterns of such
            names, for example [fc, layer1, "*.downsample.*"].
        only: The only layers that may change, named likewise; empty for all.
    """

    tensorised: bool = False
    candidates: int = 16
    iterations: int = 60
    weigh_outputs: bool = True
    channels: tuple[float, ...] = ()
    blocks: bool = False
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_least("decomposition", self, candidates=1)


@dataclass(frozen=True, kw_only=True)
class DecompositionOptions(FittingOptions):
    """How layers are factorised: format, shape of the weight, candidate ranks, effort of the fits.

    Attributes:
        format: The tensor format; auto for the best of `formats` in every layer.
        formats: What every layer chooses from, with format auto; None for cp, tucker, tensor_ring and pifa,
            in a file cp, pifa, spatial_svd and tucker. Budgets in time or macs leave pifa out.
        precisions: What every layer may compute with or be stored in: float32, int8 (weights and
            activations; int7, with weights of 7 bits, takes its place where export.reduce_range has it so),
            int8_weights, int4_weights. None takes float32 and int8 for budget.latency, budget.bytes and
            budget.memory, else float32. Nodes of a file that cannot compute in integers have int8_weights
            for int8.
        rank_multiple: Ranks are multiples of it: processors compute several channels at a time. None times
            a few for budget.latency and takes what suits this machine, else 1.
        final_iterations: L-BFGS iterations of the fit of each layer of the chosen plan.
        final_starts: Starting points of each of these fits.
        sequential: Fit each layer to the inputs it receives in the compressed network (one pass of twice the
            images through the model); otherwise to those of the dense network.
    """

    # Four starts take four times as long for a tenth of a point (ResNet-56, docs/benchmarks.md).
    PYTHON_ONLY = ("final_starts",)

    format: str = AUTO
    formats: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    rank_multiple: int | None = None
    final_iterations: int = 200
    final_starts: int = 1
    sequential: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("decomposition", self, rank_multiple=1)
        check_known("decomposition.precisions", "precision", self.precisions or (), PRECISIONS)
        if self.precisions == ():
            raise ConfigError(f"decomposition.precisions is empty; choose from {', '.join(PRECISIONS)}")

    @property
    def choices(self) -> tuple[str, ...]:
        """The formats that every layer chooses from."""
        return (self.formats or AUTO_FORMATS) if self.format == AUTO else (self.format,)

    def of_file(self) -> DecompositionOptions:
        """Return the options for the nodes of a file, which choose from `FILE_FORMATS` if none are listed."""
        unlisted = self.format == AUTO and self.formats is None
        return replace(self, formats=FILE_FORMATS) if unlisted else self

    def final_fit(self) -> FitOptions:
        """Return how much work each fit of the chosen plan may do.

        Raises:
            DecompositionError: A number is out of range.
        """
        return FitOptions(self.final_iterations, self.final_starts)


def default_precisions(budget: BudgetOptions) -> tuple[str, ...]:
    """Return the precisions that lower what budgets in time, bytes and memory measure, after float32."""
    measured = any(limit is not None for limit in (budget.latency, budget.bytes, budget.memory))
    return ("float32", "int8") if measured else ("float32",)
