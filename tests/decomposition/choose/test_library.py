"""Fits are computed once, in memory and on disk, and candidates describe what was fitted."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn

import decomposition.choose.library
from decomposition.calibration.moments import collect_moments
from decomposition.choose.candidates import CandidateSet, plan_from_choices
from decomposition.choose.library import FitLibrary
from decomposition.choose.listing import candidate_ranks
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FAST, FitOptions
from decomposition.formats import get_format, list_formats
from decomposition.network.geometry import plain_modes
from decomposition.network.layers import compressible_layers, inspect_layers
from decomposition.operations import ChannelFactors, Factorise, dense_cost, factors_of
from decomposition.plan.apply import apply_plan
from decomposition.plan.plan import LayerPlan

SHAPE = (3, 10, 10)
QUICK = FitOptions(iterations=2)
AT_3_2 = Factorise("tucker", (3, 2))


def library_of(
    model: nn.Module, name: str | tuple[str, ...] = "tucker", *, data: bool = False, **options: Any
) -> FitLibrary:
    specs = compressible_layers(model, SHAPE)
    moments = None
    if data:
        images = torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))
        moments = collect_moments(model, specs, images)
    return FitLibrary(model, specs, name, moments=moments, options=options.pop("fit", QUICK), **options)


def at_rank_2(library: FitLibrary) -> Factorise:
    """Layer 3 at rank 2 everywhere, in the library's only format."""
    (tensor_format,) = library.formats
    modes = library.modes("3", tensor_format)
    return Factorise(tensor_format.name, tensor_format.expand(modes, 2), factors_of(modes))


