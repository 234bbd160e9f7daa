"""Compute the operators on lists of tensors, in place, and check the settings of optimizers.

Each update is written twice: tensor by tensor, which reads like the specification and serves tensor
subclasses, and with torch's `_foreach_` operations, one call for many tensors instead of one per tensor.

On the CPU the lists are cut into buckets that a cache holds through all operations of an update. A large
model streamed through memory once per operation takes twice as long, and needs a temporary of its own size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import TypeVar, cast

import torch
from torch import Tensor

Count = int | Tensor
"""An update count T: a Python integer, or an integer tensor of no dimension, all of a list of one kind."""

Rate = float | Tensor
"""A learning rate: a Python float, or a tensor of no dimension, all of a list of one kind."""


def adam_rates(
    counts: Sequence[Count], like: Tensor, *, lr: float | Tensor, alpha: float, beta: float
) -> list[Rate]:
    """Return R_adjusted of Adam: R * sqrt(1 - beta^T) / (1 - alpha^T) where T > 0, R where T = 0."""
    if isinstance(counts[0], Tensor):
        t, r = _stack(counts, lr)
        adjusted = r * torch.sqrt(1 - torch.pow(beta, t)) / (1 - torch.pow(alpha, t))
        return _unstack(torch.where(t > 0, adjusted, r), like)
    scalar = float(lr)
    rates: dict[Count, Rate] = {}
    for count in cast("set[int]", set(counts)):  # nearly always one
        corrected = scalar * math.sqrt(1 - beta**count) / (1 - alpha**count) if count > 0 else scalar
        rates[count] = corrected
    return [rates[count] for count in counts]


def adagrad_rates(
    counts: Sequence[Count], like: Tensor, *, lr: float | Tensor, decay_factor: float
) -> list[Rate]:
    """Return r of Adagrad: R / (1 + T * decay_factor)."""
    if isinstance(counts[0], Tensor):
        t, r = _stack(counts, lr)
        return _unstack(r / (1 + t * decay_factor), like)
    return [float(lr) / (1 + count * decay_factor) for count in counts]


def _stack(counts: Sequence[Count], lr: float | Tensor) -> tuple[Tensor, Tensor]:
    t = torch.stack(cast("list[Tensor]", list(counts))).double()
    r = lr.detach().reshape(()).to(t) if isinstance(lr, Tensor) else torch.full_like(t, lr)
    return t, r


def _unstack(rates: Tensor, like: Tensor) -> list[Rate]:
    return list(rates.to(like).unbind())


OPERATOR_DTYPES = (torch.float32, torch.float64)


class SparseGradientError(TypeError, RuntimeError):
    """A sparse gradient was met; also a RuntimeError, as torch's own optimizers raise."""


def round_to_float32(value: float) -> float:
    """Return the float32 nearest to `value`, as a Python float (infinite beyond the range of float32)."""
    return ctypes.c_float(value).value


