"""A run of the bundled model with stop strings, log-probabilities and samples, as its lines show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.main import main
from specgen.model_path import resolve_model
from specgen.tokenizer import Tokenizer

TOKENIZER = Tokenizer(resolve_model("stories-7m"))
RECIPE = """
model: {path: stories-7m}
speculation: {num_tokens: 3}
sampling: {temperature: 0.8, max_tokens: 40, seed: 7}
output: {token_ids: true}
"""
PROMPT = "One day, a girl named Lily went to the park."


def lines_of(folder: Path, rows: list[dict[str, Any]], *sets: str) -> list[dict[str, Any]]:
    """The output lines of a run of these rows."""
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / f"out{len(list(folder.iterdir()))}.jsonl"
    args = ["run", str(folder / "recipe.yaml"), str(folder / "rows.jsonl"), "-q", "--output", str(out)]
    assert main([*args, *(word for one in sets for word in ("--set", one))]) in (0, 3)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in out.read_bytes().decode("utf-8").splitlines()]


def test_a_stop_string_cuts_text_ids_and_log_probabilities_at_one_token(tmp_path: Path) -> None:
    base = {"prompt": PROMPT, "sampling": {"seed": 3, "logprobs": 2}}
    (free,) = lines_of(tmp_path, [base])
    text = free["text"]
    stop = text[12:17]  # hardly ever a whole token
    for include in (False, True):
        for drafts in (0, 3):
            row = base | {"sampling": base["sampling"] | {"stop": [stop, "never"], "include_stop": include}}
            (line,) = lines_of(tmp_path, [row], f"speculation.num_tokens={drafts}")
            at = text.index(stop)
            assert (line["finish_reason"], line["stop"]) == ("stop", stop)
            assert line["text"] == text[: at + (len(stop) if include else 0)]
            count = len(line["token_ids"])
            assert line["token_ids"] == free["token_ids"][:count]
            assert line["usage"]["completion_tokens"] == count == len(line["logprobs"])
            assert line["logprobs"] == free["logprobs"][:count]
            assert stop in TOKENIZER.decode(line["token_ids"]) and stop not in TOKENIZER.decode(line["token_ids"][:-1])


def test_the_ways_to_end_are_told_apart_and_no_rows_parameters_reach_another(tmp_path: Path) -> None:
    """U63, U66: five rows that end in five ways, in two orders and each alone."""
    first = TOKENIZER.encode(PROMPT)
    rows: list[dict[str, Any]] = [
        {"id": "eos", "prompt": PROMPT, "sampling": {"logit_bias": {"1": 100}}},
        {"id": "text", "prompt": PROMPT, "sampling": {"stop": "e", "max_tokens": 200, "temperature": 0}},
        {"id": "token", "prompt": PROMPT, "sampling": {"allowed_token_ids": first[1:2], "stop_token_ids": first[1:2]}},
        {"id": "length", "prompt": PROMPT, "sampling": {"max_tokens": 3, "seed": 5}},
        {"id": "error", "prompt": PROMPT, "sampling": {"temprature": 1}},
    ]

    def told(lines: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
        names = ("finish_reason", "stop", "text", "token_ids", "seed", "error")
        for line in lines:
            (line["error"] or {}).pop("line", None)
        return {line["id"]: tuple(line[name] for name in names) for line in lines}

    forwards = told(lines_of(tmp_path, rows))
    assert [forwards[row["id"]][:2] for row in rows] == [
        ("stop", "<eos>"),
        ("stop", "e"),
        ("stop", first[1]),
        ("length", None),
        ("error", None),
    ]
    assert told(lines_of(tmp_path, rows[::-1])) == forwards
    for row in rows:
        assert told(lines_of(tmp_path, [row]))[row["id"]] == forwards[row["id"]]


def test_log_probabilities_are_strict_json_whatever_a_filter_removes(tmp_path: Path) -> None:
    """U34: one token keeps a probability; the entries are as many as the tokens, the prompt's as its tokens."""
    params = {"top_k": 1, "logprobs": 5, "logprobs_mode": "processed", "prompt_logprobs": 1, "max_tokens": 6}
    (line,) = lines_of(tmp_path, [{"prompt": PROMPT, "sampling": params}])
    assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
    assert all(entry["logprob"] == 0.0 and entry["top"] == [[entry["token_id"], 0.0]] for entry in line["logprobs"])
    ids = TOKENIZER.encode(PROMPT)
    assert line["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in line["prompt_logprobs"][1:]] == ids[1:]


def test_rows_that_did_not_ask_have_no_log_probabilities(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "sampling": {"max_tokens": 3, "logprobs": n}} for n in (None, 0, 2)]
    without, alone, two = lines_of(tmp_path, rows)
    assert "logprobs" not in without and "prompt_logprobs" not in without
    assert [len(entry["top"]) for entry in alone["logprobs"]] == [0] * 3
    assert [len(entry["top"]) for entry in two["logprobs"]] == [2] * 3


def test_samples_have_seeds_of_their_own_and_repeat(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": PROMPT, "sampling": {"n": 3, "max_tokens": 8}}, {"id": "b", "prompt": PROMPT}]
    first = lines_of(tmp_path, rows, "sampling.max_tokens=4")
    assert [(line["id"], line["sample"]) for line in first] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert len({line["seed"] for line in first}) == 4
    assert len({line["text"] for line in first[:3]}) == 3
    again = lines_of(tmp_path, rows[::-1], "sampling.max_tokens=4", "speculation.num_tokens=0")
    assert {(line["id"], line["sample"], line["text"]) for line in again} == {
        (line["id"], line["sample"], line["text"]) for line in first
    }


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", 21), ("stop", [""]), ("typical_p", 0), ("no_repeat_ngram_size", -1), ("n", 0)]
)
def test_what_cannot_be_honoured_is_that_rows_error(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": PROMPT, "sampling": {name: value}})
        + "\n"
        + json.dumps({"prompt": PROMPT, "sampling": {"max_tokens": 1}})
    )
    out = tmp_path / "out.jsonl"
    assert main(["run", str(tmp_path / "recipe.yaml"), str(tmp_path / "rows.jsonl"), "-q", "--output", str(out)]) == 3
    bad, good = (json.loads(line) for line in out.read_text().splitlines())
    assert bad["error"]["code"] == "bad_sampling" and name in bad["error"]["message"]
    assert good["error"] is None
