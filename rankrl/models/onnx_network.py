"""A network in an ONNX file: its name among the models; it is no PyTorch network, and never becomes one."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from rankrl.errors import ConfigError
from rankrl.models.registry import register_model


@register_model("onnx", "a network in an ONNX file: model.path=net.onnx, with dataset=inputs")
def onnx(input_shape: tuple[int, int, int], num_classes: int, /, *, path: str | Path) -> nn.Module:
    """Refuse to build a PyTorch network.

    Args:
        input_shape: Not used.
        num_classes: Not used.
        path: The ONNX file; it is only read.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"model=onnx is compressed as the file that it is ({path}), not as a PyTorch network; give "
        "dataset=inputs dataset.path=inputs.npz with task=pipeline or task=inspect"
    )
