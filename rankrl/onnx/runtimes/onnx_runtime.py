"""Run files in onnxruntime, on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx.parser
import onnxruntime

from rankrl.onnx.runtimes.runtime import DEFAULT_RUNTIME, Runtime, Session, register_runtime

_ERRORS_ONLY = 3  # onnxruntime's log severity
_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(uint8)": np.dtype(np.uint8),
}


class OnnxRuntimeSession(Session):
    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        entry = session.get_inputs()[0]
        shape = [size if isinstance(size, int) else None for size in entry.shape]
        super().__init__(entry.name, entry.type, _DTYPES.get(entry.type), shape)
        self._session = session

    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        outputs: Sequence[np.ndarray[Any, Any]] = self._session.run(None, feed)
        return outputs


@register_runtime
class OnnxRuntime(Runtime):
    """onnxruntime's own kernels, on the CPU."""

    name: ClassVar[str] = DEFAULT_RUNTIME
    description: ClassVar[str] = "onnxruntime on the CPU"

    def obstacle(self) -> str | None:
        return None

    @property
    def version(self) -> str:
        return str(onnxruntime.__version__)

    def load(self, path: str, threads: int | None) -> Session:
        """Open the file with the CPU's provider alone."""
        return OnnxRuntimeSession(inference_session(path, threads))


def inference_session(
    model: str | bytes, threads: int | None = None, *, optimised: bool = True, arena: bool = True
) -> onnxruntime.InferenceSession:
    """Open a model on the processor, with the CPU's provider alone."""
    options = session_options(threads)
    options.enable_cpu_mem_arena = arena
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_options(threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    # Sessions are timed in turns: the threads of one that has finished must not spin while another runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


_PROVIDER = "CUDAExecutionProvider"
_FATAL_ONLY = 4  # log severity: without a GPU the probe logs errors
_PROBE = '<ir_version: 10, opset_import: ["": 18]> probe (float[1] x) => (float[1] y) { y = Relu(x) }'


@register_runtime
class OnnxRuntimeCuda(OnnxRuntime):
    """onnxruntime's CUDA provider; operators for which it has no kernel run on the CPU.

    It computes in float32 proper, not in TF32, its own default, which has 10 bits of mantissa. A pass begins
    and ends in the computer's memory, so its time holds both copies.
    """

    name: ClassVar[str] = "onnxruntime_cuda"
    description: ClassVar[str] = "onnxruntime on an NVIDIA GPU"
    in_calling_thread: ClassVar[bool] = False

    def obstacle(self) -> str | None:
        """Return a message where the GPU's build of onnxruntime, or a usable GPU, is missing."""
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
