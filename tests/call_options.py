"""Options of calls from Python, grouped as the calls take them from the single settings that tests vary."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rankrl import DecompositionOptions, SearchOptions

"""The formats that an ONNX file's layers choose from by default."""
_LAYERS = {field.name for field in fields(DecompositionOptions)} - {"format", "formats"}
_SEARCH = {"episodes", "plans", "seconds", "patience", "finalists", "metric"} | {
    *("workers", "cluster", "worker_cpus", "worker_gpus")
}


def layer_options(decomposition: str | Sequence[str] = "tucker", **options: Any) -> DecompositionOptions:
    """Return options of layers, in float32 unless `precisions` says otherwise.

    Args:
        decomposition: Name of a format, or of several that every layer chooses from.
        **options: Other fields of the options.
    """
    options.setdefault("precisions", ("float32",))
    if isinstance(decomposition, str):
        return DecompositionOptions(format=decomposition, **options)
    return DecompositionOptions(format="auto", formats=tuple(decomposition), **options)


def grouped(decomposition: str | Sequence[str] = "tucker", **options: Any) -> dict[str, Any]:
    """Return keyword arguments of a call, those of layers and searches in their dataclasses.

    Args:
        decomposition: As for `layer_options`.
        **options: Fields of `DecompositionOptions` and `SearchOptions`; others are passed on as they are.
    """
    taken = {name: options.pop(name) for name in list(options) if name in _LAYERS}
    limits = {name: options.pop(name) for name in list(options) if name in _SEARCH}
    search = {"search": SearchOptions(**limits)} if limits else {}
    return {"decomposition": layer_options(decomposition, **taken), **search, **options}
