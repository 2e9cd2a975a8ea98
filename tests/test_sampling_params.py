"""Sampling parameters: ranges, types, and overrides that neither leak nor vanish."""

import math
from typing import Any

import pytest

from specgen.sampling_params import PARAM_NAMES, SamplingError, SamplingParams, checked_param, merged


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "0.8"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("ignore_eos", 1),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("seed", False),
    ],
)
def test_bad_values_are_refused_naming_parameter_and_value(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=f"^{name} must be"):
        SamplingParams(**{name: value})
    with pytest.raises(SamplingError, match=rf"^line 3: {name} must be .*, not "):
        checked_param(name, value, where="line 3")


def test_good_values_get_their_proper_type() -> None:
    params = SamplingParams(temperature=0, top_k=5, top_p=1, max_tokens=None, stop_token_ids=[3, 3])  # type: ignore[arg-type]
    assert isinstance(params.temperature, float)
    assert isinstance(params.top_p, float)
    assert params.stop_token_ids == (3, 3)
    assert hash(params) == hash(SamplingParams(temperature=0.0, top_k=5, stop_token_ids=(3, 3)))


def test_defaults_have_no_hidden_limit() -> None:
    params = SamplingParams()
    assert params.max_tokens is None
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 0, 1.0, 1.0)


def test_overrides_are_laid_over_the_defaults_and_leave_them_alone() -> None:
    defaults = SamplingParams(temperature=0.6, max_tokens=9, seed=3)
    rows = [merged(defaults, over) for over in ({"max_tokens": 2}, {}, {"temperature": 0}, {"max_tokens": None})]
    assert [row.max_tokens for row in rows] == [2, 9, 9, None]
    assert [row.temperature for row in rows] == [0.6, 0.6, 0.0, 0.6]
    assert defaults == SamplingParams(temperature=0.6, max_tokens=9, seed=3)


def test_an_unknown_override_names_the_nearest() -> None:
    with pytest.raises(SamplingError) as caught:
        merged(SamplingParams(), {"temprature": 0.3}, where="row 4")
    assert "temprature" in str(caught.value)
    assert "did you mean 'temperature'?" in str(caught.value)
    assert caught.value.where == "row 4"
    with pytest.raises(SamplingError, match="known: "):
        merged(SamplingParams(), {"zzz": 1})


def test_every_parameter_has_a_check() -> None:
    assert set(PARAM_NAMES) == set(SamplingParams.__slots__)
