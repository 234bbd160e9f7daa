"""Functions of the last version, which still work and warn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from decomposition import CompressionPlan, FitOptions
from rankrl.compression import apply_plan, compress
from rankrl.options.decomposition import DecompositionOptions
from rankrl.result import Compression


def compress_onnx(path: str | Path, inputs: Any, target: str | Path, **options: Any) -> Compression:
    """Call `rankrl.compress`, the name of today."""
    warnings.warn("write rankrl.compress(path, inputs, target, ...)", DeprecationWarning, stacklevel=2)
    chosen, final = options.pop("options", None), options.pop("final_options", None)
    if chosen is not None:
        options["iterations"] = chosen.iterations
    if final is not None:
        options |= {"final_iterations": final.iterations, "final_starts": final.starts}
    return compress(path, inputs, target, **options)


def apply_onnx_plan(
    path: str | Path,
    inputs: Any,
    target: str | Path,
    plan: CompressionPlan,
    *,
    weigh_outputs: bool = True,
    final_options: FitOptions | None = None,
    **options: Any,
) -> Compression:
    """Call `rankrl.apply_plan`, the name of today."""
    warnings.warn("write rankrl.apply_plan(path, plan, inputs, target)", DeprecationWarning, stacklevel=2)
    final = FitOptions(200) if final_options is None else final_options
    fitting = DecompositionOptions(
        weigh_outputs=weigh_outputs, final_iterations=final.iterations, final_starts=final.starts
    )
    result: Compression = apply_plan(path, plan, inputs, target, decomposition=fitting, **options)
    return result
