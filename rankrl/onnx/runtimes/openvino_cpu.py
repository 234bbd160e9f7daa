"""Run files in OpenVINO, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rankrl.onnx.runtimes.runtime import Runtime, Session, register_runtime


class OpenVinoSession(Session):
    def __init__(self, compiled: Any) -> None:
        entry = compiled.input(0)
        kind, shape = entry.get_element_type(), entry.get_partial_shape()
        sizes = [size.get_length() if size.is_static else None for size in shape]
        super().__init__(entry.get_any_name(), kind.get_type_name(), kind.to_dtype(), sizes)
        self._request = compiled.create_infer_request()

    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        if feed[self.input_name].dtype != self.input_dtype:
            raise TypeError("the types differ, and OpenVINO would convert without a word")
        return list(self._request.infer(feed, share_inputs=True).values())


@register_runtime
class OpenVino(Runtime):
    """OpenVINO on the CPU (extra `openvino`), from the same ONNX file.

    It computes in float32, not in bfloat16, is told to make one batch fast, and binds no threads to cores.
    """

    name: ClassVar[str] = "openvino"
    description: ClassVar[str] = "OpenVINO on the CPU"
    runs_nncf: ClassVar[bool] = True

    def obstacle(self) -> str | None:
        """Return a message where the package is missing, else None."""
        try:
            importlib.import_module("openvino")
        except ImportError as error:
            return (
                f"it needs the package openvino ({error}); install it with `pip install 'rankrl[openvino]'`, "
                "or leave it out"
            )
        return None

    @property
    def version(self) -> str:
        return str(importlib.import_module("openvino").__version__).partition("-")[0]

    def load(self, path: str, threads: int | None) -> Session:
        """Compile the file; free axes stay free."""
        core = importlib.import_module("openvino").Core()
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "ENABLE_CPU_PINNING": False,
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        return OpenVinoSession(core.compile_model(path, "CPU", options))
