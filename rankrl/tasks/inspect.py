"""`task=inspect`: what the layers are, what they cost, and what they would lose."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from decomposition import CandidateSet, Factorise, FitLibrary, LayerSpec, inspect_layers
from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.tasks import steps
from rankrl.tasks.registry import register_task
from rankrl.workflow.network import build_network, model_title
from rankrl.workflow.run_folder import RunFolder

_SHOWN_RANKS = 3
_WIDTH = 160


@register_task("inspect", "list the layers: shape, cost, feasible ranks and their errors, or why not")
def inspect(config: AppConfig, folder: RunFolder) -> None:
    """Print one row a layer; errors are relative output errors on training images."""
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    library = steps.candidate_fits(config, network, steps.calibration(config, data, network))
    specs = inspect_layers(network, data.input_shape)
    params, macs = sum(spec.params for spec in specs), sum(spec.macs for spec in specs)
    table = Table(title=f"{model_title(config.model, network)} as {options.decomposition_name(config)}")
    table.add_column("layer", overflow="fold")  # never cut: the names are what plans and options need
    table.add_column("weight", no_wrap=True)
    for column in ("params", "share", "MACs", "share", "ranks"):
        table.add_column(column, justify="right")
    table.add_column("rank: params, error")
    for spec in specs:
        site = library.candidates(spec.name, limit=_SHOWN_RANKS) if spec.refusal is None else None
        table.add_row(
            spec.name,
            "x".join(map(str, spec.weight_shape)),
            f"{spec.params:,}",
            f"{spec.params / params:.1%}",
            f"{spec.macs:,}",
            f"{spec.macs / macs:.1%}",
            "" if site is None else _range(library, spec),
            spec.refusal if site is None else _examples(site),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = _WIDTH
    console.print(table)


def _range(library: FitLibrary, spec: LayerSpec) -> str:
    """Return the feasible ranks, of each format where there are several."""
    ranges = {each.name: f"1-{each.max_rank(library.modes(spec.name, each))}" for each in library.formats}
    if len(ranges) == 1:
        return next(iter(ranges.values()))
    return "; ".join(f"{name} {span}" for name, span in ranges.items())


def _examples(site: CandidateSet) -> str:
    several = site.mixed
    shown = [
        f"{operation.format + ' ' if several else ''}{max(operation.ranks)}: "
        f"{candidate.cost.params:,}, {candidate.error:.1%}"
        for candidate in site.candidates
        for operation in candidate.operations
        if isinstance(operation, Factorise)
    ]
    return "; ".join(shown) or "no rank makes it smaller"
