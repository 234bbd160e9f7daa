"""Label the inputs and outputs of layers: convolutions, linear layers and norms."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from pruning.call import Call
from pruning.channel_walk import ChannelWalk
from pruning.gated_norms import JOINT_NORMS, norm_arguments
from pruning.label_arrays import label_axes, label_row, labels_in, slices
from pruning.labels import Labels
from pruning.operations import CONVOLUTIONS, channel_axis

LAYERS: dict[str, type[nn.Module]] = {
    **{f"conv{dims}d": kind for dims, kind in enumerate(CONVOLUTIONS, 1)},
    "linear": nn.Linear,
    "batch_norm": _NormBase,
    "instance_norm": _NormBase,
    "group_norm": nn.GroupNorm,
    "prelu": nn.PReLU,
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
}
"""The layers whose parameters can be cut, by the operation that they call."""

WEIGHTED = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Those of them that mix channels."""


_SHARED = "{!r} is shared: it is called {} in one forward pass"


class LayerLabels:
    """Labels the outputs of layers and records their channels in a channel walk."""

    def __init__(self, walk: ChannelWalk, model: nn.Module) -> None:
        self.walk = walk
        self._labels = walk.labels
        self._shared = _layers_with_shared_parameters(model)
        self._calls: Counter[str] = Counter()
        self._obstacles: dict[str, str] = {}

    def protect(self, name: str, obstacle: str) -> None:
        """Protect all channels that a layer makes and reads, in all of its calls."""
        self._obstacles.setdefault(name, obstacle)
        walk = self.walk
        for rows in (walk.producers, walk.readers, walk.norms, walk.joint_norms):
            self._labels.protect(rows.get(name, ()), obstacle)
        for row in walk.grouped.get(name, ()):
            self._labels.protect(row, obstacle)

    def count_calls(self) -> None:
        """Add the number of calls to the obstacles of shared layers, at the end of the walk."""
        for name, calls in self._calls.items():
            if calls > 1:
                self._labels.reword(
                    _SHARED.format(name, "more than once"), _SHARED.format(name, f"{calls} times")
                )

    def output(self, call: Call, name: str, layer: nn.Module) -> list[Tensor] | None:
        """Return the label array of a layer's output; None if the axis of its input's channels is unknown."""
        (array, shape), *_ = call.arrays.values()
        operation, ndim = call.name, len(shape)
        axis = ndim + channel_axis(layer) if operation in WEIGHTED else 1
        axis = ndim - 1 if operation in JOINT_NORMS else axis
        if not 0 <= axis < ndim:
            return None
        self._notice(name, layer, operation, axis)
        if any(label_axis != axis for label_axis in label_axes(array)) and self._any_free(array):
            if array.shape[axis] > 1 or operation not in ("linear", "batch_norm", "prelu", *JOINT_NORMS):
                return None
            # The layer works along another axis, on each channel separately.
            self.protect(name, f"{name!r} works along another axis than the channels before it")
            if operation == "linear":
                self._connect(name, layer, self._labels.new(shape[axis], self._obstacles[name]))
            return [array]
        row = _row(array, axis, shape[axis])
        if name in self._obstacles:
            self._labels.protect(row, self._obstacles[name])
        if operation not in WEIGHTED:
            if operation == "group_norm":
                self._join_groups(row, call.args[1], f"{name!r} normalises all of its channels together")
            if operation in JOINT_NORMS:
                self.walk.joint_norms.setdefault(name, row)
            elif operation != "prelu" or layer.num_parameters != 1:
                self.walk.norms.setdefault(name, row)
        elif operation == "linear" or layer.groups == 1:
            row = self._connect(name, layer, row)
        else:
            row = self._grouped(name, layer, row)
        return [label_row(row, axis, ndim)]

    def _notice(self, name: str, layer: nn.Module, operation: str, axis: int) -> None:
        """Record the obstacle, if any, to removing channels of this layer."""
        self._calls[name] += 1
        weight = layer._parameters.get("weight")
        if self._calls[name] > 1:
            self.protect(name, _SHARED.format(name, "more than once"))
        elif name in self._shared:
            self.protect(name, f"{name!r} shares a parameter with {self._shared[name]!r}")
        elif weight is None and (parametrize.is_parametrized(layer) or operation in WEIGHTED):
            self.protect(name, f"the weight of {name!r} is parametrised; remove the parametrisation first")
        elif operation.startswith("conv") and axis == 0:
            self.protect(name, f"{name!r} is a convolution on input without a batch axis")

    def _connect(self, name: str, layer: nn.Module, row: Labels) -> Labels:
        """Record the input labels of a dense layer and return its output labels."""
        self.walk.readers.setdefault(name, row)
        # Later calls keep the labels of the first one: they are of the same weights.
        if name not in self.walk.producers:
            outputs = int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]
            self.walk.producers[name] = self._labels.new(outputs, self._obstacles.get(name))
        return self.walk.producers[name]

    def _grouped(self, name: str, layer: nn.Module, row: Labels) -> Labels:
        """Return the output labels of a grouped convolution, whose groups are removed as a whole."""
        groups = int(layer.groups)  # type: ignore[arg-type]
        outputs = int(layer.out_channels) // groups  # type: ignore[arg-type]
        self._join_groups(row, groups, f"all channels of {name!r} are one group")
        made = tuple(label for label in row[:: len(row) // groups] for _ in range(outputs))
        self.walk.grouped.setdefault(name, (row, made))
        return made

    def _join_groups(self, row: Labels, groups: int, alone: str) -> None:
        """Join the channels within each of `groups` equal runs of consecutive channels."""
        if groups == 1:
            self._labels.protect(row, alone)
        size = len(row) // groups
        for start in range(0, len(row), size):
            members = row[start : start + size]
            self._labels.join([members[0]] * size, members)

    def _any_free(self, array: Tensor) -> bool:
        return any(self._labels.obstacle(label) is None for label in labels_in(array))


def calls_with_its_own(call: Call) -> bool:
    """Tell whether a layer's call uses its own parameters, which a removal cuts."""
    held = call.module._parameters
    arguments = norm_arguments(call.function, call.args, call.kwargs)
    if arguments is not None:  # with several normalised axes no single one can be cut
        shape = call.module.normalized_shape
        own = arguments.get("normalized_shape") is shape and len(shape) == 1
        return own and all(arguments.get(key) is held.get(key) for key in ("weight", "bias"))
    weight = held.get("weight")
    return call.name not in WEIGHTED or weight is None or (len(call.args) > 1 and call.args[1] is weight)


def _row(array: Tensor, axis: int, count: int) -> Labels:
    """Return the labels along one axis, the only one along which channels may go."""
    return tuple(labels_in(slices(array, axis)[:, 0].expand(count)))


def _layers_with_shared_parameters(model: nn.Module) -> dict[str, str]:
    """Return the layers that share a parameter, each with the name of the other layer."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            other = first.setdefault(id(parameter), name)
            if other != name:
                shared[name], shared[other] = other, name
    return shared
