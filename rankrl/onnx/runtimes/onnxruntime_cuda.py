"""onnxruntime on an NVIDIA GPU."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import onnx.parser
import onnxruntime

from rankrl.onnx.runtimes.base import Session
from rankrl.onnx.runtimes.onnxruntime_cpu import OnnxRuntime, OnnxRuntimeSession, session_options
from rankrl.onnx.runtimes.registry import register_runtime

_PROVIDER = "CUDAExecutionProvider"
_FATAL_ONLY = 4
_PROBE = '<ir_version: 10, opset_import: ["": 18]> probe (float[1] x) => (float[1] y) { y = Relu(x) }'


@register_runtime
class OnnxRuntimeCuda(OnnxRuntime):
    """onnxruntime's CUDA provider; what that has no kernel for runs on the CPU.

    It computes in float32 proper, not in TF32, its own default, which has 10 bits of mantissa. A pass begins
    and ends in the computer's memory, so its time holds both copies.
    """

    name: ClassVar[str] = "onnxruntime_cuda"
    description: ClassVar[str] = "onnxruntime on an NVIDIA GPU"
    in_calling_thread: ClassVar[bool] = False

    def obstacle(self) -> str | None:
        """Return what is missing: the GPU's build of onnxruntime, or a GPU that it can use."""
        if _PROVIDER not in onnxruntime.get_available_providers():
            return (
                f"this onnxruntime {self.version} is built without CUDA; install the GPU's in its place "
                "(`pip uninstall onnxruntime`, then `pip install onnxruntime-gpu`), or leave it out"
            )
        if not _starts():
            return (
                f"onnxruntime {self.version} finds no GPU that it can use; check `nvidia-smi` and that the "
                "versions of CUDA and cuDNN are those of the package, or leave it out"
            )
        return None

    def load(self, path: str, threads: int | None) -> Session:
        """Open the file with the CUDA provider first."""
        return OnnxRuntimeSession(_session(path, session_options(threads)))


def _session(model: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    providers: list[Any] = [(_PROVIDER, {"use_tf32": "0"}), "CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model, options, providers=providers)


@cache
def _starts() -> bool:
    """Tell whether the provider starts; without a GPU or its libraries, onnxruntime falls back on the CPU."""
    probe = onnx.parser.parse_model(_PROBE)
    options = session_options(1)
    options.log_severity_level = _FATAL_ONLY
    return _PROVIDER in _session(probe.SerializeToString(), options).get_providers()
