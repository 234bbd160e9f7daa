"""Compute the operators on lists of tensors, in place and without checks.

Each update is written twice: tensor by tensor, which reads like the specification and serves tensor
subclasses, and with torch's `_foreach_` operations, one call for many tensors instead of one per tensor.

On the CPU the lists are cut into buckets that a cache holds through all operations of an update. A large
model streamed through memory once per operation takes twice as long, and needs a temporary of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from optim.settings import (
    Count,
    Rate,
    adagrad_rates,
    adam_rates,
    round_to_float32,
)

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
