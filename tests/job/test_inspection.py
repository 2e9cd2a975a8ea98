"""`specgen inspect`: what is counted and found in a folder, and what stops a run there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from float8_weights import quantise
from safetensors.torch import load_file, save_file
from tiny_dense import config_of, random_head, random_weights, write_folder

from specgen.cli.main import main
from specgen.job.inspection import Inspection, inspect_model
from specgen.model_path import resolve_model

CPU = torch.device("cpu")


def inspect(folder: Path, head: Path | None = None) -> Inspection:
    return inspect_model(folder, head, torch.float32, CPU, self_test=False)


def copy_of_the_bundled(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    for path in resolve_model("stories-7m").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def test_the_bundled_model() -> None:
    found = inspect_model(resolve_model("stories-7m"), None, torch.float32, CPU, self_test=True)
    stored = load_file(resolve_model("stories-7m") / "model.safetensors")
    assert found.parameters + found.draft_parameters == sum(t.numel() for t in stored.values())
    # three layers of eight routed experts, of which a token uses two
    assert found.parameters - found.active_parameters == 3 * 6 * 3 * 256 * 128
    assert sum(found.stored.values()) == sum(t.nbytes for t in stored.values())
    assert found.kv_bytes_per_token == 5 * (64 + 16) * 4
    assert [(t.token_id, len(t.origins)) for t in found.stop_tokens] == [(1, 3)]
    assert found.head is not None and found.head.problem is None
    assert found.head_properties["hidden states"] == "after the final norm"
    assert found.head_properties["embedding"] == found.head_properties["output head"] == "the model's"
    assert not found.problems


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe", "mimo"])
def test_parameters_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    found = inspect(write_folder(tmp_path, config_of(family)))
    sizes = {name: tensor.numel() for name, tensor in random_weights(config_of(family)).items()}
    assert found.parameters + found.draft_parameters == sum(sizes.values())
    assert bool(found.draft_parameters) == (family in ("glm4_moe", "mimo")) == bool(found.draft_layers)


def test_a_tied_head_counts_once_and_a_head_folder_counts_its_own(tmp_path: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    head_config = config_of("llama", num_nextn_predict_layers=1, max_position_embeddings=40)
    head = write_folder(tmp_path / "head", head_config, random_head(head_config), file="mtp")
    found = inspect(write_folder(tmp_path / "model", config), head)
    assert found.max_tokens == 40
    assert found.parameters == sum(t.numel() for t in random_weights(config).values())
    assert found.draft_parameters == sum(t.numel() for t in random_head(head_config).values())
    assert found.head_properties["hidden states"] == "before the final norm"
    assert found.head_properties["projection"] == "hidden state first"


def test_a_float8_cache_takes_a_byte_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, config_of("mimo"))
    wide = inspect(folder)
    narrow = inspect_model(folder, None, torch.float32, CPU, self_test=False, kv_dtype=torch.float8_e4m3fn)
    assert narrow.kv_bytes_per_token == 3 * 2 * 2 * 8 == wide.kv_bytes_per_token // 4
    assert narrow.weight_bytes == wide.weight_bytes and narrow.kv_dtype == "float8_e4m3fn"
    assert main(["inspect", "stories-7m", "--no-self-test", "--kv-dtype", "float8"]) == 0
    assert "KV                400 bytes a token in float8_e4m3fn; at most" in capsys.readouterr().out
    assert main(["inspect", "stories-7m", "--kv-dtype", "float16"]) == 2
    assert "model.kv_dtype" in capsys.readouterr().err


def test_what_stops_a_run_is_told_at_once(tmp_path: Path) -> None:
    """Draft layers that are declared and not there, and a missing and a wrong tensor beside them."""
    weights = random_weights(config_of("mimo"))
    kept = {name: tensor for name, tensor in weights.items() if "mtp_layers" not in name}
    kept["model.norm.weight"] = torch.ones(47)
    del kept["model.layers.1.mlp.up_proj.weight"]
    problems = "\n".join(inspect(write_folder(tmp_path, config_of("mimo"), kept)).problems)
    assert "1 tensor missing, the first is 'model.layers.1.mlp.up_proj.weight'" in problems
    assert "model.safetensors: 'model.norm.weight' has shape [47]; config.json asks for [48]" in problems
    assert "promises 1 draft layer, the files hold 0" in problems


def test_the_headers_tell_all_that_a_load_would(tmp_path: Path) -> None:
    """With nothing loaded: a tensor too many, one of integers, and one in FP8 whose scale does not fit."""
    weights = random_weights(config_of("llama"))
    name = "model.layers.1.mlp.up_proj.weight"
    for change, part in (
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)},
            "unexpected tensor 'model.layers.0.self_attn.q_proj",
        ),
        ({name: weights[name].to(torch.int8)}, f"'{name}' has dtype I8"),
        (
            {name: weights[name].to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(3, 3)},
            "[3, 3], which does not",
        ),
        ({name: weights[name].to(torch.float8_e4m3fn)}, f"'{name}' is FP8, and neither"),
    ):
        problems = inspect(write_folder(tmp_path, config_of("llama"), weights | change)).problems
        assert any(part in problem for problem in problems), part


def test_what_only_a_load_tells_stands_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_of_the_bundled(tmp_path, lambda w: w["model.norm.weight"].fill_(float("nan")))
    assert main(["inspect", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "not tested: the model cannot be run as it is" in shown.out
    assert "error: " in shown.err and "'model.norm.weight' holds NaN" in shown.err


def test_stop_tokens_are_shown_without_a_tokenizer(tmp_path: Path) -> None:
    found = inspect(write_folder(tmp_path, config_of("llama", eos_token_id=[5, 9])))
    assert [(t.token_id, t.text, t.origins) for t in found.stop_tokens] == [(n, None, ("config.json",)) for n in (5, 9)]
    assert any("no tokenizer.json" in problem for problem in found.problems)


def test_kept_float8_is_counted_as_it_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of a byte, a scale for each row and 128 columns; and the draft head is tested so."""
    copy_of_the_bundled(tmp_path, lambda w: w.update(quantise(w, "block", "embed|head.weight|gate.weight")[0]))
    stored = load_file(tmp_path / "model.safetensors")
    found = inspect_model(tmp_path, None, torch.float32, CPU, self_test=True, keeps_float8=True)
    size = 0
    for name, tensor in stored.items():
        if not name.endswith("_scale_inv"):
            is_kept = tensor.dtype == torch.float8_e4m3fn and "kv_b_proj" not in name
            rows, columns = tensor.shape if is_kept else (0, 0)
            size += tensor.numel() + 4 * rows * math.ceil(columns / 128) if is_kept else 4 * tensor.numel()
    assert found.weight_bytes == size
    assert found.head is not None and found.head.problem is None
    assert main(["inspect", str(tmp_path), "--float8", "keep", "--no-self-test"]) == 0
    assert "with FP8 kept, the rest in float32" in capsys.readouterr().out