def refuse_to_fit(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this fit should have come from the cache")


def test_a_fit_is_computed_once(small_net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    library = library_of(small_net)
    first = library.fit("3", AT_3_2)
    monkeypatch.setattr(decomposition.choose.library, "Fitter", refuse_to_fit)
    assert library.fit("3", AT_3_2) is first


@pytest.mark.parametrize("name", list_formats())
def test_fits_on_disk_are_used_by_the_next_run(
    small_net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = library_of(small_net, name, data=True, folder=tmp_path / "fits")
    wanted = [site.errors for site in first.all_candidates(limit=3)]
    monkeypatch.setattr(decomposition.choose.library, "Fitter", refuse_to_fit)
    second = library_of(small_net, name, data=True, folder=tmp_path / "fits")
    for site, errors in zip(second.all_candidates(limit=3), wanted, strict=True):
        np.testing.assert_array_equal(site.errors, errors)
        for each in site.candidates:
            before, after = (library.weight(site.name, each.operations) for library in (first, second))
            torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)
    assert not list((tmp_path / "fits").glob(".fit-*"))


@pytest.mark.parametrize(
    "change",
    [
        {"fit": FitOptions(iterations=3)},
        {"data": True},
        {"data": True, "centred": False},
        {"tensorised": True},
        {"name": "tensor_train"},
    ],
    ids=lambda change: "-".join(change),
)
def test_fits_of_other_settings_are_not_taken(
    small_net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    arguments = {"name": "tensor_ring", "folder": tmp_path}
    first = library_of(small_net, **arguments)
    first.fit("3", at_rank_2(first))
    if "centred" in change:
        other_first = library_of(small_net, **arguments, data=True)
        other_first.fit("3", at_rank_2(other_first))
    second = library_of(small_net, **(arguments | change))
    monkeypatch.setattr(decomposition.choose.library, "Fitter", refuse_to_fit)
    with pytest.raises(AssertionError, match="come from the cache"):
        second.fit("3", at_rank_2(second))


def test_fits_of_other_channel_factors_are_not_taken(small_net: nn.Module, tmp_path: Path) -> None:
    """Both have three factors a layer, so their bonds and ranks are alike."""
    one = Factorise("tensor_train", (2,) * 6, ChannelFactors((3, 2, 2), (2, 2, 2)))
    other = Factorise("tensor_train", (2,) * 6, ChannelFactors((2, 2, 3), (2, 2, 2)))
    wanted = {each: library_of(small_net, "tensor_train").fit("3", each).error for each in (one, other)}
    assert wanted[one] != wanted[other]
    library = library_of(small_net, "tensor_train", folder=tmp_path)
    for each in (one, other):
        assert library.fit("3", each).error == wanted[each]
        assert library_of(small_net, "tensor_train", folder=tmp_path).fit("3", each).error == wanted[each]


def test_a_kernel_that_is_split_keeps_its_fits_apart_from_its_turned_one(tmp_path: Path) -> None:
    upright, turned = (nn.Sequential(nn.Conv2d(4, 6, size, bias=False)) for size in ((3, 2), (2, 3)))
    with torch.no_grad():
        turned[0].weight.copy_(upright[0].weight.reshape(6, 4, 2, 3))  # type: ignore[operator, union-attr]
    for name, files in (("tucker", 1), ("spatial_svd", 2)):
        folder = tmp_path / name
        for model in (upright, turned):
            specs = compressible_layers(model, (4, 8, 8))
            library = FitLibrary(model, specs, name, options=FitOptions(iterations=3), folder=folder)
            (chosen,) = library.formats
            ranks = chosen.expand(library.modes("0", chosen), 2)
            fit = library.fit("0", Factorise(name, ranks))
            shapes = chosen.core_shapes(library.modes("0", chosen), ranks)
            assert [tuple(core.shape) for core in fit.cores] == shapes
        assert len(list(folder.glob("*.safetensors"))) == files


def test_fits_of_other_weights_are_not_taken(small_net: nn.Module, tmp_path: Path) -> None:
    first = library_of(small_net, folder=tmp_path).fit("3", AT_3_2)
    with torch.no_grad():
        small_net[3].weight.mul_(torch.linspace(0, 1, 12)[:, None, None, None])  # type: ignore[operator, index, union-attr]
    assert library_of(small_net, folder=tmp_path).fit("3", AT_3_2).error != first.error


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x00" * 64], ids=["empty", "garbage", "zeros"])
def test_a_damaged_entry_is_computed_again(small_net: nn.Module, tmp_path: Path, damage: bytes) -> None:
    first = library_of(small_net, folder=tmp_path).fit("3", AT_3_2)
    (entry,) = tmp_path.glob("*.safetensors")
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    again = library_of(small_net, folder=tmp_path).fit("3", AT_3_2)
    assert again.error == first.error
    assert entry.read_bytes() == whole


def test_a_truncated_entry_is_computed_again(small_net: nn.Module, tmp_path: Path) -> None:
    first = library_of(small_net, folder=tmp_path).fit("3", AT_3_2)
    (entry,) = tmp_path.glob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-8])
    assert library_of(small_net, folder=tmp_path).fit("3", AT_3_2).error == first.error


@pytest.mark.parametrize("name", list_formats())
def test_candidates_end_dense_and_cost_what_their_operations_cost(small_net: nn.Module, name: str) -> None:
    for site in library_of(small_net, name).all_candidates(limit=4):
        assert len(site) <= 5
        dense = site.candidates[site.dense]
        assert site.dense == len(site) - 1
        assert dense.operations == ()
        assert dense.reason
        assert dense.error == 0
        assert len(site) == len(site.errors)
        assert dense.cost == dense_cost(site.spec)
        costs = [LayerPlan(site.name, each.operations).cost(site.spec) for each in site.candidates]
        assert costs == [each.cost for each in site.candidates]
        for measure in ("params", "macs", "bytes"):
            assert site.cost(measure).tolist() == [getattr(cost, measure) for cost in costs]
        assert (np.diff(site.params) > 0).all()
        assert {each.generator for each in site.candidates[:-1]} <= {name}


@pytest.mark.parametrize("name", list_formats())
def test_candidates_are_every_rank_that_shrinks_the_layer_or_a_grid_of_them(
    small_net: nn.Module, name: str
) -> None:
    tensor_format = get_format(name)
    for spec in compressible_layers(small_net, SHAPE):
        modes = tensor_format.modes(spec)
        every = candidate_ranks(tensor_format, spec, modes, limit=10**6)
        bias = spec.out_channels if spec.bias else 0
        sizes = [tensor_format.params(modes, ranks) + bias for ranks in every]
        assert all(size < spec.params for size in sizes)
        assert len(set(every)) == len(every)
        few = candidate_ranks(tensor_format, spec, modes, limit=3)
        assert len(few) <= 3
        assert set(few) <= set(every)
        if every:
            assert (few[0], few[-1]) == (every[0], every[-1])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", list_formats())
def test_candidates_are_multiples_or_a_bond_s_largest_rank(
    small_net: nn.Module, name: str, own: bool
) -> None:
    tensor_format = get_format(name)
    library = library_of(small_net, name, multiple=4)
    found = 0
    for spec in library.specs.values():
        modes = tensor_format.modes(spec)
        if own:
            unfitted = library.unfitted(spec.name).candidates[:-1]
            candidates = [each.ranks for (each,) in (one.operations for one in unfitted)]
            step = 4 if tensor_format.bonds_in_channels == 1 else 2  # two bonds of 2 make 4 channels
        else:
            step = 4
            candidates = candidate_ranks(tensor_format, spec, modes, multiple=4)
        for ranks in candidates:
            caps = tensor_format.max_ranks(modes)
            assert all(rank % step == 0 or rank in (1, 2, cap) for rank, cap in zip(ranks, caps, strict=True))
            found += 1
    assert found


def test_a_multiple_below_one_is_refused(small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="multiple=0"):
        library_of(small_net, multiple=0).all_candidates()


def test_progress_is_told_layer_by_layer(small_net: nn.Module) -> None:
    told: list[str] = []
    library_of(small_net).all_candidates(limit=2, progress=told.append)
    assert told == ["0", "3", "7"]


def test_a_plan_holds_the_choices_and_the_refused_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3))
    sites = library_of(model).all_candidates(limit=3)
    specs = inspect_layers(model, SHAPE)
    plan = plan_from_choices(sites, [1, sites[1].dense], specs, SHAPE, "test")
    assert plan["1"] == LayerPlan("1", sites[0].candidates[1].operations)
    assert plan["2"] == LayerPlan("2", reason=sites[1].candidates[-1].reason)
    assert "groups=3" in (plan["0"].reason or "")
    assert plan.chosen_by == "test"
    assert plan.specs(model) == specs


