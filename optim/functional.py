"""Apply the operators Adam and Adagrad of ai.onnx.preview.training (version 1) to lists of tensors.

Like torch's functional optimizers they write the results into the tensors given, where the operators return
new ones. The coefficients are rounded to float32, as the operators' attributes are, and the scalar learning
rate is adjusted in float64. The rest is computed in the tensors' own type (float32 or float64), in the order
of the specification, except that a multiplication and the addition after it may be one instruction: equal to
another implementation within a few units in the last place per step, not bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim.kernels import update_adagrad, update_adam
from optim.validation import (
    check_coefficient,
    check_decay,
    check_lists,
    check_rate,
    check_update_count,
    round_to_float32,
)

ALPHA = round_to_float32(0.9)
"""Default decay of the accumulated gradient, the attribute's float32 value."""

BETA = round_to_float32(0.999)
"""Default decay of the accumulated squared gradient, the attribute's float32 value."""

EPSILON = round_to_float32(1e-6)
"""Default epsilon of both operators, the attribute's float32 value."""


@torch.no_grad()
def adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    V: Sequence[Tensor],
    H: Sequence[Tensor],
    *,
    lr: float | Tensor,
    update_count: int,
    alpha: float = ALPHA,
    beta: float = BETA,
    epsilon: float = EPSILON,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    maximize: bool = False,
    foreach: bool | None = None,
) -> None:
    """Update tensors, their accumulated gradients and squared gradients by one step of Adam, in place.

    For each tensor X of `params` with its gradient G, and T the update count::

        G_reg = norm_coefficient * X + G
        V = alpha * V + (1 - alpha) * G_reg
        H = beta * H + (1 - beta) * G_reg * G_reg
        R_adj = lr * sqrt(1 - beta^T) / (1 - alpha^T) if T > 0 else lr
        X = (1 - norm_coefficient_post) * (X - R_adj * V / (sqrt(H) + epsilon))

    Epsilon is added to the uncorrected sqrt(H): at the same value it weighs more in the first steps than in
    `torch.optim.Adam`, which adds it to sqrt(H / (1 - beta^T)).
    """
    check_lists(params, grads=grads, V=V, H=H)
    count = check_update_count("update_count", update_count)
    if params:
        update_adam(
            params,
            grads,
            V,
            H,
            [count] * len(params),
            lr=check_rate("lr", lr),
            alpha=check_decay("alpha", alpha),
            beta=check_decay("beta", beta),
            epsilon=check_coefficient("epsilon", epsilon),
            norm_coefficient=check_coefficient("norm_coefficient", norm_coefficient),
            norm_coefficient_post=check_coefficient("norm_coefficient_post", norm_coefficient_post),
            maximize=maximize,
            foreach=foreach,
        )


@torch.no_grad()
def adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    H: Sequence[Tensor],
    *,
    lr: float | Tensor,
    update_count: int,
    decay_factor: float = 0.0,
    epsilon: float = EPSILON,
    norm_coefficient: float = 0.0,
    maximize: bool = False,
    foreach: bool | None = None,
) -> None:
    """Update tensors and their accumulated squared gradients by one step of Adagrad, in place.

    For each tensor X of `params` with its gradient G, and T the update count::

        r = lr / (1 + T * decay_factor)
        G_reg = norm_coefficient * X + G
        H = H + G_reg * G_reg
        X = X - r * G_reg / (sqrt(H) + epsilon)
    """
    check_lists(params, grads=grads, H=H)
    count = check_update_count("update_count", update_count)
    if params:
        update_adagrad(
            params,
            grads,
            H,
            [count] * len(params),
            lr=check_rate("lr", lr),
            decay_factor=check_coefficient("decay_factor", decay_factor),
            epsilon=check_coefficient("epsilon", epsilon),
            norm_coefficient=check_coefficient("norm_coefficient", norm_coefficient),
            maximize=maximize,
            foreach=foreach,
        )
