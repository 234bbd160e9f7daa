"""Tensor decompositions of trained networks, fitted to data.

    specs = compressible_layers(model, (3, 32, 32))
    plan = make_plan(model, (3, 32, 32), "tensor_ring", ranks=8)
    small = apply_plan(model, plan, calibration=images)

The package knows torch and nothing of rankrl: it can be used alone.
"""

from __future__ import annotations

from decomposition.allocation import Budget, allocate, allocate_many
from decomposition.apply import apply_plan, build_structure, contracted, factorised_layers
from decomposition.batch_norm import reestimate_batch_norm
from decomposition.candidates import Candidate, CandidateSet, plan_from_choices
from decomposition.compensation import compensate
from decomposition.cost import count_macs, count_parameters, evaluation_mode, example_batch
from decomposition.errors import DecompositionError, PlanError
from decomposition.exchange import apply_fits, from_tensorly
from decomposition.factorised import FactorisedLayer
from decomposition.fitting import Fit, FitOptions, fit_weight
from decomposition.formats import TensorFormat, get_format, list_formats, register_format
from decomposition.heuristics import (
    Heuristic,
    get_heuristic,
    list_heuristics,
    plan_by_heuristic,
    register_heuristic,
)
from decomposition.latency import LatencyTable
from decomposition.layers import LayerSpec, compressible_layers, inspect_layers
from decomposition.library import FitLibrary
from decomposition.modes import WeightModes
from decomposition.moments import InputMoments, collect_moments
from decomposition.operations import (
    ApplyOptions,
    ChannelFactors,
    Cost,
    Factorise,
    GroupOperation,
    LayerOperation,
    Operation,
    Quantise,
    list_operations,
    register_operation,
)
from decomposition.plan import CompressionPlan, LayerPlan, fingerprint, make_plan
from decomposition.rank_grid import candidate_ranks
from decomposition.registry import Registry
from decomposition.rounding import calibrate_ranges, integer_layers, rounded_parameters, without_rounding
from decomposition.saving import load_compressed, save_compressed
from decomposition.sensitivity import collect_sensitivities
from decomposition.vbmf import MatrixRank, matrix_rank

__all__ = [
    "ApplyOptions",
    "Budget",
    "Candidate",
    "CandidateSet",
    "ChannelFactors",
    "CompressionPlan",
    "Cost",
    "DecompositionError",
    "Factorise",
    "FactorisedLayer",
    "Fit",
    "FitLibrary",
    "FitOptions",
    "GroupOperation",
    "Heuristic",
    "InputMoments",
    "LatencyTable",
    "LayerOperation",
    "LayerPlan",
    "LayerSpec",
    "MatrixRank",
    "Operation",
    "PlanError",
    "Quantise",
    "Registry",
    "TensorFormat",
    "WeightModes",
    "allocate",
    "allocate_many",
    "apply_fits",
    "apply_plan",
    "build_structure",
    "calibrate_ranges",
    "candidate_ranks",
    "collect_moments",
    "collect_sensitivities",
    "compensate",
    "compressible_layers",
    "contracted",
    "count_macs",
    "count_parameters",
    "evaluation_mode",
    "example_batch",
    "factorised_layers",
    "fingerprint",
    "fit_weight",
    "from_tensorly",
    "get_format",
    "get_heuristic",
    "inspect_layers",
    "integer_layers",
    "list_formats",
    "list_heuristics",
    "list_operations",
    "load_compressed",
    "make_plan",
    "matrix_rank",
    "plan_by_heuristic",
    "plan_from_choices",
    "reestimate_batch_norm",
    "register_format",
    "register_heuristic",
    "register_operation",
    "rounded_parameters",
    "save_compressed",
    "without_rounding",
]
