"""Run Adam and Adagrad with the semantics of ai.onnx.preview.training in torch, and write them as ONNX.

`OnnxAdam` and `OnnxAdagrad` are torch optimizers; `build_step_model` writes their step as an ONNX model that
continues a PyTorch run, `optimizer_from_model` reads one back; `create_optimizer` makes any registered
optimizer by name.

The public names are listed in `__init__.pyi` and imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
