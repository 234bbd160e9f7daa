"""How time is measured and networks are exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankrl.errors import ConfigError
from rankrl.option_types import check_fields, check_least

DEFAULT_RUNTIME = "onnxruntime"
"""The runtime that quantises, and that budgets go by where no other is named."""
RUNTIMES = (DEFAULT_RUNTIME, "onnxruntime_cuda", "openvino")
"""The runtimes that can be chosen."""


@dataclass(frozen=True)
class LatencyOptions:
    """How time is measured; the exported network is timed alike.

    Attributes:
        preprocess: Whether the normalisation is part of the graph: the file then takes images as bytes, uint8
            (N, height, width, channels). If not, it takes float32 (N, channels, height, width), normalised as
            its metadata says.
        pad_channels: Whether channels are padded with zeros to as many as the processor computes at a time
            (16 with AVX-512, 8 with AVX2) when onnxruntime loads a file, where that is faster. Padded weights
            are no longer constants of the graph, which other tools may expect.
        reduce_range: Whether layers that compute in 8-bit integers have weights of 7 bits, for x86 processors
            without VNNI, whose sums would overflow; None: if this processor is one. Times are the same.
        runtime: The runtime that budgets in time and choices go by: onnxruntime; onnxruntime_cuda, on an
            NVIDIA GPU; openvino (extra `openvino`). Layers, plans and files are timed there.
        runtimes: Where the finished files are compared side by side; onnxruntime and `runtime` are among them
            in any case. With openvino, the network that NNCF quantises for it (extra `nncf`) is compared too.
        int8: Whether the dense network in 8-bit integers is measured too: what every compressed network has
            to beat, since onnxruntime makes it in half a minute without any training.
        batch: Inputs of a timed forward pass.
        threads: Threads of the runtime.
        runs: Timed runs of each network.
        folder: Where tables of measured layers are kept for later runs, or None.
        table: The times.json that a timing kit measured on another device, for which plans are searched; or a
            list of that and of those that kits of finished networks (`task=verify_kit`) measured there, which
            correct it. None times here.
        input_names: Names of the exported file's inputs; by default those of the forward's parameters.
        output_names: Names of its outputs; by default the keys or fields that the forward returns, else
            `output`.
        dynamic_axes: Axes but the batch's that stay free in the file of a module, with names, by the
            forward's parameter: `{"images": {2: "height", 3: "width"}}`.
        opset: ONNX operator set of the file of a module; None for the exporter's default.
    """

    PYTHON_ONLY = ("folder", "table", "dynamic_axes")

    preprocess: bool = False
    pad_channels: bool = True
    reduce_range: bool | None = None
    runtime: str = DEFAULT_RUNTIME
    runtimes: tuple[str, ...] = (DEFAULT_RUNTIME,)
    int8: bool = True
    batch: int = 64
    threads: int = 1
    runs: int = 30
    folder: Path | None = None
    table: str | Path | tuple[str | Path, ...] | None = None
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = field(default=None, hash=False)
    opset: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_least("export", self, batch=1, threads=1, runs=1)
        names = [*self.input_names, *self.output_names]
        if len(set(names)) < len(names) or "" in names:
            raise ConfigError(f"export.input_names and output_names must be different names, got {names}")

    @property
    def tables(self) -> tuple[Path, ...]:
        """The tables of another device, that of the timing kit first; none where times are taken here."""
        tables = () if self.table is None else self.table
        return tuple(map(Path, (tables,) if isinstance(tables, str | Path) else tables))

    def kept_in(self, cache: str | Path | None, folder: str | Path | None) -> LatencyOptions:
        """Return these options with times kept in a cache, or without one in the folder of the search.

        A budget in time is part of what is searched: with times that are measured anew it would be another
        search. `folder`, where it is set, stays.
        """
        above = folder if cache is None else cache
        if self.folder is not None or above is None:
            return self
        return replace(self, folder=Path(above) / "latencies")

    @property
    def channel_block(self) -> int:
        """Multiple that channels are padded to in exported networks (`export_onnx`)."""
        from rankrl.device import channel_block

        # Another device's processor is not known.
        return channel_block() if self.pad_channels and not self.tables else 1

    @property
    def compared_runtimes(self) -> tuple[str, ...]:
        """The runtimes in which finished files are compared, onnxruntime first."""
        return tuple(dict.fromkeys((DEFAULT_RUNTIME, self.runtime, *self.runtimes)))

    @property
    def turns(self) -> dict[str, int]:
        """How files are timed in turns, each in a runtime of its own."""
        return {"batch": self.batch, "threads": self.threads, "runs": self.runs}

    @property
    def timing(self) -> dict[str, Any]:
        """How files are timed in the runtime that budgets go by."""
        return {**self.turns, "runtime": self.runtime}

    @property
    def record(self) -> dict[str, Any]:
        """Settings that times depend on, for the record of a run."""
        return self.timing | ({"table": [*map(str, self.tables)]} if self.tables else {})


@dataclass(frozen=True)
class ExportOptions(LatencyOptions):
    """The ONNX file and how its latency is measured; one thread of the CPU is timed in processor time.

    Attributes:
        training: Write the optimizer's step (optim, an ONNX operator) as optimizer_step.onnx too.
        skip: Leave out model.onnx and its measurements, as in a sweep that compares what PyTorch measures;
            task=export writes it later. `export=false` is short for it.
    """

    training: bool = False
    skip: bool = False


@dataclass(frozen=True)
class TimingOptions:
    """Where the times of a budget in time come from.

    Attributes:
        table: The times.json that the kit of task=timing_kit measured on another device, for which plans are
            then searched; or a list of it and of those that kits of task=verify_kit measured there, whose
            times of whole networks correct those of layers. None times on this machine.
    """

    table: str | Path | tuple[str | Path, ...] | None = None
