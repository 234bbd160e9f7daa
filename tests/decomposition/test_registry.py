"""A registry finds what was registered, says what there is, and forgets what a test added."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition import PlanError, Registry
from decomposition.registry import did_you_mean

names = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="_"), min_size=1)


def registry_of(*entries: str) -> Registry[int]:
    registry: Registry[int] = Registry("colour", PlanError)
    for number, name in enumerate(entries):
        registry.add(name, number, f"the colour {name}")
    return registry


def test_what_is_added_is_found_with_its_description() -> None:
    registry: Registry[object] = Registry("colour", ValueError)
    entry = object()
    assert registry.add("red", entry, "like blood") is entry
    assert registry["red"] is entry
    assert registry.description("red") == "like blood"
    assert "red" in registry
    assert "blue" not in registry
    assert 3 not in registry
    registry.add("blue", 3)
    assert registry.description("blue") == ""


@given(st.sets(names, max_size=8), st.sampled_from(["*", "a*", "*_", "?", "[ab]*", "A*", "none"]))
def test_names_are_those_that_match_sorted(entries: set[str], pattern: str) -> None:
    registry = registry_of(*entries)
    assert registry.names() == sorted(entries)
    assert registry.names(pattern) == sorted(name for name in entries if fnmatchcase(name, pattern))


@pytest.mark.parametrize("error", [ValueError, PlanError])
def test_unknown_names_are_refused_with_all_there_are_and_the_nearest(error: type[Exception]) -> None:
    registry: Registry[int] = Registry("colour", error)
    registry.add("violet", 1)
    registry.add("amber", 2)
    for ask in (registry.__getitem__, registry.description):
        with pytest.raises(
            error,
            match=r"^there is no colour 'violett'; choose from amber, violet\. Did you mean 'violet'\?$",
        ):
            ask("violett")
        with pytest.raises(error, match=r"^there is no colour 'xyz'; choose from amber, violet\.$"):
            ask("xyz")


def test_taken_names_are_refused_and_keep_what_they_stood_for() -> None:
    registry = registry_of("red", "blue")
    with pytest.raises(PlanError, match="colour 'blue' already; choose another name"):
        registry.add("blue", 7, "another")
    assert registry["blue"] == 1
    assert registry.description("blue") == "the colour blue"


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_registered_in_a_block_is_forgotten_at_its_end(fails: bool) -> None:
    registry = registry_of("red", "blue")
    try:
        with registry.restored():
            registry.add("green", 7)
            with registry.restored():
                registry.add("grey", 8)
                assert registry.names("g*") == ["green", "grey"]
            assert registry.names("g*") == ["green"]
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert registry.names() == ["blue", "red"]
    assert (registry["red"], registry["blue"]) == (0, 1)
    registry.add("green", 9)
    assert registry["green"] == 9


def test_nothing_is_guessed_when_no_name_is_near() -> None:
    assert did_you_mean("tuker", ["cp", "tucker"]) == " Did you mean 'tucker'?"
    assert did_you_mean("tuker", ["cp"]) == ""
    assert did_you_mean(None, ["cp"]) == ""
