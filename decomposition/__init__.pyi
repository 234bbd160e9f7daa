from .calibration.moments import InputMoments, collect_moments, collect_sensitivities, reestimate_batch_norm
from .choose.allocation import allocate, allocate_many
from .choose.budget import Budget, LatencyTable
from .choose.candidates import Candidate, CandidateSet, plan_from_choices
from .choose.heuristics import (
    Heuristic,
    MatrixRank,
    get_heuristic,
    list_heuristics,
    matrix_rank,
    plan_by_heuristic,
    register_heuristic,
)
from .choose.library import FitLibrary
from .choose.listing import candidate_ranks
from .errors import DecompositionError, PlanError
from .fit.fit_options import FitOptions
from .fit.fitting import Fit, fit_weight
from .fit.refit import compensate
from .formats import TensorFormat, get_format, list_formats, register_format
from .formats.layers import FactorisedLayer
from .network.cost import count_macs, count_parameters, evaluation_mode
from .network.geometry import WeightModes
from .network.inputs import ExampleInputs, Inputs, InputSpec, Positional, TensorSpec, example_batch, run_model
from .network.layers import LayerSpec, compressible_layers, inspect_layers
from .network.rounding import calibrate_ranges, integer_layers, rounded_parameters, without_rounding
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
from .plan.apply import apply_plan, build_structure, contracted, decay_groups, factorised_layers
from .plan.plan import CompressionPlan, LayerPlan, fingerprint, make_plan
from .plan.save import apply_fits, from_tensorly, load_compressed, save_compressed
from .registry import Registry
from .rewrites import (
    PlainAttention,
    PlainTransposed,
    Rewrite,
    plain_attention,
    plain_layers,
    plain_transposed,
    plain_weights,
)

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
    "decay_groups",
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