def test_a_configuration_alone_tells_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, config_of("glm4_moe"))
    whole = inspect(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = inspect(tmp_path)
    assert (found.parameters, found.draft_parameters) == (whole.parameters, whole.draft_parameters)
    assert any("no *.safetensors file" in problem for problem in found.problems)
    assert main(["inspect", str(tmp_path)]) == 2


def test_more_devices_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, config_of("llama"))
    weights = inspect(folder).weight_bytes
    monkeypatch.setattr("specgen.job.inspection.available_memory", lambda: (weights // 3, weights // 3))
    found = inspect(folder)
    assert (found.tensor_parallel, found.kv_tokens) == (2 ** math.ceil(math.log2(3 / 0.85 / 0.9)), 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "stories-7m"]) == 0
    shown = capsys.readouterr().out
    assert "5.75 M, 3.98 M active, and 1.13 M in the draft layers" in shown
    assert "draft head        works: agrees with the model at 39%" in shown
    assert main(["inspect", "stories-7m", "--no-self-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_layers"] == 1


def test_strict_refuses_a_head_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.4.eh_proj.weight"
    copy_of_the_bundled(tmp_path, lambda w: w.update({name: w[name].roll(256, 1)}))
    for flags, code, word in (([], 0, "warning"), (["--strict"], 2, "error")):
        assert main(["inspect", str(tmp_path), *flags]) == code
        told = capsys.readouterr().err.replace("\n", " ")
        assert told.startswith(f"{word}: ") and "inputs of its projection in the other order" in told
