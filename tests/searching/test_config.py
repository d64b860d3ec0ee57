"""Settings of a search: what it does not use cannot be set, and shared settings give each what it uses."""

from dataclasses import replace

import pytest

from dmx.searching.config import (
    SEARCHES,
    USED_BY,
    DescentConfig,
    PolishConfig,
    RotationConfig,
    SearchConfig,
    SearchConfigError,
    SearchSettings,
)

CHANGED = {
    "score_batches": 2,
    "steps": 7,
    "objective": "kl",
    "descent": DescentConfig(lr=3.0),
    "polish": PolishConfig(rounds=2),
}
ALL = SearchSettings(**CHANGED, units="layer", seed=3)


@pytest.mark.parametrize("setting", CHANGED)
@pytest.mark.parametrize("name", SEARCHES)
def test_what_a_search_does_not_use_is_refused_by_name(name, setting):
    if setting in USED_BY[name]:
        assert getattr(SearchConfig(name=name, **{setting: CHANGED[setting]}), setting)
        return
    words = rf"search\.{setting}[.=].* is not for search\.name={name}, .*Leave it out"
    with pytest.raises(SearchConfigError, match=words):
        SearchConfig(name=name, **{setting: CHANGED[setting]})


@pytest.mark.parametrize("name", SEARCHES)
def test_shared_settings_give_a_search_what_it_uses(name):
    config = ALL.for_search(name, seed=4)
    assert type(config) is SearchConfig
    assert (config.name, config.units, config.seed) == (name, "layer", 4)
    for setting, value in CHANGED.items():
        assert (getattr(config, setting) == value) == (setting in USED_BY[name])
    with pytest.raises(SearchConfigError, match="is not for"):
        ALL.for_search("uniform", polish=PolishConfig(rounds=1))


def test_what_none_of_several_searches_uses_is_told():
    assert ALL.unused(SEARCHES) == []
    assert ALL.unused(["kl", "random"]) == [
        "search.steps=7",
        "search.objective=kl",
        "search.descent.lr=3.0",
    ]
    assert ALL.unused(["uniform", "differentiable"]) == ["search.score_batches=2"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rotation": RotationConfig(lr=2.0)},
            r"search\.rotation\.lr=2\.0 needs .*transform=learned",
        ),
        (
            {"residual_block": 64},
            r"search\.residual_block=64 needs search\.transform=hadamard_full",
        ),
        (
            {"transform": "learned", "rotation": RotationConfig(file="a", lr=2.0)},
            r"rotations from search\.rotation\.file=a are used as they are",
        ),
    ],
    ids=str,
)
def test_settings_of_a_transform_that_is_not_asked_for_are_refused(settings, words):
    with pytest.raises(SearchConfigError, match=words):
        SearchConfig(**settings)


def test_another_search_takes_the_file_of_rotations_and_not_how_they_were_learned():
    learning = SearchSettings(transform="learned", rotation=RotationConfig(lr=2.0))
    assert learning.for_search("differentiable").rotation.lr == 2.0
    given = replace(learning, rotation=RotationConfig(file="a", lr=2.0))
    assert given.for_search("kl").rotation == RotationConfig(file="a")
