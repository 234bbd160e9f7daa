"""Label the outputs of operations without parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pruning.call import Call
from pruning.channel_count import ChannelCount
from pruning.channel_walk import ChannelPad, ChannelWalk
from pruning.gated_norms import JOINT_NORMS
from pruning.label_arrays import label_axes, label_row, labels_in
from pruning.movement import leaves, moved
from pruning.operations import (
    LIKE_THE_FIRST,
    MOVEMENTS,
    POINTWISE,
    REDUCTIONS,
    SPATIAL,
    TRANSPOSITIONS,
    axes_of,
    pad_arguments,
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