def check_rate(name: str, value: object) -> float | Tensor:
    """Check a learning rate (the operators' input R, a float or double scalar: not rounded)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} is a tensor of shape {tuple(value.shape)}: give one element, or a float"
            )
        if not value.is_floating_point():
            raise TypeError(f"{name} is a tensor of {value.dtype}: give a floating-point tensor, or a float")
        _non_negative(name, float(value))
        return value
    return _non_negative(name, value)


def check_coefficient(name: str, value: object) -> float:
    """Check an attribute that is a finite number >= 0 and round it to float32."""
    number = _non_negative(name, value)
    rounded = round_to_float32(number)
    if math.isinf(rounded) or (rounded == 0.0) != (number == 0.0):
        raise ValueError(
            f"{name} is {number!r}, which float32 cannot hold: the operators' attributes are float32, "
            "give 0 or a number from 1.5e-45 to 3.4e38"
        )
    return rounded


def check_decay(name: str, value: object) -> float:
    """Check a coefficient of an exponential average, in [0, 1) after it has been rounded to float32."""
    rounded = check_coefficient(name, value)
    if rounded >= 1.0:
        raise ValueError(f"{name} is {value!r}: as a float32 it must be in [0, 1), at most 0.99999994")
    return rounded


def check_update_count(name: str, value: object) -> int:
    """Check an update count (the operators' input T, an int64 scalar)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give an integer >= 0, usually 0 or 1")
    if value < 0:
        raise ValueError(f"{name} is {value}: give an integer >= 0, usually 0 or 1")
    return int(value)


def check_params(params: Sequence[Tensor]) -> None:
    """Check that parameters have a type the operators know."""
    for index, tensor in enumerate(params):
        if tensor.dtype not in OPERATOR_DTYPES:
            advice = (
                "keep float32 masters: train the float32 model under torch.autocast, or optimize a float32 "
                "copy and copy it back after each step"
                if tensor.is_floating_point()
                else "convert it to float32, or leave it out"
            )
            raise TypeError(
                f"params[{index}] is {tensor.dtype} of shape {tuple(tensor.shape)}: the operators of "
                f"ai.onnx.preview.training know float32 and float64 only; {advice}"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"params[{index}] has the layout {tensor.layout}: give a dense (strided) tensor")


def check_keys(what: str, entries: Mapping[str, object], needed: Sequence[str]) -> None:
    """Check that a mapping holds every needed key."""
    missing = [key for key in needed if key not in entries]
    if missing:
        raise ValueError(
            f"{what} lacks {', '.join(missing)} (it holds {', '.join(map(str, entries))}): "
            "was it saved by another optimizer?"
        )


def _non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give a finite number >= 0")
    number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{name} is {number}: give a finite number >= 0")
    return number


Item = TypeVar("Item")
TensorList = list[Tensor] | tuple[Tensor, ...]

# Tiny tensors want large buckets (few calls), large ones small buckets (cache): 1 MiB per list in float32.
CPU_BUCKET_ELEMENTS = 2**18
# 53 bits of a float64 less the 24 of a float32 are 29.
_SPLITTER = 2.0**29 + 1


def update_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    V: Sequence[Tensor],
    H: Sequence[Tensor],
    counts: Sequence[Count],
    *,
    lr: float | Tensor,
    alpha: float,
    beta: float,
    epsilon: float,
    norm_coefficient: float,
    norm_coefficient_post: float,
    maximize: bool,
    foreach: bool | None,
) -> None:
    """Update params, V and H in place by one step of Adam.

    For each tensor X with its gradient G, and T the update count::

        G_reg = norm_coefficient * X + G
        V = alpha * V + (1 - alpha) * G_reg
        H = beta * H + (1 - beta) * G_reg * G_reg
        R_adj = lr * sqrt(1 - beta^T) / (1 - alpha^T) if T > 0 else lr
        X = (1 - norm_coefficient_post) * (X - R_adj * V / (sqrt(H) + epsilon))
    """
    foreach = _use_foreach(params) if foreach is None else foreach
    for bucket in _buckets(params, foreach):
        x, v, h = _take(params, bucket), _take(V, bucket), _take(H, bucket)
        rates = adam_rates(_take(counts, bucket), x[0], lr=lr, alpha=alpha, beta=beta)
        if foreach:
            g = _foreach_regularize(x, _take(grads, bucket), norm_coefficient, maximize)
            foreach_multiply_(v, alpha)
            torch._foreach_add_(v, g, alpha=complement(alpha))
            foreach_multiply_(h, beta)
            torch._foreach_addcmul_(h, g, g, complement(beta))
            del g  # a temporary where regularized: freed before the next one is made
            _foreach_descend(x, v, h, rates, epsilon)
            if norm_coefficient_post != 0:
                foreach_multiply_(x, complement(norm_coefficient_post))
        else:
            gradient = _regularize(x[0], grads[bucket[0]], norm_coefficient, maximize)
            v[0].mul_(alpha).add_(gradient, alpha=complement(alpha))
            h[0].mul_(beta).addcmul_(gradient, gradient, value=complement(beta))
            del gradient
            _descend(x[0], v[0], h[0], rates[0], epsilon)
            if norm_coefficient_post != 0:
                x[0].mul_(complement(norm_coefficient_post))


def update_adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    H: Sequence[Tensor],
    counts: Sequence[Count],
    *,
    lr: float | Tensor,
    decay_factor: float,
    epsilon: float,
    norm_coefficient: float,
    maximize: bool,
    foreach: bool | None,
) -> None:
    """Update params and H in place by one step of Adagrad.

    For each tensor X with its gradient G, and T the update count::

        r = lr / (1 + T * decay_factor)
        G_reg = norm_coefficient * X + G
        H = H + G_reg * G_reg
        X = X - r * G_reg / (sqrt(H) + epsilon)
    """
    foreach = _use_foreach(params) if foreach is None else foreach
    for bucket in _buckets(params, foreach):
        x, h = _take(params, bucket), _take(H, bucket)
        rates = adagrad_rates(_take(counts, bucket), x[0], lr=lr, decay_factor=decay_factor)
        if foreach:
            g = _foreach_regularize(x, _take(grads, bucket), norm_coefficient, maximize)
            torch._foreach_addcmul_(h, g, g)
            _foreach_descend(x, g, h, rates, epsilon)
        else:
            gradient = _regularize(x[0], grads[bucket[0]], norm_coefficient, maximize)
            h[0].addcmul_(gradient, gradient)
            _descend(x[0], gradient, h[0], rates[0], epsilon)


