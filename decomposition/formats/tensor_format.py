"""Define the base class of tensor formats, their registry, and the algebra of cores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from decomposition.calibration.metric import Metric
from decomposition.errors import DecompositionError
from decomposition.formats.layers import ContractedLayer, FactorisedLayer, Reshape
from decomposition.formats.tensorly_objects import TensorlyObject
from decomposition.network.geometry import Geometry, WeightModes, plain_modes, tensorised_modes
from decomposition.network.layers import DecomposableModule, LayerSpec
from decomposition.registry import Registry


def leading_left_vectors(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Return the leading left singular vectors as columns, from the smaller Gram matrix, zeros last."""
    rows, columns = matrix.shape
    if rows <= columns:
        vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)[:, :count]
    else:
        right = torch.linalg.eigh(matrix.T @ matrix).eigenvectors.flip(1)[:, :count]
        vectors = torch.linalg.qr(matrix @ right).Q
    if vectors.shape[1] < count:
        vectors = torch.cat([vectors, vectors.new_zeros(rows, count - vectors.shape[1])], dim=1)
    return vectors


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices of a weight, which is not counted among the layer's operations."""
    return torch.bmm(left[None], right[None])[0]


def contract_chain(cores: list[torch.Tensor]) -> torch.Tensor:
    """Contract a chain of cores (left, size, right) to one core (left, product of sizes, right)."""
    result = cores[0]
    for core in cores[1:]:
        merged = product(result.flatten(0, 1), core.flatten(1))
        result = merged.reshape(result.shape[0], -1, core.shape[2])
    return result


def split_chain(tensor: torch.Tensor, sizes: tuple[int, ...], bonds: tuple[int, ...]) -> list[torch.Tensor]:
    """Split a core (left, product of sizes, right) into a chain by truncated SVDs (Oseledets 2011)."""
    left, right = tensor.shape[0], tensor.shape[2]
    rest = tensor.reshape(left, -1)
    cores, bond = [], left
    for size, width in zip(sizes[:-1], bonds, strict=True):
        matrix = rest.reshape(bond * size, -1)
        vectors = leading_left_vectors(matrix, width)
        cores.append(vectors.reshape(bond, size, width))
        rest, bond = vectors.T @ matrix, width
    cores.append(rest.reshape(bond, sizes[-1], right))
    return cores


Cores = list[torch.Tensor]
Ranks = tuple[int, ...]


class LayerForm(NamedTuple):
    """Whether a layer computes or is stored in integers, is nodes of an ONNX graph, spreads positions."""

    in_integers: bool
    stored: bool
    as_nodes: bool
    spreads: bool


