"""Recipes: every value with its origin, and every mistake with its place and the nearest real key."""

from pathlib import Path

import pytest
import yaml

from specgen import yaml_lines
from specgen.errors import RecipeError
from specgen.model_path import bundled_heads, known_names
from specgen.recipe import KEYS, Recipe, load_recipe, recipe_from_settings
from specgen.recipe_sections import SpeculationSection
from specgen.sampling_params import SamplingError

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_load_and_find_their_prompts(path: Path) -> None:
    recipe = load_recipe(path)
    assert Path(str(recipe.input.path)).is_file()
    assert recipe.model.path in known_names()
    assert recipe.speculation.model is None or recipe.speculation.model in bundled_heads()
    assert recipe.output.path == f"{path.stem}.jsonl"


def test_values_know_their_origin(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  path: stories-7m\nsampling:\n  # warm\n  temperature: 0.6\n  top_k: 4\n")
    recipe = load_recipe(path, ["sampling.top_k=9", "engine.num_blocks=null"], {"output.path": "-"})
    assert recipe.sampling.temperature == 0.6
    assert recipe.sampling.top_k == 9
    origins = recipe.origins
    assert origins["sampling.temperature"] == f"{path}:5"
    assert origins["sampling.top_k"] == "--set"
    assert load_recipe(path, ["input.path=-"]).input.path == "-"
    assert origins["output.path"] == "command line"
    assert origins["sampling.seed"] == "drawn"
    assert origins["sampling.top_p"] == "default"
    assert set(origins) == set(KEYS)


def test_a_drawn_seed_is_fresh_and_a_given_one_stays(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: x}")
    assert load_recipe(path).sampling.seed != load_recipe(path).sampling.seed
    assert load_recipe(path, ["sampling.seed=0"]).sampling.seed == 0


def test_the_written_recipe_says_the_same_and_can_be_repeated(tmp_path: Path) -> None:
    text = "model: {path: 'a # b'}\ninput: {path: in.jsonl, prompt: 'null'}\nsampling: {temperature: 1e-3}\n"
    recipe = load_recipe(write(tmp_path, text), ["sampling.stop_token_ids=[3, 4]"])
    written = recipe.to_yaml_with_origins()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert load_recipe(write(elsewhere, written)) == recipe
    assert "# drawn" in written
    assert "# --set" in written


def test_paths_are_relative_to_whoever_said_them(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: weights}\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n")
    assert load_recipe(path).model.path == "weights"
    (tmp_path / "weights").mkdir()
    recipe = load_recipe(path)
    assert recipe.model.path == str(tmp_path / "weights")
    assert recipe.input.path == str(tmp_path / "in.jsonl")
    assert recipe.output.path == "out.jsonl"
    assert load_recipe(path, ["input.path=here.jsonl"]).input.path == "here.jsonl"
    assert load_recipe(path, [], {"input.path": "-"}).input.path == "-"


def test_a_folder_beside_the_recipe_does_not_hide_a_bundled_model(tmp_path: Path) -> None:
    (tmp_path / "stories-7m").mkdir()
    assert load_recipe(write(tmp_path, "model: {path: stories-7m}")).model.path == "stories-7m"


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("model:\n  pth: x\n", 2, ["'model.pth'", "did you mean 'model.path'?"]),
        ("mdel:\n  path: x\n", 1, ["'mdel'", "did you mean 'model'?"]),
        ("speculatoin:\n  num_tokens: 3\n", 1, ["'speculatoin'", "did you mean 'speculation'?"]),
        ("num_tokens: 3\n", 1, ["'num_tokens'", "did you mean 'speculation.num_tokens'?"]),
        ("sampling:\n  num_tokens: 3\n", 2, ["did you mean 'speculation.num_tokens'?"]),
        ("sampling.top_k: 3\n", 1, ["write it as top_k: under sampling:"]),
        ("model: {path: 3}\n", 1, ["model.path must be", "not 3"]),
        ("a: b: c\n", 1, ["not valid YAML"]),
        ("model:\n  path: x\n  path: y\n", 3, ["model.path is given twice, first in line 2"]),
        ("model: {path: x}\nmodel: {path: y}\n", 2, ["model is given twice"]),
        ("engine: {exactness: quick}\n", 1, ["engine.exactness must be exact or fast, not 'quick'"]),
        ("speculation: {dtype: fp8}\n", 1, ["speculation.dtype must be auto or float8, not 'fp8'"]),
        ("speculation: {vocab_size: 0}\n", 1, ["from 1 up (token ids), not 0 (null, all, is allowed too)"]),
        ("speculation: {method: ratios}\n", 1, ["did you mean 'ratio'"]),
        ("speculation: {method: ratio, adaptive: true}\n", 1, ["speculation.adaptive can't go with", "how long steps"]),
        ("speculation: {method: synthetic}\n", 1, ["speculation.method: synthetic", "for specgen bench only"]),
        ("speculation:\n  acceptance: [0.5]\n", 2, ["speculation.acceptance has no effect", "specgen bench"]),
        ("speculation: {acceptance: [0.5, 0.6]}\n", 1, ["that do not rise", "not [0.5, 0.6]"]),
        ("speculation: {acceptance: []}\n", 1, ["a list of numbers from 0 to 1"]),
        ("speculation: {acceptance: [1.5]}\n", 1, ["a list of numbers from 0 to 1", "not 1.5"]),
        ("speculation: {method: exakt}\n", 1, ["did you mean 'exact'?"]),
        ("speculation: {num_tokens: 17}\n", 1, ["from 0 (plain decoding) to 16, not 17"]),
        ("speculation: {num_tokens: true}\n", 1, ["not true"]),
        ("input: {messages: m, prompt: p}\n", 1, ["input.messages and input.prompt both say what the prompt is"]),
        ("input: {path: []}\n", 1, ["input.path must be a file, a list of files, or - for stdin, not []"]),
        ("input: {path: [a, 3]}\n", 1, ["not ['a', 3]"]),
        ("input: {template_args: [1]}\n", 1, ["must be an object of arguments"]),
        ("input: {template_args: {a: {1: x}}}\n", 1, ["texts as keys"]),
        ("input: {template_args: {a: [!!binary aGk=]}}\n", 1, ["nothing in it that JSON cannot hold"]),
        ("input: {template_args: {a: .nan}}\n", 1, ["nothing in it that JSON cannot hold"]),
        ("input: {template_args: {a: &a [*a]}}\n", 1, ["nothing in it that JSON cannot hold"]),
        ("output: {fsync_seconds: -1}\n", 1, ["output.fsync_seconds must be a number of seconds"]),
        ("engine: [1]\n", 1, ["section 'engine' must be a mapping"]),
        ("engine: 1\n", 1, ["section 'engine' must be a mapping"]),
        ("- model\n", 1, ["the recipe must be a mapping"]),
        ("sampling:\n  top_p: .nan\n", 2, ["sampling.top_p must be", "not nan"]),
        ("sampling:\n  repetition_penalty: 0\n", 2, ["sampling.repetition_penalty must be", "not 0"]),
        ("sampling:\n  max_tokens: 16.0\n", 2, ["sampling.max_tokens must be", "null, to the model's limit,"]),
        ("model:\n  path: !!python/object:os.system x\n", 2, ["this value is not valid"]),
        ("sampling: {stop_token_ids: &a [*a]}\n", 1, ["sampling.stop_token_ids must be"]),
        ("? [a]\n: b\n", 1, ["unknown key"]),
        ("sampling:\n  <<: {top_k: 3}\n", 2, ["merge keys (<<) are not read", "write its keys out"]),
        ("engine: {max_num_seqs: 010}\n", 1, ["not '010'"]),
        ("input:\n  path: -\n", 2, ["not valid YAML", "a lone - needs quotes"]),
        ("engine: {watchdog_seconds: 1:30}\n", 1, ["not '1:30'"]),
    ],
)
def test_mistakes_name_place_and_remedy(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("sampling", "not of the form"),
        ("=3", "not of the form"),
        ("speculation.num_token=1", "did you mean 'speculation.num_tokens'?"),
        ("speculation.num_tokens=[", "not valid YAML"),
        ("speculation.num_tokens=", "must be an integer"),
        ("sampling.temperature=abc", "not 'abc'"),
        ("sampling=5", "it is a section: name one of its keys, like sampling.temperature"),
    ],
)
def test_mistakes_in_set(tmp_path: Path, setting: str, part: str) -> None:
    with pytest.raises(RecipeError, match=r"^--set") as caught:
        load_recipe(write(tmp_path, "model: {path: x}"), [setting])
    assert part in str(caught.value)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match="folder"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="empty"):
        load_recipe(write(tmp_path, "# nothing\n"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(binary)


def test_sections_may_be_empty_and_a_bom_is_skipped(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "\ufeffmodel:\n  path: x\nsampling:\n  # temperature: 0.6\nengine: null\n"))
    assert recipe.sampling.temperature == 1.0


def test_records_made_in_python_are_checked_too() -> None:
    with pytest.raises(RecipeError, match=r"speculation\.num_tokens must be"):
        SpeculationSection(num_tokens=-1)
    assert Recipe().speculation.num_tokens == 3


def test_a_recipe_without_a_file_has_the_same_layers() -> None:
    layers = {"sampling.top_k": 1, "sampling.top_p": 0.5, "sampling.seed": 1}, {"sampling.top_k": 3}
    recipe = recipe_from_settings(["sampling.top_k=2", "sampling.top_p=0.6"], *layers)
    assert (recipe.sampling.top_k, recipe.sampling.top_p, recipe.sampling.seed) == (3, 0.6, 1)
    origins = [recipe.origins[f"sampling.{name}"] for name in ("top_k", "top_p", "seed")]
    assert origins == ["command line", "--set", "default"]
    with pytest.raises(RecipeError, match=r"^command line: sampling\.top_k must be"):
        recipe_from_settings([], {}, {"sampling.top_k": -1})


def test_columns_to_keep_are_a_list_of_names() -> None:
    recipe = recipe_from_settings(["input.keep=[seed, top_k]"])
    assert recipe.input.keep == ("seed", "top_k")
    assert "keep: [seed, top_k]" in recipe.to_yaml_with_origins()
    for wrong in ("seed", "[1]", "['']", "{a: 1}"):
        with pytest.raises(RecipeError, match=r"input\.keep must be a list of names of columns"):
            recipe_from_settings([f"input.keep={wrong}"])


def test_a_recipe_without_a_file() -> None:
    recipe = recipe_from_settings(["sampling.top_k=3"], {"model.path": "stories-7m", "sampling.top_k": 2})
    assert (recipe.model.path, recipe.sampling.top_k) == ("stories-7m", 3)


def test_a_benchmark_may_accept_by_lot() -> None:
    sets = ["speculation.method=synthetic", "speculation.num_tokens=2"]
    recipe = recipe_from_settings([*sets, "speculation.acceptance=[0.9, 0.5, 0.5]"], for_bench=True)
    assert recipe.speculation.acceptance == (0.9, 0.5, 0.5)
    with pytest.raises(RecipeError, match=r"--set: .*needs 2 rates, one a draft"):
        recipe_from_settings([*sets, "speculation.acceptance=[0.9]"], for_bench=True)


def test_a_stop_string_with_line_ends_is_one_line_of_the_written_recipe() -> None:
    stops = ("\n\n", "a: b # c", 'it\'s "so"\t\u2028')
    recipe = recipe_from_settings(overrides={"sampling.stop": list(stops)})
    written = recipe.to_yaml_with_origins()
    assert sum("stop:" in line and "#" in line for line in written.split("\n")) >= 1
    assert all(line.startswith(("  ",)) or line.endswith(":") or not line for line in written.split("\n"))
    assert yaml.safe_load(written)["sampling"]["stop"] == list(stops)


@pytest.mark.parametrize(
    "text", ["010", "1:30", "1e5", "1e-3", "2026-01-31", "=", "yes", "null", "0x1F", "1_0", "a: b", " "]
)
def test_a_text_stays_a_text_in_the_written_recipe(text: str) -> None:
    """Also one that only this YAML, or only another one, would read as a number."""
    written = yaml_lines.dump_scalar([text])
    assert yaml_lines.parse_value(written, "here") == [text]
    assert yaml.safe_load(written) == [text]


def test_numbers_are_those_that_everybody_expects() -> None:
    values = {"10": 10, "-3": -3, "0": 0, "1_000": 1000, "1e-3": 0.001, "2.5": 2.5, ".5": 0.5, "0x10": 16}
    assert {text: yaml_lines.parse_value(text, "here") for text in values} == values
    for text in ("010", "1:30", "1:30.5", "2026-01-31", "="):
        assert yaml_lines.parse_value(text, "here") == text


def test_values_that_do_not_go_together_say_where_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: x}\nsampling:\n  max_tokens: 3\n  top_k: 2\n")
    with pytest.raises(SamplingError, match=rf"^{path}:3, --set: sampling\.min_tokens must be at most max_tokens = 3"):
        load_recipe(path, ["sampling.min_tokens=5"])
