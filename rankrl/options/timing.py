"""How time is measured, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rankrl.device import channel_block


@dataclass(frozen=True)
class LatencyOptions:
    """How time is measured; the exported network is timed alike.

    Attributes:
        batch: Inputs of a forward pass.
        threads: Threads of onnxruntime.
        runs: Timed passes.
        folder: Where tables of measured layers are kept for later runs, or None.
        preprocess: Whether the exported network normalises its images itself.
        pad_channels: Whether fewer channels than the processor computes at a time are filled up.
        reduce_range: Whether weights of what computes in 8-bit integers take 7 of the 8 bits in the finished
            file (`quantise_onnx`); times are the same.
    """

    batch: int = 64
    threads: int = 1
    runs: int = 30
    folder: Path | None = None
    preprocess: bool = False
    pad_channels: bool = True
    reduce_range: bool | None = None

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
        """What channels are filled up to in exported networks (`export_onnx`)."""
        return channel_block() if self.pad_channels else 1