class TensorFormat(ABC):
    """A way to write a weight (out, in, kernel) as a product of small cores.

    The weight is linear in each core. A format defines `halves`, the weight's matrix as W = A Q: `Q` maps the
    input patch to a few features, `A` maps the features to the output channels. Where A holds the numbers of
    the first core and no others, `set_output` lets fits eliminate it. A format without such halves defines
    `reconstruct` instead.

    Attributes:
        name: Name in the registry, in plans and on the command line.
        description: One line for listings.
        tensorisable: Whether channel counts may be split into factors.
        own_ranks: Whether candidates give each bond a rank of its own (`spectra`) instead of one for all.
        bonds_in_channels: How many bonds a stage's channel count is the product of: 2 where each runs between
            two of them, as in a ring.
        starts_in_metric: Whether `starter` has a solution that knows the layer's inputs.
        stores_less_alone: Whether it takes as many operations as another format, and only stores less.
        tensorly_kinds: Formats, besides its own, whose objects of tensorly it reads.
        cancels: Whether the terms of the best fit may grow and cancel one another.
        layer: The layer that executes one stage after the other (`chain`); other executions contract cores.
        splits_kernel: Whether the kernel's axes are told apart (`modes.kernel_size`) or are one joint mode.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    tensorisable: ClassVar[bool] = False
    own_ranks: ClassVar[bool] = False
    bonds_in_channels: ClassVar[int] = 1
    starts_in_metric: ClassVar[bool] = False
    splits_kernel: ClassVar[bool] = False
    stores_less_alone: ClassVar[bool] = False
    tensorly_kinds: ClassVar[tuple[str, ...]] = ()
    cancels: ClassVar[bool] = False
    layer: ClassVar[type[FactorisedLayer]] = ContractedLayer

    @abstractmethod
    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Return the largest useful rank of every bond; its length is the number of bonds."""

    @abstractmethod
    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        """Return the shapes of the cores at `ranks`."""

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        """Contract the cores to A (out, features) and Q (features, in * kernel), W = A Q.

        By default A is the identity. Halves with structural zeros would make fits several times slower.
        """
        weight = self.reconstruct(cores, modes).flatten(1)
        return torch.eye(len(weight), dtype=weight.dtype, device=weight.device), weight

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        """Return the cores with A replaced by any `output` (out, features), and Q as it was.

        A is in the first core, on which Q does not depend. Only for plain modes; a format whose A has a
        structure leaves this out.
        """
        raise NotImplementedError

    def free_output(self, modes: WeightModes) -> bool:
        """Tell whether A may be any matrix (`set_output`), so that fits eliminate it."""
        return modes.plain and type(self).set_output is not TensorFormat.set_output

    def two_matrices(self, modes: WeightModes) -> bool:
        """Tell whether its two cores are A and Q, any two matrices: their best fit has a closed form."""
        shapes = self.core_shapes(modes, self.expand(modes, 1))
        if len(shapes) != 2 or not self.free_output(modes):
            return False
        output, features = map(math.prod, shapes)
        return output * modes.columns == features * modes.out_channels

    def same_matrices(self, other: TensorFormat, modes: WeightModes) -> bool:
        """Tell whether both are any two matrices in as many numbers: as a layer they are one."""
        sizes = {each.params(modes, each.expand(modes, 2)) for each in (self, other)}
        return self.two_matrices(modes) and other.two_matrices(modes) and len(sizes) == 1

    @abstractmethod
    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Return the algebraic solution for a weight (out, in, kernel) in the plain Frobenius norm."""

    def starter(
        self, weight: torch.Tensor, modes: WeightModes, metric: Metric | None = None
    ) -> Callable[[Ranks], Cores]:
        """Return a function that computes `start` for many ranks of one weight, sharing the common work.

        Args:
            weight: Weight (out, in, kernel).
            modes: How it is read.
            metric: E[x x'] of the layer's input patches, for formats that have a good solution for it in
                closed form (`starts_in_metric`); `None` for the algebraic solution.
        """
        return lambda ranks: self.start(weight, modes, ranks)

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        """Return cores whose halves are A (out, features) and Q (features, in * kernel); of two matrices."""
        weight = (output @ features).reshape(modes.out_channels, modes.in_channels, modes.kernel)
        return self.start(weight, modes, ranks)

    def conditioned(self, cores: Cores) -> Cores:
        """Rescale cores so that minimising over all but the output's core converges faster."""
        return cores

    def normalised(self, cores: Cores) -> Cores:
        """Rescale cores to the format's customary norms; the weight stays the same."""
        return cores

    def balanced(self, cores: Cores) -> Cores:
        """Rescale cores to the same root mean square; the weight stays the same.

        One learning rate then suits them all.
        """
        cores = self.normalised(cores)
        scales = [core.square().mean().sqrt() for core in cores]
        mean = torch.stack(scales).log().mean().exp()
        if not mean > 0:
            return cores
        return [(core * (mean / scale)).contiguous() for core, scale in zip(cores, scales, strict=True)]

    def build(
        self, dense: DecomposableModule, spec: LayerSpec, modes: WeightModes, ranks: Ranks
    ) -> FactorisedLayer:
        """Make the layer that replaces `dense`, its cores not yet set, in the cheapest execution."""
        execution = self.execution(spec, modes, ranks)
        kind = self.layer if execution == "chain" else ContractedLayer
        return kind(dense, self, modes, ranks, execution)

    @abstractmethod
    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        """Return the MACs for one model input of each way to execute the layer, by its name."""

    def modes(self, spec: LayerSpec, *, tensorised: bool = False) -> WeightModes:
        """Return the modes in which this format reads the layer's weight.

        Raises:
            DecompositionError: If `tensorised` is asked of a format that has no tensorised form.
        """
        if tensorised and not self.tensorisable:
            raise DecompositionError(
                f"format {self.name!r} has no tensorised form; use tensor_ring or tensor_train, or "
                "tensorised=False"
            )
        return tensorised_modes(spec) if tensorised else plain_modes(spec)

    def spectra(
        self, weight: torch.Tensor, modes: WeightModes, metric: Metric | None, root: torch.Tensor | None
    ) -> list[np.ndarray]:
        """Return, for each bond, the energy that each further rank adds; none where bonds share one rank.

        Args:
            weight: Weight (out, in, kernel).
            modes: How it is read.
            metric: E[x x'] of the layer's input patches; `None` for the weight's own energy.
            root: Square root of the output's sensitivity, or `None`.
        """
        return []

    def max_rank(self, modes: WeightModes) -> int:
        """Return the largest feasible single rank."""
        return max(self.max_ranks(modes))

    def expand(self, modes: WeightModes, rank: int) -> Ranks:
        """Expand one rank for the whole layer to one per bond, each capped at its bond's maximum."""
        return tuple(min(rank, largest) for largest in self.max_ranks(modes))

    def check_ranks(self, modes: WeightModes, ranks: Ranks | int, layer: str) -> Ranks:
        """Validate ranks and return one a bond.

        Args:
            modes: The weight's modes.
            ranks: One rank for the layer, or one a bond.
            layer: The layer's name, for the message.

        Returns:
            One rank a bond.

        Raises:
            DecompositionError: If a rank is no integer, below 1 or above the feasible maximum, or if their
                number is wrong.
        """
        largest = self.max_ranks(modes)
        if isinstance(ranks, int) and not isinstance(ranks, bool):
            if not 1 <= ranks <= max(largest):
                raise DecompositionError(
                    f"layer {layer!r}: {self.name} rank {ranks} is outside 1..{max(largest)}; choose a rank "
                    "in that range"
                )
            return self.expand(modes, ranks)
        if not isinstance(ranks, Sequence) or any(type(rank) is not int for rank in ranks):
            raise DecompositionError(
                f"layer {layer!r}: {self.name} ranks must be integers, got {ranks!r}; give one integer from "
                f"1 to {max(largest)} or {len(largest)} of them"
            )
        if len(ranks) != len(largest):
            bonds = "one rank" if len(largest) == 1 else f"{len(largest)} ranks, one a bond"
            raise DecompositionError(
                f"layer {layer!r}: {self.name} takes {bonds}, got {list(ranks)}; give "
                f"[{', '.join(f'1..{most}' for most in largest)}]"
            )
        for rank, most in zip(ranks, largest, strict=True):
            if not 1 <= rank <= most:
                raise DecompositionError(
                    f"layer {layer!r}: {self.name} ranks {tuple(ranks)} are outside 1..{largest} (each its "
                    "own maximum); choose ranks in that range"
                )
        return tuple(ranks)

    def params(self, modes: WeightModes, ranks: Ranks) -> int:
        """Count the core elements at `ranks`, without a bias."""
        return sum(math.prod(shape) for shape in self.core_shapes(modes, ranks))

    def form(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> LayerForm:
        """Derive the form of a layer from the one that `build` makes.

        Layers of the same modes and execution are of one form: one of them is made, on the meta device.
        """
        key = modes, self.execution(spec, modes, ranks)
        if key not in self._forms:
            axes = len(spec.kernel_size)
            sliding = spec.kernel_size, spec.stride, (0,) * axes, (1,) * axes
            geometry = Geometry(modes.out_channels, modes.in_channels, *sliding, bias=spec.bias)
            layer = self.build(geometry.dense(device="meta"), spec, modes, ranks)
            row = layer.row()
            spreads = not (layer.pivoted or (row and isinstance(row[-1], Reshape)))
            self._forms[key] = LayerForm(layer.staged, bool(layer.weight_holders()), bool(row), spreads)
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[WeightModes, str], LayerForm]:
        return {}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        """Count the first axes of all weights that the layer holds: its cores, unless they are stages."""
        return sum(shape[0] for shape in self.core_shapes(modes, ranks))

    def macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        """Count the multiply-accumulates for one model input of the cheapest way to execute the layer."""
        return min(self.stage_macs(spec, modes, ranks).values())

    def execution(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> str:
        """Name the cheapest way to execute the layer by MACs at its real input size."""
        macs = self.stage_macs(spec, modes, ranks)
        return min(macs, key=lambda way: macs[way])

    def to_tensorly(self, cores: Cores, modes: WeightModes) -> Any:
        """Return the cores as tensorly's object for this format, a tensor of shape `modes.sizes`.

        Raises:
            DecompositionError: If tensorly has none.
        """
        raise self._unknown_to_tensorly()

    def from_tensorly(self, tensor: TensorlyObject, modes: WeightModes) -> tuple[Cores, Ranks, WeightModes]:
        """Return the cores that an object of tensorly stands for, their ranks and how they read the weight.

        Args:
            tensor: The object (`read_tensorly`).
            modes: The plain modes of the layer's weight.

        Raises:
            DecompositionError: If tensorly has no object for this format, or it is of another shape.
        """
        raise self._unknown_to_tensorly()

    def _unknown_to_tensorly(self) -> DecompositionError:
        refusal = TensorFormat.to_tensorly
        known = [name for name in list_formats() if type(_FORMATS[name]).to_tensorly is not refusal]
        return DecompositionError(
            f"tensorly has no object for the format {self.name!r}; it has one for {', '.join(known)}"
        )

    def reconstruct(self, cores: Cores, modes: WeightModes) -> torch.Tensor:
        """Contract the cores to the weight (out, in, kernel)."""
        output, features = self.halves(cores, modes)
        weight = torch.einsum("op,pd->od", output, features)
        return weight.reshape(modes.out_channels, modes.in_channels, modes.kernel)


_FORMATS: Registry[TensorFormat] = Registry("format", DecompositionError)

_Class = TypeVar("_Class", bound=type[TensorFormat])


def register_format(cls: _Class) -> _Class:
    """Class decorator: add a format to the registry under its `name`.

    Raises:
        DecompositionError: If the name is taken, or the class does not say what its cores stand for.
    """
    if cls.halves is TensorFormat.halves and cls.reconstruct is TensorFormat.reconstruct:
        raise DecompositionError(
            f"format {cls.name!r} does not say what its cores stand for; define halves or reconstruct"
        )
    _FORMATS.add(cls.name, cls(), cls.description)
    return cls


def list_formats() -> list[str]:
    """Return the names of all registered formats."""
    return _FORMATS.names()


def get_format(name: str) -> TensorFormat:
    """Return the format called `name`.

    Raises:
        DecompositionError: If there is none of that name.
    """
    return _FORMATS[name]
