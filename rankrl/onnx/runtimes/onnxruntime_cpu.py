"""onnxruntime on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnxruntime

from rankrl.onnx.runtimes.base import Runtime, Session
from rankrl.onnx.runtimes.registry import DEFAULT_RUNTIME, register_runtime

_ERRORS_ONLY = 3
_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(uint8)": np.dtype(np.uint8),
}


class OnnxRuntimeSession(Session):
    """An ONNX file in onnxruntime."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        entry = session.get_inputs()[0]
        shape = [size if isinstance(size, int) else None for size in entry.shape]
        super().__init__(entry.name, entry.type, _DTYPES.get(entry.type), shape)
        self._session = session

    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Return the outputs for contiguous arrays."""
        outputs: Sequence[np.ndarray[Any, Any]] = self._session.run(None, feed)
        return outputs


@register_runtime
class OnnxRuntime(Runtime):
    """onnxruntime's own kernels, on the CPU."""

    name: ClassVar[str] = DEFAULT_RUNTIME
    description: ClassVar[str] = "onnxruntime on the CPU"

    def obstacle(self) -> str | None:
        """Return None: onnxruntime is installed with rankrl."""
        return None

    @property
    def version(self) -> str:
        """The version of onnxruntime."""
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
    """Return the options of a session that computes with so many threads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    # Sessions are timed in turns: the threads of one that has finished must not spin while another runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