def complement(coefficient: float) -> float:
    """Return 1 - coefficient rounded to float32 (Veltkamp's splitting: `torch.compile` sees through it)."""
    difference = 1 - coefficient
    shifted = difference * _SPLITTER
    return shifted - (shifted - difference)


def foreach_multiply_(tensors: TensorList, factor: float) -> None:
    """Multiply tensors of one device and dtype by a number, in place."""
    if _wraps_numbers(tensors):
        torch._foreach_mul_(tensors, torch.tensor(factor, dtype=tensors[0].dtype))
    else:
        torch._foreach_mul_(tensors, factor)


def foreach_increase_(tensors: TensorList, amount: float) -> None:
    """Add a number to tensors of one device and dtype, in place."""
    if _wraps_numbers(tensors):
        # without an alpha torch would take the tensor for a number again
        torch._foreach_add_(tensors, torch.tensor(amount, dtype=tensors[0].dtype), alpha=1)
    else:
        torch._foreach_add_(tensors, amount)


def _wraps_numbers(tensors: TensorList) -> bool:
    """Tell whether foreach would wrap a number into a tensor for each tensor, as eager CPU loops do."""
    return not torch.compiler.is_compiling() and tensors[0].is_cpu


def _regularize(param: Tensor, grad: Tensor, norm_coefficient: float, maximize: bool) -> Tensor:
    """Return G_regularized = norm_coefficient * X + G, where G is negated to maximize."""
    if maximize:
        grad = -grad
    return grad.add(param, alpha=norm_coefficient) if norm_coefficient != 0 else grad


def _descend(param: Tensor, direction: Tensor, H: Tensor, rate: float | Tensor, epsilon: float) -> None:
    """X_new = X - rate * direction / (sqrt(H_new) + epsilon), in place."""
    denominator = H.sqrt().add_(epsilon)
    if isinstance(rate, Tensor):  # addcdiv_ scales by numbers only
        param.addcdiv_(direction, denominator.div_(rate), value=-1)
    else:
        param.addcdiv_(direction, denominator, value=-rate)


def _foreach_regularize(
    params: list[Tensor], grads: list[Tensor], norm_coefficient: float, maximize: bool
) -> TensorList:
    if not maximize:
        return torch._foreach_add(grads, params, alpha=norm_coefficient) if norm_coefficient != 0 else grads
    negated = torch._foreach_neg(grads)
    if norm_coefficient != 0:
        torch._foreach_add_(negated, params, alpha=norm_coefficient)
    return negated


def _foreach_descend(
    params: list[Tensor],
    direction: TensorList,
    H: list[Tensor],
    rates: list[Rate],
    epsilon: float,
) -> None:
    denominators = torch._foreach_sqrt(H)
    foreach_increase_(denominators, epsilon)
    if isinstance(rates[0], Tensor):
        torch._foreach_div_(denominators, cast("list[Tensor]", rates))
        torch._foreach_addcdiv_(params, direction, denominators, -1)
    else:
        torch._foreach_addcdiv_(
            params, direction, denominators, [-rate for rate in cast("list[float]", rates)]
        )


def _use_foreach(params: Sequence[Tensor]) -> bool:
    """Tell whether all are plain tensors: subclasses may lack the foreach operations."""
    return all(type(param) in (Tensor, torch.nn.Parameter) for param in params)


def _take(items: Sequence[Item], bucket: list[int]) -> list[Item]:
    return [items[i] for i in bucket]


def _buckets(params: Sequence[Tensor], foreach: bool) -> Iterator[list[int]]:
    """Yield the indices of params in lists of one device and dtype, on the CPU of limited total size."""
    if not foreach:
        yield from ([index] for index in range(len(params)))
        return
    compiling = torch.compiler.is_compiling()  # a compiler fuses the operations by itself
    pending: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for index, param in enumerate(params):
        key = param.device, param.dtype
        bucket, size = pending.get(key, ([], 0))
        size += param.numel()
        if bucket and size > CPU_BUCKET_ELEMENTS and param.is_cpu and not compiling:
            yield bucket
            bucket, size = [], param.numel()
        bucket.append(index)
        pending[key] = bucket, size
    yield from (bucket for bucket, _ in pending.values())


ALPHA = round_to_float32(0.9)
"""Default decay of the accumulated gradient, the attribute's float32 value."""

BETA = round_to_float32(0.999)
"""Default decay of the accumulated squared gradient, the attribute's float32 value."""

EPSILON = round_to_float32(1e-6)
"""Default epsilon of both operators, the attribute's float32 value."""
