"""The form in which a compressed network is fastest: each layer in stages, or contracted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import contracted, factorised_layers, inspect_layers
from decomposition.cache import Cache, digest
from decomposition.network.inputs import InputShape
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied, replace_module
from rankrl.onnx.export import export_onnx
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import DEFAULT_RUNTIME
from rankrl.timing.latency import time_in_turns
from rankrl.timing.layer_timing import LayerTimer

_RUNS = 7
_FASTER = 0.95
"""A layer is contracted where that takes less than this part of the time of its stages."""


def fastest_form(
    network: nn.Module,
    shape: InputShape,
    scratch: Path,
    *,
    timing: Mapping[str, Any],
    timed: Batch | None,
    channel_block: int,
    **options: Any,
) -> tuple[nn.Module, str, Path | None]:
    """Return the form of a compressed network that is fastest in the runtime, its name, and its file.

    Fewer multiply-accumulates are not always fewer milliseconds: `staged` runs the cores of every layer as
    layers, `contracted` contracts them to dense weights once, when the file is loaded, `mixed` does for each
    layer what is faster between its neighbours. All hold the same cores, and the first wins among forms that
    are equally fast. The choice is kept in the scratch folder, so that a run that goes on after an
    interruption repeats it whatever a later timing says. The file is None where no file of this form was
    written now: without cores, with rounded cores, or with a form other than `staged` that was chosen before.
    """
    layers = factorised_layers(network)
    if not layers:
        return network, "dense", None
    if is_rounded(network):  # cores are stored as they are, stages computed in integers
        return network, "staged", None

    def file_of(name: str, form: nn.Module) -> Path:
        path = scratch / f"{name}.onnx"
        export_onnx(form, path, shape, channel_block=channel_block, **options)
        return path

    files = {"staged": file_of("staged", network)}

    def fastest() -> tuple[str, list[str]]:
        slow = faster_contracted(network, shape, timing, channel_block)
        tried = {"staged": [], "mixed": slow, "contracted": list(layers)}
        if len(slow) in (0, len(layers)):
            del tried["mixed"]
        files.update(
            {name: file_of(name, contracted(network, tried[name])) for name in tried if name != "staged"}
        )
        how = dict(timing)
        runtime = how.pop("runtime", DEFAULT_RUNTIME)
        turns = [(runtime, path) for path in files.values()]
        times = time_in_turns(turns, inputs=timed, **how)
        best = 0
        for other in range(1, len(turns)):
            compared = times.compare(best, other)
            if compared.ratio > 1 and not compared.unchanged:
                best = other
        name = list(tried)[best]
        return name, tried[name]

    key = digest(files["staged"].read_bytes())
    name, names = Cache(scratch).value("form", key, fastest)
    return (network if name == "staged" else contracted(network, names)), name, files.get(name)


def faster_contracted(
    network: nn.Module, shape: InputShape, timing: Mapping[str, Any], channel_block: int
) -> list[str]:
    """Return the names of the layers that are faster contracted, timed one by one between neighbours."""
    dense, whole = copied(network), factorised_layers(contracted(network))
    for layer in factorised_layers(dense).values():
        replace_module(dense, layer, layer.geometry.dense(dtype=layer.cores()[0].dtype))
    specs = {spec.name: spec for spec in inspect_layers(dense.cpu(), shape)}
    names = []
    timer = LayerTimer(**{**timing, "runs": _RUNS}, channel_block=channel_block)
    for name, layer in factorised_layers(network).items():
        spec = specs.get(name)
        if spec is not None and spec.input_sizes and layer.execution != whole[name].execution:
            staged, one = timer.forms(spec, [layer, whole[name]])
            if one < _FASTER * staged:
                names.append(name)
    return names
