"""Types of the options of optimizers beside the learning rate; their defaults are the optimizers' own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OnnxAdagradOptions:
    """Options of `onnx_adagrad`."""

    decay_factor: float
    epsilon: float
    norm_coefficient: float
    first_update_count: int


@dataclass(frozen=True, kw_only=True)
class OnnxAdamOptions:
    """Options of `onnx_adam`."""

    alpha: float
    beta: float
    epsilon: float
    norm_coefficient: float
    norm_coefficient_post: float
    first_update_count: int


@dataclass(frozen=True, kw_only=True)
class SGDOptions:
    """Options of `sgd`."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


NO_OPTIONS = ("params", "lr", "maximize", "foreach", "capturable")
"""Parameters of optimizers that trainings set: all of them descend, and torch chooses how it computes."""
OPTIMIZERS: dict[str, type] = {
    "onnx_adagrad": OnnxAdagradOptions,
    "onnx_adam": OnnxAdamOptions,
    "sgd": SGDOptions,
}
"""Types of the options by the optimizer's name."""
