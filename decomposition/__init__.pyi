from .apply.apply import apply_plan, build_structure
from .apply.decay import decay_groups
from .apply.exchange import apply_fits, from_tensorly
from .apply.forms import contracted, factorised_layers
from .apply.saving import load_compressed, save_compressed
from .calibration.batch_norm import reestimate_batch_norm
from .calibration.moments import InputMoments, collect_moments
from .calibration.sensitivity import collect_sensitivities
from .candidates.candidates import Candidate, CandidateSet
from .candidates.chosen_plan import plan_from_choices
from .candidates.library import FitLibrary
from .choose.allocation import allocate, allocate_many
from .choose.budget import Budget
from .choose.heuristics import (
    Heuristic,
    get_heuristic,
    list_heuristics,
    plan_by_heuristic,
    register_heuristic,
)
from .choose.latency import LatencyTable
from .choose.vbmf import MatrixRank, matrix_rank
from .errors import DecompositionError, PlanError
from .fit.compensation import compensate
from .fit.fit_options import FitOptions
from .fit.fitting import Fit, fit_weight
from .formats import TensorFormat, get_format, list_formats, register_format
from .formats.factorised import FactorisedLayer
from .formats.rank_grid import candidate_ranks
from .network.cost import count_macs, count_parameters, evaluation_mode
from .network.input_specs import InputSpec, TensorSpec
from .network.inputs import ExampleInputs, Inputs, Positional, example_batch, run_model
from .network.layers import LayerSpec, compressible_layers, inspect_layers
from .network.modes import WeightModes
from .network.permanent_weights import plain_weights
from .network.rewriting import Rewrite
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
from .plan.from_ranks import make_plan
from .plan.layer_plan import LayerPlan
from .plan.plan import CompressionPlan, fingerprint
from .registry import Registry
from .rewrites.attention import PlainAttention, plain_attention
from .rewrites.own_layers import plain_layers
from .rewrites.transposed import PlainTransposed, plain_transposed

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