def test_missing_moments_are_named(small_net: nn.Module) -> None:
    specs = compressible_layers(small_net, SHAPE)
    moments = collect_moments(small_net, specs[:1], torch.randn(4, *SHAPE))
    with pytest.raises(DecompositionError, match="no input moments for layers 3, 7"):
        FitLibrary(small_net, specs, "tucker", moments=moments)


def test_infeasible_ranks_and_bad_weights_name_the_layer(small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="layer '3'"):
        library_of(small_net).fit("3", Factorise("tucker", (13, 2)))
    with torch.no_grad():
        small_net[3].weight[0, 0, 0, 0] = float("nan")  # type: ignore[index, union-attr, operator]
    with pytest.raises(DecompositionError, match="layer '3': the weight holds NaN"):
        library_of(small_net).fit("3", Factorise("tucker", (2, 2)))


def test_the_library_keeps_the_weights_it_was_made_with(small_net: nn.Module) -> None:
    library = library_of(small_net)
    before = library.weights["3"].clone()
    nn.init.zeros_(small_net[3].weight)  # type: ignore[index, union-attr, arg-type]
    assert torch.equal(library.weights["3"], before)


@pytest.mark.parametrize(
    ("names", "data"),
    [
        (("tucker", "cp"), False),
        (tuple(list_formats()), True),
        pytest.param(("tucker", "cp"), True, marks=pytest.mark.slow),
        pytest.param(tuple(list_formats()), False, marks=pytest.mark.slow),
    ],
    ids=["two", "all with data", "two with data", "all"],
)
def test_several_formats_feed_one_set_each_with_what_it_proposes_alone(
    small_net: nn.Module, names: tuple[str, ...], data: bool
) -> None:
    together = library_of(small_net, names, data=data)
    alone = {name: library_of(small_net, name, data=data) for name in names}
    assert [each.name for each in together.formats] == list(names)
    matrices = [name for name in names if name in ("cp", "spatial_svd", "tensor_train", "tucker")]
    for site in together.all_candidates(limit=3):
        with_kernel = site.spec.kernel_elements > 1
        left_out = ["pifa"] if with_kernel else matrices[1:]
        kept = [name for name in names if name not in left_out]
        own = [alone[name].candidates(site.name, limit=3) for name in kept]
        assert site.candidates[:-1] == tuple(each for one in own for each in one.candidates[:-1])
        assert (len(site) > len(own[0])) == (len(kept) > 1) == site.mixed
        assert not any(one.mixed for one in own)
        assert {one.importance for one in own} == {site.importance}
        assert all(one.candidates[-1] == site.candidates[-1] for one in own)
        for each in site.candidates:
            expected = alone[each.generator or names[0]].weight(site.name, each.operations)
            assert torch.equal(together.weight(site.name, each.operations), expected)


