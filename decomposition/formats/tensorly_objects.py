"""Read tensorly's objects, and the tuples and lists that it takes for them; write in its backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from decomposition.errors import DecompositionError
from decomposition.network.geometry import WeightModes

Kind = Literal["cp", "tucker", "tensor_train", "tensor_ring"]
_ALLOWED = (
    "a CPTensor, TuckerTensor, TTTensor or TRTensor, (weights, factors), (core, factors) or a list of cores "
    "(rank, size, next rank)"
)


@dataclass(frozen=True)
class TensorlyObject:
    """Content of a tensorly object, float64 on the CPU; `head` is the weights of CP or the core of Tucker."""

    kind: Kind
    head: torch.Tensor | None
    factors: list[torch.Tensor]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the tensor that it represents."""
        if self.kind in ("tensor_train", "tensor_ring"):
            return tuple(core.shape[1] for core in self.factors)
        whole = () if self.kind == "cp" or self.head is None else tuple(self.head.shape[len(self.factors) :])
        return (*(factor.shape[0] for factor in self.factors), *whole)


def read_tensorly(tensor: Any) -> TensorlyObject:
    """Read an object of tensorly in any of its backends, or a tuple or list that it accepts for one."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.tr_tensor import TRTensor
    from tensorly.tt_tensor import TTTensor
    from tensorly.tucker_tensor import TuckerTensor

    if isinstance(tensor, CPTensor | TuckerTensor):
        return _checked(_matrices("cp" if isinstance(tensor, CPTensor) else "tucker", *tensor))
    if isinstance(tensor, TTTensor | TRTensor):
        kind: Kind = "tensor_train" if isinstance(tensor, TTTensor) else "tensor_ring"
        return _checked(TensorlyObject(kind, None, _arrays(list(tensor))))
    if not isinstance(tensor, list | tuple) or not tensor:
        raise DecompositionError(f"got {_described(tensor)} for tensorly's factors; give {_ALLOWED}")
    if len(tensor) == 2 and isinstance(tensor[1], list | tuple):
        head, rest = tensor
        if isinstance(
            head, CPTensor | TuckerTensor | TTTensor | TRTensor | list | tuple
        ):  # tensorly may return (tensor, errors)
            return read_tensorly(head)
        return _checked(_matrices("cp" if head is None or np.ndim(head) == 1 else "tucker", head, rest))
    cores = _arrays(tensor)
    if any(core.ndim != 3 for core in cores):
        raise DecompositionError(
            f"got arrays of shapes {_shapes(cores)} for tensorly's factors; give {_ALLOWED}"
        )
    open_ended = cores[0].shape[0] == cores[-1].shape[2] == 1
    return _checked(TensorlyObject("tensor_train" if open_ended else "tensor_ring", None, cores))


def check_sizes(tensor: TensorlyObject, modes: WeightModes) -> None:
    """Check that a CP or Tucker tensor has the shape of the weight."""
    channels = (modes.out_channels, modes.in_channels)
    allowed = [(*channels, modes.kernel), (*channels, *modes.kernel_size)]
    if modes.kernel == 1:
        allowed.append(channels)
    if tensor.sizes not in allowed:
        raise wrong_sizes(tensor, allowed)


def wrong_sizes(tensor: TensorlyObject, allowed: Sequence[tuple[int, ...]]) -> DecompositionError:
    """Make the error for a tensor whose shape differs from the weight's."""
    shapes = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
    return DecompositionError(
        f"tensorly's {tensor.kind} stands for a tensor of shape {tensor.sizes}, the layer's weight is "
        f"{shapes}; decompose the weight in the order (out, in, kernel)"
    )


def in_tensorly_backend(tensor: torch.Tensor) -> Any:
    """Copy a tensor into tensorly's present backend."""
    import tensorly

    if tensorly.get_backend() == "pytorch":
        return tensor.detach().clone()
    exact = tensor.detach().cpu()
    return tensorly.tensor((exact.float() if exact.dtype == torch.bfloat16 else exact).numpy())


def _matrices(kind: Kind, head: Any, factors: Sequence[Any]) -> TensorlyObject:
    return TensorlyObject(kind, None if head is None else _arrays([head])[0], _arrays(factors))


def _arrays(values: Sequence[Any]) -> list[torch.Tensor]:
    return [_as_torch(value) for value in values]


def _as_torch(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.from_numpy(np.asarray(value, dtype=np.float64))
        except (TypeError, ValueError) as error:
            raise DecompositionError(
                f"got {_described(value)} among tensorly's factors ({error}); give real arrays, {_ALLOWED}"
            ) from error
    if value.is_complex():
        raise DecompositionError("tensorly's factors are complex; layers have real weights")
    array: torch.Tensor = value.detach().double().cpu()
    if not bool(torch.isfinite(array).all()):
        raise DecompositionError("tensorly's factors hold NaN or infinite values; decompose again")
    return array


def _checked(tensor: TensorlyObject) -> TensorlyObject:
    """Check that the shapes of the parts agree, which a tuple or list does not guarantee."""
    shapes = [tuple(factor.shape) for factor in tensor.factors]
    if tensor.kind in ("tensor_train", "tensor_ring"):
        left, right = [shape[0] for shape in shapes], [shape[2] for shape in shapes]
        good = len(shapes) > 1 and right == [*left[1:], left[0]]
    elif tensor.kind == "cp":
        ranks = {shape[1] if len(shape) == 2 else None for shape in shapes}
        ranks |= set() if tensor.head is None else {len(tensor.head)}
        good = len(ranks) == 1 and None not in ranks
    else:
        core = () if tensor.head is None else tuple(tensor.head.shape)
        # With two factors it is from partial_tucker: they belong to the first modes, the channels.
        good = len(shapes) in (2, len(core)) and len(shapes) <= len(core)
        good = good and all(shape[1:] == (rank,) for shape, rank in zip(shapes, core, strict=False))
    if not good:
        head = "" if tensor.head is None else f"{tuple(tensor.head.shape)} and "
        raise DecompositionError(
            f"tensorly's {tensor.kind} has parts of shapes {head}{_shapes(tensor.factors)}, which do not "
            f"belong together; give {_ALLOWED}"
        )
    return tensor


def _shapes(arrays: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(tuple(array.shape)) for array in arrays)


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
