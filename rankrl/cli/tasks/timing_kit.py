"""`task=timing_kit`: all that a budget in time would time here, to be timed on another device."""

from __future__ import annotations

from rich.console import Console

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.errors import counted
from rankrl.kits.kit_writer import WrittenKit
from rankrl.request import write_kit
from rankrl.runs.run_folder import RunFolder


def timing_kit(config: AppConfig, folder: RunFolder) -> None:
    """Write the kit of a classifier of a data set's images."""
    config = options.for_kit(config, folder.kit)
    data = options.dataset(config)
    network = steps.searched_network(config, data, steps.dense_network(config, data, folder), folder)
    show(write_kit(network, options.candidate_options(config), options.request(config), folder.kit))


def show(kit: WrittenKit, then: str = "Then search with timing.table=times.json") -> None:
    """Say where a kit is and what to do with it."""
    Console().print(
        f"kit: {counted(kit.files, 'file')}, {kit.bytes / 1e6:.1f} MB in {kit.folder}. Copy it to the device "
        f"and run `python measure.py` there, or open index.html in its browser (docs/devices.md). {then}",
        soft_wrap=True,
    )
