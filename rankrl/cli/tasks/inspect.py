"""`task=inspect`: what the layers are, what they cost, and what they would lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from torch import nn

from decomposition import CandidateSet, Factorise, LayerSpec, get_format, inspect_layers
from decomposition.network.layers import skipping
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.data import ImageData
from rankrl.progress import progress_bar
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network, model_title

_FITTED_RANKS = 3
_WIDTH = 160


def inspect(config: AppConfig, folder: RunFolder) -> None:
    """Print one row a layer; errors, with `inspect.errors`, are relative output errors on training images."""
    candidates = options.candidate_options(config)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    specs = skipping(inspect_layers(network, data.input_shape), candidates.skip, candidates.only)
    fitted = _fitted(config, data, network, specs, folder) if config.inspect.errors else None
    params, macs = sum(spec.params for spec in specs), sum(spec.macs for spec in specs)
    table = Table(title=f"{model_title(config.model, network)} as {config.decomposition.format}")
    table.add_column("layer", overflow="fold")  # never cut: the names are what plans and options need
    table.add_column("weight", no_wrap=True)
    for column in ("params", "share", "MACs", "share", "ranks"):
        table.add_column(column, justify="right")
    table.add_column("stays as it is because" if fitted is None else "rank: params, error")
    for spec in specs:
        table.add_row(
            spec.name,
            "x".join(map(str, spec.weight_shape)),
            f"{spec.params:,}",
            f"{spec.params / max(params, 1):.1%}",
            f"{spec.macs:,}",
            f"{spec.macs / max(macs, 1):.1%}",
            ""
            if spec.refusal is not None
            else _ranks(spec, candidates.formats, tensorised=candidates.tensorised),
            spec.refusal or ("" if fitted is None else _examples(fitted[spec.name])),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = _WIDTH
    console.print(table)
    if fitted is None:
        console.print("inspect.errors=true fits every layer at a few ranks and shows what they lose.")


def _fitted(
    config: AppConfig, data: ImageData, network: nn.Module, specs: Sequence[LayerSpec], folder: RunFolder
) -> Mapping[str, CandidateSet]:
    """Return a few fitted candidates of every layer that can be decomposed."""
    library = steps.candidate_fits(config, steps.searched_network(config, data, network, folder))
    sites = {}
    with progress_bar("fit layers", len(library.specs)) as bar:
        for spec in specs:
            if spec.refusal is None:
                sites[spec.name] = library.candidates(spec.name, limit=_FITTED_RANKS)
                bar.advance()
    return sites


def _ranks(spec: LayerSpec, formats: Sequence[str], *, tensorised: bool) -> str:
    """Return the feasible ranks, of each format where there are several."""
    ranges = {}
    for name in formats:
        tensor_format = get_format(name)
        ranges[name] = f"1-{tensor_format.max_rank(tensor_format.modes(spec, tensorised=tensorised))}"
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
