"""A kit of finished networks, which another device times and compares with the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decomposition import CompressionPlan
from decomposition.cache import digest
from rankrl.kits.file_group import Contents, FileGroup
from rankrl.kits.kit_writer import KitWriter, NamedFile, WrittenKit
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import LatencyOptions


@dataclass(frozen=True)
class FinishedFile:
    """A network in a file."""

    title: str
    path: Path
    score: float | None = None
    plan: CompressionPlan | None = None


def write_verify_kit(
    files: Sequence[FinishedFile], inputs: Batch, folder: Path, timing: LatencyOptions
) -> WrittenKit:
    """Write finished networks into a folder, with programs that time them and compare their outputs."""
    named = [
        NamedFile(
            digest(each.path.read_bytes()),
            each.title,
            each.score,
            None if each.plan is None else each.plan.to_json(),
        )
        for each in files
    ]

    def contents() -> Contents:
        return [load_model(each.path) for each in files], inputs

    kit = KitWriter(folder, {"batch": str(timing.batch)}, threads=timing.threads, whole=True)
    names = tuple(each.file for each in named)
    kit.times(FileGroup(names, contents, 2 * timing.runs, warm_up=3))
    return kit.finish(named)
