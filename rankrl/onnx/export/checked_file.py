"""Write ONNX files atomically, after onnx's checker and onnxruntime accept them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as MissingKernel

from rankrl.errors import DefectError
from rankrl.files import write_atomically
from rankrl.onnx.errors import ExportError
from rankrl.onnx.protobuf import to_proto
from rankrl.onnx.runtimes.onnx_runtime import inference_session


def write_checked(
    model: ir.Model | onnx.ModelProto, path: str | Path, what: str, *, full_check: bool = False
) -> int:
    """Write a file if ONNX's checker accepts it and onnxruntime loads it; return its bytes.

    Where onnxruntime lacks an operator that the checker knows, the checker decides alone.
    """
    proto = to_proto(model) if isinstance(model, ir.Model) else model
    try:
        data = proto.SerializeToString()
    except Exception as error:  # ValueError or protobuf's own, by its version
        raise ExportError(
            f"cannot write {what} as one ONNX file: {error}. A model of 2 GiB or more does not fit into one."
        ) from error
    try:
        onnx.checker.check_model(proto, full_check=full_check)
        inference_session(data, 1)
    except MissingKernel:
        pass
    except Exception as error:  # neither onnx's errors nor onnxruntime's have a base of their own
        raise DefectError(
            f"{what} is damaged, so nothing was written to {path}: {error}. This is a fault of "
            "rankrl's, not of your network or options: please report it with the command, the original file "
            f"and the versions, onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"
        ) from error
    write_atomically(path, data)
    return len(data)
