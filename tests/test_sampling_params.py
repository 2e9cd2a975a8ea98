"""Sampling parameters: ranges, types, and overrides that neither leak nor vanish."""

import math
from dataclasses import replace
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
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("min_p", "0.1"),
        ("typical_p", 0),
        ("typical_p", 1.01),
        ("typical_p", None),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 1.5),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", 5]),
        ("stop", 5),
        ("stop", None),
        ("include_stop", 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs_mode", "both"),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", "5"),
        ("n", 0),
        ("n", 1025),
        ("n", 1.0),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", [[5, 1.0, 2]]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"²": 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: 1.0, "5": 2.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["5"]),
        ("bad_words_ids", 5),
        ("bad_words_ids", [5]),
        ("bad_words_ids", ["55"]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[1, -1]]),
        ("bad_words_ids", [[1, 2**31]]),
        ("bad_words_ids", [[1, True]]),
        ("bad_words_ids", [[1]] * 1025),
        ("bad_words_ids", [[1] * 4097]),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
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
    with pytest.raises(SamplingError, match=f"^{name} must "):
        SamplingParams(**{name: value})
    with pytest.raises(SamplingError, match=rf"^line 3: {name} must "):
        checked_param(name, value, where="line 3")


def test_good_values_get_their_proper_type() -> None:
    params = SamplingParams(temperature=0, top_k=5, top_p=1, max_tokens=None, stop_token_ids=[3, 3])  # type: ignore[arg-type]
    assert isinstance(params.temperature, float)
    assert isinstance(params.top_p, float)
    assert params.stop_token_ids == (3, 3)
    assert hash(params) == hash(SamplingParams(temperature=0.0, top_k=5, stop_token_ids=(3, 3)))


def test_logit_bias_takes_the_keys_of_json_and_yaml() -> None:
    params = SamplingParams(logit_bias={"7": 1, 3: -100})  # type: ignore[arg-type]
    assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert SamplingParams(logit_bias=params.logit_bias) == params
    assert SamplingParams(logit_bias=[[3, -100], [7, 1]]) == params  # type: ignore[arg-type]
    assert len({params, SamplingParams(logit_bias={})}) == 2  # type: ignore[arg-type]
    message = (
        "logit_bias must be an object of at most 1024 token ids and biases from -100 to 100; that of token 5 must be"
    )
    with pytest.raises(SamplingError, match=message):
        SamplingParams(logit_bias={"5": -101})  # type: ignore[arg-type]


def test_lists_become_tuples() -> None:
    params = SamplingParams(allowed_token_ids=[5, 2], bad_words_ids=[[5], [2, 5]])  # type: ignore[arg-type]
    assert params.allowed_token_ids == (5, 2)
    assert params.bad_words_ids == ((5,), (2, 5))
    assert hash(params) != hash(SamplingParams())
    SamplingParams(bad_words_ids=((1, 2, 3, 4),) * 1024)
    SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1024)))


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="\n\n") == SamplingParams(stop=["\n\n"])  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_a_row_without_any_token_is_refused() -> None:
    with pytest.raises(SamplingError, match=r"allowed_token_ids must name at least one .* not \[5, 2\]"):
        SamplingParams(allowed_token_ids=(5, 2), bad_words_ids=((5,), (2,), (7,)))
    SamplingParams(allowed_token_ids=(5, 2), bad_words_ids=((5,), (5, 2)))
    for least, ids in ((0, (2,)), (1, (3,))):
        SamplingParams(allowed_token_ids=(5, 2), bad_words_ids=((5,),), stop_token_ids=ids, min_tokens=least)
    with pytest.raises(SamplingError, match="that bad_words_ids and stop_token_ids leave to it \\(min_tokens is 1\\)"):
        SamplingParams(allowed_token_ids=(5, 2), bad_words_ids=((5,),), stop_token_ids=(2,), min_tokens=1)
    params = SamplingParams(allowed_token_ids=(5, 2), stop_token_ids=(2,), min_tokens=1)
    params.require_a_choice([7])
    replace(params, ignore_eos=True).require_a_choice([5])
    replace(params, min_tokens=0).require_a_choice([5])
    with pytest.raises(SamplingError, match="that stop_token_ids and EOS leave to it"):
        params.require_a_choice([5])
    with pytest.raises(SamplingError, match=r"^row 4: allowed_token_ids") as caught:
        merged(SamplingParams(bad_words_ids=((5,),)), {"allowed_token_ids": [5]}, where="row 4")
    assert caught.value.where == "row 4"


def test_min_tokens_must_be_possible() -> None:
    SamplingParams(min_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(SamplingError, match="min_tokens must be at most max_tokens = 4, not 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(SamplingError, match="allowed_token_ids must name at least one token id that stop_token_ids"):
        SamplingParams(min_tokens=1, allowed_token_ids=(2,), stop_token_ids=(2, 3))


def test_token_ids_by_name() -> None:
    params = SamplingParams(
        stop_token_ids=(1,), logit_bias=((2, 0.5),), allowed_token_ids=(3, 4), bad_words_ids=((5,), (6, 7))
    )
    assert dict(params.named_token_ids()) == {
        "stop_token_ids": (1,),
        "logit_bias": (2,),
        "allowed_token_ids": (3, 4),
        "bad_words_ids": (5, 6, 7),
    }
    assert not any(ids for _, ids in SamplingParams().named_token_ids())


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