@pytest.mark.parametrize("name", ["cp", "tucker", "tensor_ring"])
@pytest.mark.parametrize(
    ("precision", "near"), [("int8_weights", {"abs": 1e-3, "rel": 0.01}), ("int4_weights", {"rel": 1e-9})]
)
def test_errors_of_rounded_candidates_are_those_of_rounded_weights(
    small_net: nn.Module, name: str, precision: str, near: dict[str, float]
) -> None:
    library = library_of(small_net, name, data=True, precisions=["float32", precision], fit=FAST)
    compared = 0
    for site in library.all_candidates(limit=4):
        for candidate in site.candidates:
            if len(candidate.operations) == 2:
                measured = library.lost(site.name, library.weight(site.name, candidate.operations))
                assert candidate.error**2 == pytest.approx(measured, **near)
                compared += 1
    assert compared


def test_several_formats_share_the_fits_on_disk_with_each_alone(
    small_net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("tensor_ring", "cp")
    wanted = [
        each
        for name in names
        for each in library_of(small_net, name, folder=tmp_path).all_candidates(limit=2)
    ]
    monkeypatch.setattr(decomposition.choose.library, "Fitter", refuse_to_fit)
    found = library_of(small_net, names, folder=tmp_path).all_candidates(limit=2)
    errors = {error for site in wanted for error in site.errors}
    assert {error for site in found for error in site.errors} == errors


def test_formats_that_there_are_not_are_refused(small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match=r"no tensor format was given; choose from cp, .*tucker"):
        library_of(small_net, ())
    with pytest.raises(DecompositionError, match=r"there is no format 'tuckr'.*Did you mean 'tucker'"):
        library_of(small_net, ("cp", "tuckr"))
    with pytest.raises(DecompositionError, match="format 'cp' has no tensorised form"):
        library_of(small_net, ("tensor_ring", "cp"), tensorised=True)


def test_operations_without_fits_are_refused(small_net: nn.Module) -> None:
    class Nothing:
        kind = "nothing"
        removes = False

    with pytest.raises(DecompositionError, match="layer '3': a library of fits knows nothing of 'nothing'"):
        library_of(small_net).weight("3", [Nothing()])  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["cp", ("tucker", "tensor_ring")], ids=["one", "two"])
def test_fits_side_by_side_are_those_of_one_process_bit_for_bit(
    small_net: nn.Module, tmp_path: Path, names: str | tuple[str, ...]
) -> None:
    alone = library_of(small_net, names, data=True)
    wanted = alone.all_candidates(limit=3)
    told: list[str] = []
    together = library_of(small_net, names, data=True, folder=tmp_path)
    found = together.all_candidates(limit=3, workers=2, progress=told.append)
    assert found == wanted
    assert sorted(told) == ["0", "3", "7"]
    prepared = library_of(small_net, names, data=True)
    given: list[CandidateSet] = []
    prepared.fit_all((prepared.unfitted(name, limit=3) for name in prepared.specs), given.append, workers=2)
    assert sorted(given, key=lambda site: site.name) == sorted(wanted, key=lambda site: site.name)
    for site in wanted:
        for (operation,) in (each.operations for each in site.candidates[:-1]):
            one, other = (library.fit(site.name, operation) for library in (alone, together))
            assert all(torch.equal(a, b) for a, b in zip(one.cores, other.cores, strict=True))
    assert len(list(tmp_path.glob("*.safetensors"))) == sum(len(site) - 1 for site in wanted)


