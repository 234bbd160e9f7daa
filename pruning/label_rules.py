"""Label the channels of what operations and layers put out, and of what moves numbers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from pruning.channel_walk import (
    CONVOLUTIONS,
    LIKE_THE_FIRST,
    MOVEMENTS,
    POINTWISE,
    REDUCTIONS,
    SPATIAL,
    TRANSPOSITIONS,
    Call,
    ChannelCount,
    ChannelLabels,
    ChannelPad,
    ChannelWalk,
    Labels,
    Removal,
    after_removal,
    axes_of,
    channel_axis,
    compressed,
    label_axes,
    label_row,
    labels_in,
    pad_arguments,
    rooted,
    slices,
)
from pruning.masks import JOINT_NORMS, norm_arguments

Labelled = tuple[Tensor, torch.Size]
"""The label array and the shape of a tensor."""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the leaves of a call's arguments, inside their containers."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(bound, change) for bound in (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(mapped(item, change) for item in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a call's arguments or results: everything but containers."""
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def moved(
    labels: ChannelLabels,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Mapping[int, Labelled],
) -> list[Tensor] | None:
    """Return the label arrays of an operation's outputs, joining labels of its inputs where needed."""

    def run(removal: Removal | None) -> list[Tensor] | None:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) not in operands:
                    return leaf.detach().cpu()  # indices of labels, which are on the CPU
                array, shape = operands[id(leaf)]
                rest = array.expand(shape) if removal is None else removal.rest(array, shape)
                if rest is None:
                    raise ValueError("what goes is no whole slice")
                # Floats: every operation takes them, and small integers are exact.
                return rest.float().contiguous()
            return after_removal(leaf, removal) if isinstance(leaf, ChannelCount) else leaf

        return [leaf.long() for leaf in leaves(function(*mapped(args, change), **mapped(kwargs, change)))]

    try:
        whole = run(None) or []
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # tensors that are indices or types cannot be replaced by labels
    shapes = [array.shape for array in whole]
    outputs = [compressed(array) for array in whole]
    entering = dict.fromkeys(label for array, _ in operands.values() for label in labels_in(array))
    free = [label for label in entering if labels.obstacle(label) is None]
    counted = [leaf.arrays for leaf in leaves((args, kwargs)) if isinstance(leaf, ChannelCount)]
    entered = [*(array for array, _ in operands.values()), *(array for arrays in counted for array in arrays)]
    for coupled in _couplings(labels, entered, outputs):
        if all(_comes_out_right(run, outputs, shapes, removal) for removal in _trials(coupled, free)):
            labels.adopt(coupled)
            return [rooted(array, labels) for array in outputs]
    return None


