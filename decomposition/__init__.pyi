from .allocation import allocate, allocate_many
from .apply import apply_plan, build_structure, contracted, factorised_layers
from .attention import PlainAttention, plain_attention
from .batch_norm import reestimate_batch_norm
from .budget import Budget
from .candidates import Candidate, CandidateSet, plan_from_choices
from .compensation import compensate
from .cost import count_macs, count_parameters, evaluation_mode
from .errors import DecompositionError, PlanError
from .exchange import apply_fits, from_tensorly
from .factorised import FactorisedLayer
from .fitting import Fit, FitOptions, fit_weight
from .formats import TensorFormat, get_format, list_formats, register_format
from .heuristics import Heuristic, get_heuristic, list_heuristics, plan_by_heuristic, register_heuristic
from .inputs import ExampleInputs, Inputs, InputSpec, Positional, TensorSpec, example_batch, run_model
from .latency import LatencyTable
from .layers import LayerSpec, compressible_layers, inspect_layers
from .library import FitLibrary
from .modes import WeightModes
from .moments import InputMoments, collect_moments
from .operations import (
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
from .own_layers import plain_layers
from .permanent_weights import plain_weights
from .plan import CompressionPlan, LayerPlan, fingerprint, make_plan
from .rank_grid import candidate_ranks
from .registry import Registry
from .rewriting import Rewrite
from .rounding import calibrate_ranges, integer_layers, rounded_parameters, without_rounding
from .saving import load_compressed, save_compressed
from .sensitivity import collect_sensitivities
from .transposed import PlainTransposed, plain_transposed
from .vbmf import MatrixRank, matrix_rank

__all__ = [
    "ApplyOptions",
    "Budget",
    "Candidate",
    "CandidateSet",
    "ChannelFactors",
    "CompressionPlan",
    "Cost",
    "DecompositionError",
    "ExampleInputs",
    "Factorise",
    "FactorisedLayer",
    "Fit",
    "FitLibrary",
    "FitOptions",
    "GroupOperation",
    "Heuristic",
    "InputMoments",
    "InputSpec",
    "Inputs",
    "LatencyTable",
    "LayerOperation",
    "LayerPlan",
    "LayerSpec",
    "MatrixRank",
    "Operation",
    "PlainAttention",
    "PlainTransposed",
    "PlanError",
    "Positional",
    "Quantise",
    "Registry",
    "Rewrite",
    "TensorFormat",
    "TensorSpec",
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
    "plain_attention",
    "plain_layers",
    "plain_transposed",
    "plain_weights",
    "plan_by_heuristic",
    "plan_from_choices",
    "reestimate_batch_norm",
    "register_format",
    "register_heuristic",
    "register_operation",
    "rounded_parameters",
    "run_model",
    "save_compressed",
    "without_rounding",
]
