"""The operators Adam and Adagrad of ai.onnx.preview.training (version 1) as functions on lists of tensors.

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

    Args:
        params: Tensors X, of any shapes, float32 or float64.
        grads: Gradients G, of the shapes and dtypes of `params`.
        V: Accumulated gradients, of the shapes and dtypes of `params`.
        H: Accumulated squared gradients, of the shapes and dtypes of `params`.
        lr: Learning rate R, >= 0.
        update_count: Update count T, >= 0; usually 0 or 1 at the first update.
        alpha: Decay of V, in [0, 1).
        beta: Decay of H, in [0, 1).
        epsilon: Added to the denominator, >= 0.
        norm_coefficient: Coefficient of the L2 penalty 0.5 * norm_coefficient * |X|^2, >= 0.
        norm_coefficient_post: Shrinking of X after the update, >= 0.
        maximize: Ascend: use -G for G.
        foreach: Use torch's foreach operations, or one tensor after the other; None chooses foreach for
            plain tensors.

    Raises:
        TypeError: If a tensor is not dense float32 or float64, or a coefficient not a number.
        ValueError: If a coefficient is outside its range, or shapes, lengths or devices do not match.

    Source:
        ONNX, Operators.md, ai.onnx.preview.training.Adam, version 1.
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

    Args:
        params: Tensors X, of any shapes, float32 or float64.
        grads: Gradients G, of the shapes and dtypes of `params`.
        H: Accumulated squared gradients, of the shapes and dtypes of `params`.
        lr: Learning rate R, >= 0.
        update_count: Update count T, >= 0; usually 0 or 1 at the first update.
        decay_factor: Decay of the learning rate with T, >= 0.
        epsilon: Added to the denominator, >= 0.
        norm_coefficient: Coefficient of the L2 penalty 0.5 * norm_coefficient * |X|^2, >= 0.
        maximize: Ascend: use -G for G.
        foreach: Use torch's foreach operations, or one tensor after the other; None chooses foreach for
            plain tensors.

    Raises:
        TypeError: If a tensor is not dense float32 or float64, or a coefficient not a number.
        ValueError: If a coefficient is outside its range, or shapes, lengths or devices do not match.

    Source:
        ONNX, Operators.md, ai.onnx.preview.training.Adagrad, version 1; after Duchi, Hazan and Singer,
        Adaptive Subgradient Methods, JMLR 12 (2011), figure 1.
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
