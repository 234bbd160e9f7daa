"""Problems in every format, for environments."""

import functools
from collections.abc import Callable

import pytest
from torch import nn

from decomposition.choose.library import FitLibrary
from decomposition.fit.fit_options import FitOptions
from decomposition.formats import list_formats
from rankrl.plan_search.space.problem import SearchProblem

Libraries = Callable[..., FitLibrary]


@pytest.fixture(scope="session")
def library_of(small_network: nn.Module, small_library: FitLibrary) -> Libraries:
    """Return `library_of(*formats)`: hasty fits in one format or several, made once."""

    @functools.cache
    def library(*formats: str) -> FitLibrary:
        specs, options = list(small_library.specs.values()), FitOptions(iterations=3)
        return FitLibrary(small_network, specs, formats, moments=small_library.moments, options=options)

    return library


@pytest.fixture(scope="module", params=list_formats())
def format_problem(
    request: pytest.FixtureRequest, small_network: nn.Module, library_of: Libraries
) -> SearchProblem:
    library = library_of(request.param)
    sites = library.all_candidates(limit=4)
    return SearchProblem.from_model(small_network, sites, (1, 8, 8), params=0.55, library=library)