def _couplings(
    labels: ChannelLabels, entered: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Iterator[ChannelLabels]:
    """Yield couplings to try: none, labels at equal places along an axis, operands of equal size too."""
    yield from _along_axes(labels, outputs)
    coupled = labels.copy()
    rows = [row for row in map(labels_in, entered) if len(row) > 1]
    pairs = [
        (first, second) for first, second in itertools.combinations(rows, 2) if len(first) == len(second)
    ]
    for first, second in pairs:
        coupled.join(first, second)
    if pairs:
        yield from _along_axes(coupled, outputs)


def _along_axes(labels: ChannelLabels, outputs: Sequence[Tensor]) -> Iterator[ChannelLabels]:
    yield labels
    axes = sorted({axis for array in outputs for axis in label_axes(array)}, reverse=True)
    if len(axes) == 1 and len(outputs) == 1:
        return
    for axis in axes:
        sizes = {array.shape[axis] for array in outputs if array.ndim > axis}
        if len(sizes) > 1:
            continue
        coupled = labels.copy()
        together = torch.cat([slices(array, axis) for array in outputs], 1)
        for other in together.unbind(1)[1:]:
            coupled.join(labels_in(together[:, 0]), labels_in(other))
        yield coupled


def _trials(labels: ChannelLabels, free: Sequence[int]) -> Iterator[Removal]:
    """Yield the trial removals: the first unit, the last one, half of them, all but one."""
    units = [root for root in dict.fromkeys(labels.roots(free)) if labels.obstacle(root) is None]
    if len(units) < 2:
        return
    half = random.Random(0).sample(units, len(units) // 2)
    middle = units[len(units) // 2]
    for gone in (units[:1], units[-1:], half, [unit for unit in units if unit != middle]):
        yield Removal(labels, frozenset(gone))


def _comes_out_right(
    run: Callable[[Removal], list[Tensor] | None],
    outputs: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    removal: Removal,
) -> bool:
    try:
        results = run(removal) or []
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # the operation fails on the remaining labels
    expected = [removal.rest(array, shape) for array, shape in zip(outputs, shapes, strict=True)]
    return len(results) == len(expected) and all(
        rest is not None and result.shape == rest.shape and bool((result == rest).all())
        for result, rest in zip(results, expected, strict=True)
    )


class FunctionLabels:
    """Labels the outputs of operations and joins the labels of channels that they combine."""

    def __init__(self, walk: ChannelWalk) -> None:
        self.walk = walk
        self._labels = walk.labels

    def outputs(self, call: Call, outputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the label array of each output; None if the operation is not supported."""
        name = call.name if call.name.startswith("__") else call.name.rstrip("_")
        if name in ("cat", "concat", "concatenate") and (joined := self._concatenated(call)) is not None:
            return [joined]
        if name in MOVEMENTS:
            return self._moved(call, outputs)
        self.fix_counts(call)
        binary = name in ("max", "min") and len(call.args) > 1 and isinstance(call.args[1], Tensor)
        if name in POINTWISE or binary:
            array = self._pointwise(call, outputs[0])
        else:
            array = self._alone(name, call, outputs[0])
        return None if array is None else [array] * len(outputs)

    def _alone(self, name: str, call: Call, value: Tensor) -> Tensor | None:
        """Return the label array of an operation on one tensor."""
        first = next((leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)), None)
        if id(first) not in call.arrays or (len(call.arrays) > 1 and name not in LIKE_THE_FIRST):
            return None
        array, shape = call.arrays[id(first)]
        if name in LIKE_THE_FIRST:
            return array
        if name in JOINT_NORMS:
            return self._normalised(call, array)
        if name in TRANSPOSITIONS:
            transposed: Tensor = call.function(array, *call.args[1:], **call.kwargs)
            return transposed
        if name in SPATIAL or name in ("interpolate", "upsample"):
            channels = len(shape) - SPATIAL.get(name, len(shape) - 2)
            return array if all(axis < channels for axis in label_axes(array)) else None
        if name == "pad":
            return self._padded(call, array, shape)
        if name in REDUCTIONS:
            axes = axes_of(call.args, call.kwargs, len(shape))
            axes = tuple(range(len(shape))) if axes is None else axes
            if any(array.shape[axis] > 1 for axis in axes):
                return None
            return array if value.ndim == array.ndim else array.squeeze(axes)
        return None

    def _moved(self, call: Call, outputs: Sequence[Tensor]) -> list[Tensor] | None:
        operands = dict(call.arrays)
        for leaf in leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in operands and leaf.is_floating_point():
                (label,) = self._labels.new(1, f"it is combined with a constant by {call.title}")
                operands[id(leaf)] = torch.full((1,) * leaf.ndim, label), leaf.shape
        arrays = moved(self._labels, call.function, call.args, call.kwargs, operands)
        if arrays is None or [tensor.ndim for tensor in arrays] != [tensor.ndim for tensor in outputs]:
            reason = f"{call.title} takes its channels by places or numbers that stay the same when some go"
            for array in call.own_arrays:
                self._labels.protect(labels_in(array), reason)
            return None
        return arrays

    def _concatenated(self, call: Call) -> Tensor | None:
        """Return the label array of a concatenation along the axis of the channels."""
        tensors = call.args[0] if call.args else call.kwargs["tensors"]
        axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
        parts = [call.arrays.get(id(tensor)) for tensor in tensors]
        rows = []
        for part in parts:
            if part is None:
                return None
            array, shape = part
            if any(label_axis != axis % len(shape) for label_axis in label_axes(array)):
                return None
            sizes = [1] * len(shape)
            sizes[axis] = shape[axis]
            rows.append(array.expand(sizes))
        return torch.cat(rows, axis)

    def fix_counts(self, call: Call) -> None:
        """Protect the channels whose number is an operand."""
        for leaf in leaves((call.args, call.kwargs)):
            if isinstance(leaf, ChannelCount):
                for array in leaf.arrays:
                    self._labels.protect(
                        labels_in(array), f"the number of its channels is used by {call.title}"
                    )

    def _pointwise(self, call: Call, value: Tensor) -> Tensor | None:
        """Join the operands' labels elementwise and return their common label array."""
        operands: list[tuple[Tensor | None, tuple[int, ...]]] = []
        for leaf in leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor):
                array, shape = call.arrays.get(id(leaf), (None, leaf.shape))
                missing = (1,) * (value.ndim - len(shape))
                aligned = None if array is None else array.reshape(missing + tuple(array.shape))
                operands.append((aligned, missing + tuple(shape)))
        if any(len(shape) != value.ndim for _, shape in operands):
            return None
        arrays = [array for array, _ in operands if array is not None]
        axes = sorted({axis for array in arrays for axis in label_axes(array)})
        coupled: list[Tensor] = []
        for array, sizes in operands:
            own = [] if array is None else label_axes(array)
            if array is not None and own == axes:
                coupled.append(array)
            elif any(sizes[axis] > 1 for axis in axes if axis not in own):
                self._clash(call, arrays, array)
                return None
            elif array is not None:
                # A single channel broadcast over all (an attention map) must stay; the others may go.
                self._labels.protect(
                    labels_in(array), f"its output is broadcast over channels by {call.title}"
                )
        for other in coupled[1:]:
            self._labels.join(labels_in(coupled[0]), labels_in(other))
        return coupled[0] if coupled else None

    def _clash(self, call: Call, arrays: Sequence[Tensor], fixed: Tensor | None) -> None:
        """Protect channels that meet a tensor whose channels cannot all go with them."""
        reasons = [] if fixed is None else [self._labels.obstacle(label) for label in labels_in(fixed)]
        reason = next(
            (obstacle for obstacle in reasons if obstacle),
            f"it is combined with a tensor of fixed size by {call.title}",
        )
        for array in arrays:
            self._labels.protect(labels_in(array), reason)

    def _normalised(self, call: Call, array: Tensor) -> Tensor:
        shape = call.args[1] if len(call.args) > 1 else call.kwargs["normalized_shape"]
        if any(axis >= array.ndim - len(shape) for axis in label_axes(array)):
            self._labels.protect(
                labels_in(array),
                f"its channels are normalised together by {call.title}: without one the others change",
            )
        return array

    def _padded(self, call: Call, array: Tensor, shape: torch.Size) -> Tensor | None:
        widths, mode, fill = pad_arguments(call.args, call.kwargs)
        padded = [len(shape) - 1 - place // 2 for place, width in enumerate(widths) if width]
        if not set(label_axes(array)) & set(padded):
            return array
        if label_axes(array) != [1] or any(isinstance(width, ChannelCount) for width in widths):
            return None
        pair = 2 * (len(shape) - 2)
        before, after = widths[pair], widths[pair + 1]
        if len(widths) > pair + 2 or mode != "constant" or fill not in (None, 0) or min(before, after) < 0:
            return None
        if not call.owner or call.owner in self.walk.pads or not _pads_only(call.module):
            where = f"{call.owner or 'the network'}.forward"
            reason = f"its channels are padded inside {where}; put that padding into a module of its own"
            self._labels.protect(labels_in(array), reason)
            if call.owner in self.walk.pads:  # the module runs twice
                first = self.walk.pads[call.owner]
                self._labels.protect((*first.before, *first.after), reason)
            return label_row(self._labels.new(shape[1] + before + after, reason), 1, len(shape))
        site = ChannelPad(self._labels.new(before), self._labels.new(after))
        self.walk.pads[call.owner] = site
        return label_row((*site.before, *labels_in(array), *site.after), 1, len(shape))


def _pads_only(module: nn.Module) -> bool:
    """Tell whether a module without parameters pads exactly once: it can be rewritten with other widths."""
    if module._modules or module._parameters:
        return False
    forward = module.__dict__.pop("forward", None)  # set by the walk
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # forwards with untraceable code
        return False
    finally:
        if forward is not None:
            module.forward = forward
    widths = [pad_arguments(node.args, node.kwargs)[0] for node in graph.nodes if node.target is F.pad]
    return len(widths) == 1 and all(isinstance(width, int) for width in widths[0])


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
