"""`specgen verify`: the same tokens are found the same, and what is planted in one of the runs is found and judged."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_checkpoint

from specgen.cli.main import main
from specgen.engine.client import EngineClient
from specgen.engine.request import EngineRequest
from specgen.errors import InputError, RecipeError
from specgen.job.verdict import Difference
from specgen.job.verify import Answer, VerifyResult, VerifyRow, new_probe, plain_differences, run_verify
from specgen.job.verify_peer import load_transformers, require_largest_logit, transformers_differences
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.recipe import Recipe, recipe_from_settings
from specgen.sampling_params import SamplingParams
from specgen.worker.model_runner import ModelRunner
from specgen.worker.speculator import MTPSpeculator

ROOT = Path(__file__).parent.parent.parent
VOCAB = 64
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, max_tokens=9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify"))


def rows_of(params: SamplingParams) -> list[VerifyRow]:
    prompts = ([7, 3, 9], [5, 60, 2, 2, 8], [1])
    return [VerifyRow(f"r{i}", i + 1, EngineRequest(i, p, params, 70 + i)) for i, p in enumerate(prompts)]


def verified(
    folder: Path, rows: list[VerifyRow], *, k: int = 2, against: str = "plain", eos: tuple[int, ...] = ()
) -> VerifyResult:
    """The rows through run_verify, over real engines; what it told is of no interest here."""
    recipe = recipe_from_settings(
        [f"speculation.num_tokens={k}", "engine.num_blocks=64", "engine.max_num_batched_tokens=32"]
    )
    quiet = {"on_progress": lambda text: None}

    def make_engine(side: Recipe) -> EngineClient:
        return EngineClient.create(side, folder, eos, check=True)

    find: Callable[..., Any] = functools.partial(plain_differences, recipe, rows, make_engine, **quiet)
    if against == "transformers":
        find = functools.partial(transformers_differences, rows, load_transformers(recipe, folder), **quiet)
    probe = functools.partial(new_probe, recipe, folder)
    return run_verify(recipe, rows, make_engine, probe, find, against=against, text_of="t{}".format, **quiet)


def differences(result: VerifyResult) -> dict[str | int | None, Difference]:
    return {row.id: row.difference for row in result.rows if row.difference is not None}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same(tiny: Path, params: SamplingParams) -> None:
    result = verified(tiny, rows_of(params))
    assert (differences(result), result.num_near_ties, result.num_real, result.tolerance) == ({}, 0, 0, None)
    assert [row.num_tokens for row in result.rows] == [9, 9, 9]
    assert result.as_dict()["same"] == 3


def test_transformers_agrees(tiny: Path) -> None:
    assert differences(verified(tiny, rows_of(GREEDY), against="transformers")) == {}


def plant_token(monkeypatch: pytest.MonkeyPatch, seed: int, num_committed: int, token_id: int) -> None:
    """In the speculative run, the row of this seed gets `token_id` behind so many committed tokens."""
    real = ModelRunner._sample

    def planted(self: ModelRunner, batch: Any, hidden: torch.Tensor) -> Any:
        sampled, num_sampled, num_rejected = real(self, batch, hidden)
        if isinstance(self.drafter, MTPSpeculator):
            for b, slot in enumerate(batch.idx_mapping.tolist()):
                at = num_committed - int(self.states.total_len[slot])
                if int(self.states.seeds[slot]) == seed and 0 <= at < int(num_sampled[b]):
                    sampled[b, at] = token_id
        return sampled, num_sampled, num_rejected

    monkeypatch.setattr(ModelRunner, "_sample", planted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("position", [0, 4, 8])
def test_a_changed_token_is_a_real_difference(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, position: int
) -> None:
    rows = rows_of(params)
    with EngineClient.create(
        recipe_from_settings(["speculation.num_tokens=0", "engine.max_num_seqs=1"]), tiny, ()
    ) as engine:
        engine.add_request(rows[1].request)
        right: list[int] = []
        while len(right) < 9:
            right += [token for output in engine.get_outputs(1.0) for token in output.new_token_ids]
    wrong = (right[position] + 11) % VOCAB
    plant_token(monkeypatch, 71, len(rows[1].request.prompt_token_ids) + position, wrong)
    result = verified(tiny, rows)
    assert (result.num_near_ties, result.num_real) == (0, 1)
    (difference,) = differences(result).values()
    assert differences(result).keys() == {"r1"}
    assert difference.position == position
    assert (difference.speculative.token_id, difference.speculative.text) == (wrong, f"t{wrong}")
    assert (difference.other.token_id, difference.other.text) == (right[position], f"t{right[position]}")
    assert (difference.speculative.reproduced, difference.other.reproduced) == (False, True)
    assert difference.speculative.top_two == difference.other.top_two
    assert difference.other.top_two[0].token_id == right[position]
    assert difference.noise == 0
    assert difference.gap is not None
    assert difference.gap > 1e-3
    assert "gap is larger" in difference.reason


def plant_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, bool], None]) -> None:
    """The model's logits, changed in place; `change` is told whether the call has several rows."""
    real = DeepseekV3ForCausalLM.compute_logits

    def planted(self: DeepseekV3ForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(self, hidden)
        change(logits, hidden.shape[0] > 1)
        return logits

    monkeypatch.setattr(DeepseekV3ForCausalLM, "compute_logits", planted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_bias_in_the_verify_shape_is_a_real_difference(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    def bias(logits: torch.Tensor, several: bool) -> None:
        logits[:, 33] += 20.0 * several

    plant_logits(monkeypatch, bias)
    result = verified(tiny, rows_of(params))
    assert (result.num_near_ties, result.num_real) == (0, 3)
    for difference in differences(result).values():
        assert difference.speculative.token_id == 33
        assert difference.speculative.reproduced
        assert difference.other.reproduced
        assert difference.noise == pytest.approx(20.0, abs=1e-3)
        assert "more than rounding" in difference.reason


def test_rounding_that_turns_a_tie_is_a_near_tie(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tie(logits: torch.Tensor, several: bool) -> None:
        """The token after the likeliest one comes as near to it as rounding goes, from above or below."""
        best, ids = logits.max(dim=1)
        rival = ((ids + 1) % VOCAB)[:, None]
        logits.scatter_(1, rival, (best + (2e-5 if several else -2e-5))[:, None])

    plant_logits(monkeypatch, tie)
    result = verified(tiny, rows_of(GREEDY))
    assert result.num_real == 0
    assert result.num_near_ties > 0
    assert (result.dtype, result.tolerance) == ("float32", 1e-4)
    for difference in differences(result).values():
        assert difference.speculative.token_id == (difference.other.token_id or 0) + 1
        assert difference.speculative.reproduced
        assert difference.other.reproduced
        assert difference.gap == pytest.approx(2e-5, rel=0.2)
        assert difference.noise == pytest.approx(4e-5, rel=0.2)


def test_a_wrong_model_is_found_by_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that both of our runs share."""

    def bias(logits: torch.Tensor, several: bool) -> None:
        logits[:, 33] += 3.0

    plant_logits(monkeypatch, bias)
    rows = rows_of(SamplingParams(temperature=0, max_tokens=30))
    assert differences(verified(tiny, rows)) == {}
    result = verified(tiny, rows, against="transformers")
    assert (result.num_near_ties, result.num_real) == (0, 3)
    for difference in differences(result).values():
        assert difference.speculative.token_id == 33
        assert difference.other.name == "transformers"
        assert difference.other.token_id == difference.other.top_two[0].token_id != 33
        assert difference.noise == pytest.approx(3.0, abs=1e-3)


class Scripted:
    """Gives each request its script; a probe that must not be asked."""

    def __init__(self, fake_engine: Any, ours: list[tuple[list[int], str]], plain: list[tuple[list[int], str]]) -> None:
        self.fake_engine, self.ours, self.plain = fake_engine, ours, plain
        self.recipes: list[Recipe] = []

    def make_engine(self, recipe: Recipe) -> Any:
        self.recipes.append(recipe)
        script = self.ours if recipe.speculation.num_tokens else self.plain
        return self.fake_engine(lambda request: script[request.request_id])

    def result(self) -> VerifyResult:
        recipe, rows = recipe_from_settings(["engine.max_num_seqs=3"]), rows_of(GREEDY)
        self.told: list[str] = []
        find = functools.partial(plain_differences, recipe, rows, self.make_engine, on_progress=self.told.append)
        return run_verify(
            recipe,
            rows,
            self.make_engine,
            lambda num_tokens: Refusing(),
            find,
            against="plain",
            text_of=str,
            on_progress=self.told.append,
        )


class Refusing:
    dtype = torch.float32

    def alone(self, *args: object) -> Any:
        raise AssertionError

    verifying = alone

    def close(self) -> None:
        pass


def test_both_sides_run_as_they_say(fake_engine: Any) -> None:
    script = [([5, 6], "length"), ([7], "length"), ([8, 8, 8], "length")]
    scripted = Scripted(fake_engine, script, script)
    assert differences(scripted.result()) == {}
    ours, plain = scripted.recipes
    assert (ours.speculation.num_tokens, ours.engine.max_num_seqs, ours.engine.enable_prefix_caching) == (3, 3, True)
    assert (plain.speculation.num_tokens, plain.engine.max_num_seqs) == (0, 1)
    assert not plain.engine.enable_prefix_caching
    assert scripted.told == ["3 rows as the recipe says, 3 drafts a step", "3 rows plainly, one by one"]


def test_another_end_is_a_real_difference(fake_engine: Any) -> None:
    ours = [([5, 6], "stop"), ([7], "length"), ([8, 8, 8], "length")]
    plain = [([5, 6], "length"), ([7], "length"), ([8, 8], "stop")]
    found = differences(Scripted(fake_engine, ours, plain).result())
    assert found.keys() == {"r0", "r2"}
    assert not any(difference.is_near_tie for difference in found.values())
    assert (found["r0"].position, found["r0"].speculative.token_id, found["r0"].other.token_id) == (2, None, None)
    assert (found["r0"].speculative.text, found["r0"].other.text) == (
        "end of row (stop: <eos>)",
        "end of row (length)",
    )
    assert (found["r2"].position, found["r2"].speculative.token_id, found["r2"].other.token_id) == (2, 8, None)
    assert found["r2"].speculative.text == "8"


def test_a_row_that_fails_is_named(fake_engine: Any) -> None:
    script = [([5], "length"), ([7], "error"), ([8], "length")]
    with pytest.raises(InputError, match=":2: the row failed: scripted failure"):
        Scripted(fake_engine, script, script).result()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": 0.5}, "temperature 0.5"),
        ({"temperature": 0, "repetition_penalty": 1.5}, "repetition_penalty 1.5"),
        ({"presence_penalty": 0.5}, "temperature 1.0, presence_penalty 0.5"),
    ],
)
def test_transformers_is_for_greedy_rows(params: dict[str, Any], named: str) -> None:
    wanted = SamplingParams(temperature=0, top_k=4, top_p=0.5, stop_token_ids=(5,), ignore_eos=True, max_tokens=3)
    require_largest_logit(rows_of(wanted))
    rows = [*rows_of(GREEDY), VerifyRow(None, 9, EngineRequest(9, [1], SamplingParams(**params), 1))]
    with pytest.raises(RecipeError, match=f"row of line 9 has {named}"):
        require_largest_logit(rows)


def test_transformers_judges_after_our_tokens() -> None:
    rows = rows_of(GREEDY)
    asked: list[tuple[list[int], list[int]]] = []

    def output_logits(prompt: Any, output: Any) -> torch.Tensor:
        asked.append((prompt, output))
        return torch.nn.functional.one_hot(torch.tensor([4, 5, 6])[: len(output)], 8).float()

    ours = [Answer([4, 5, 6], "length"), Answer([4, 7, 6], "stop"), Answer([4], "stop")]
    found = transformers_differences(rows, lambda: output_logits, ours, on_progress=lambda text: None)
    assert asked == [(row.request.prompt_token_ids, a.token_ids) for row, a in zip(rows, ours, strict=True)]
    assert found[0] is None
    assert found[2] is None
    assert found[1] is not None
    assert (found[1].position, found[1].other.token_id, found[1].following) == (1, 5, [7, 6])


# the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with job.yaml and three rows, over the bundled model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "model: {path: stories-7m, device: cpu, dtype: float32}\ninput: {path: in.jsonl}\n"
        "speculation: {num_tokens: 2}\nsampling: {seed: 7, max_tokens: 6}\n"
        "engine: {num_blocks: 40, max_num_batched_tokens: 32}\n"
    )
    prompts = ["Once upon a time", "The little dog", "One day"]
    lines = [json.dumps({"id": f"story-{i}", "prompt": prompt}) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_the_command_on_the_bundled_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "job.yaml", "--rows", "2", "--json", "result.json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == (
        "2 rows, 12 output tokens, 2 drafts a step, against plain: 2 the same, 0 near-ties, 0 real differences\n"
    )
    assert captured.err == "2 rows as the recipe says, 2 drafts a step\n2 rows plainly, one by one\n"
    content = json.loads((folder / "result.json").read_text())
    assert (content["rows"], content["same"], content["recipe"]["speculation.num_tokens"]) == (2, 2, 2)
    assert content["results"][1] == {"id": "story-1", "line": 2, "num_tokens": 6, "difference": None}


def test_the_command_says_what_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bias(logits: torch.Tensor, several: bool) -> None:
        logits[:, 300] += 50.0 * several

    plant_logits(monkeypatch, bias)
    assert main(["verify", "job.yaml", "--rows", "2", "--json", "-"]) == 4
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert (content["real_differences"], content["rule"]["tolerance"]) == (2, 1e-4)
    difference = content["results"][0]["difference"]
    assert difference["speculative"]["token_id"] == 300
    for part in (
        "row 'story-0' (line 1), output token 0\n",
        "speculative",
        "plain",
        f"300 {difference['speculative']['text']!r}",
        f"{difference['other']['top_two'][1]['score']:.6f}",
        "logits differ by",
        "REAL DIFFERENCE: the logits differ by more than rounding does (0.002)",
        "against plain: 0 the same, 0 near-ties, 2 real differences",
    ):
        assert part in captured.err

    def tie(logits: torch.Tensor, several: bool) -> None:
        logits[:, 300] = logits[:, 301] = 60.0
        logits[:, 301] += 1e-5 * several

    monkeypatch.undo()
    monkeypatch.chdir(folder)
    plant_logits(monkeypatch, tie)
    assert main(["verify", "job.yaml", "--rows", "2", "--set", "sampling.temperature=0"]) == 3
    assert "near-tie: the gap is within" in capsys.readouterr().out


def test_real_differences_from_transformers_in_bfloat16_come_with_a_hint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bias(logits: torch.Tensor, several: bool) -> None:
        logits[:, 300] += 50.0

    plant_logits(monkeypatch, bias)
    args = ["verify", "job.yaml", "--rows", "1", "--against", "transformers", "--set", "sampling.temperature=0"]
    for dtype in ("float32", "bfloat16"):
        assert main([*args, "--set", f"model.dtype={dtype}"]) == 4
        assert ("--set model.dtype=float32" in capsys.readouterr().out) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["missing.yaml"], "no such recipe file"),
        (["job.yaml", "--set", "sampling.temprature=1"], "did you mean 'sampling.temperature'?"),
        (["job.yaml", "--set", "input.path=null"], "verify needs model.path and input.path"),
        (["job.yaml", "--set", "input.path=none.jsonl"], "no such input file"),
        (["job.yaml", "--against", "transformers"], "row 'story-0' (line 1) has temperature 1.0"),
        (
            ["job.yaml", "--against", "transformers", "--set", "model.kv_dtype=float8"],
            "model.kv_dtype: float8 rounds it",
        ),
        (["job.yaml", "--against", "nothing"], "Invalid value"),
        (["job.yaml", "--rows", "0"], "Invalid value"),
        (["job.yaml", "--json", "no/where.json"], "does not exist"),
        (["job.yaml", "--json", "in.jsonl"], "would overwrite a file of this job"),
        (["job.yaml", "--set", "engine.max_model_len=2"], "in.jsonl:1: the prompt has"),
        (["job.yaml", "--set", "engine.num_blocks=2", "--set", "engine.block_size=1"], "in.jsonl:1: the row failed"),
    ],
)
def test_what_the_user_can_mend_gives_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], part: str
) -> None:
    assert main(["verify", *args]) == 2
    assert part in capsys.readouterr().err