@pytest.mark.slow
def test_a_layer_that_fails_in_a_process_is_named(small_net: nn.Module) -> None:
    with torch.no_grad():
        small_net[3].weight[0, 0, 0, 0] = float("nan")  # type: ignore[index, union-attr, operator]
    with pytest.raises(DecompositionError, match="layer '3': the weight holds NaN"):
        library_of(small_net).all_candidates(limit=2, workers=2)


def test_formats_that_are_two_matrices_are_one_without_a_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(12, 16, 1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 10))
    specs = compressible_layers(model, (12, 5, 5))
    modes, first = plain_modes(specs[0]), get_format("cp")
    names = [name for name in list_formats() if first.same_matrices(get_format(name), modes)]
    assert names == ["cp", "spatial_svd", "tensor_train", "tucker"]
    libraries = [FitLibrary(model, specs, name, options=QUICK) for name in names]
    for site in libraries[0].all_candidates(limit=4):
        sites = [library.candidates(site.name, limit=4) for library in libraries]
        costs, errors = (
            [[getattr(c, what) for c in each.candidates] for each in sites] for what in ("cost", "error")
        )
        assert all(cost == costs[0] for cost in costs)
        np.testing.assert_allclose(errors[1:], [errors[0]] * 3, rtol=1e-6)


class Experts(nn.Module):
    """Rows go to one of two layers; inputs of zeros, as layers are listed with, go to the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.usual, self.rare, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rare = x.detach().abs().amax(1) == 0
        y = x.new_zeros(len(x), 32)
        y[~rare], y[rare] = self.usual(x[~rare]), self.rare(x[rare])
        return self.last(torch.relu(y))


class Past(nn.Module):
    """A sum over the steps of a past, which may have none, and of the present."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.usual, self.rare, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past, present = self.rare(x[:, None][:, :0]), self.usual(x[:, None])
        return self.last(torch.relu(torch.cat([past, present], 1).sum(1)))


@pytest.mark.parametrize("kind", [Experts, Past])
def test_a_layer_that_no_input_reaches_stays_dense_with_that_reason(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, images = kind().eval(), torch.randn(64, 16)
    library = FitLibrary.calibrated(model, (16,), "cp", images, options=QUICK)
    assert "rare: none of the calibration inputs gets there" in caplog.text
    sites = library.all_candidates(limit=4)
    plan = plan_from_choices(sites, [0] * len(sites), inspect_layers(model, (16,)), (16,), "test")
    entries = {layer.name: layer for layer in plan}
    assert entries["rare"] == LayerPlan("rare", reason="none of the calibration inputs reaches it")
    assert entries["usual"].operations
    assert entries["last"].operations
    small = apply_plan(model, plan, images)
    assert small(images).isfinite().all()
    torch.testing.assert_close(small.rare.weight, model.rare.weight)


def test_fits_that_memory_has_no_room_for_are_kept_on_disk(
    small_net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = library_of(small_net, "cp", data=True).all_candidates(limit=3)
    kept = library_of(small_net, "cp", data=True)
    first = kept.fit("3", Factorise("cp", (3,)))
    monkeypatch.setattr("decomposition.choose.library._FITS_IN_MEMORY", 1)
    assert kept.all_candidates(limit=3) == expected
    assert not kept.cache.fits
    again = kept.fit("3", Factorise("cp", (3,)))
    assert again is not first
    assert again.error == first.error
    assert all(map(torch.equal, again.cores, first.cores))
