"""The optimizers that can be chosen; their options are their own parameters."""

from __future__ import annotations

OPTIMIZERS = ("onnx_adagrad", "onnx_adam", "sgd")
NO_OPTIONS = ("params", "lr", "maximize", "foreach", "capturable")
"""Parameters of optimizers that trainings set: all of them descend, and torch chooses how it computes."""
