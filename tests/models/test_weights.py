"""Loading: several threads, staging in slices, progress, and random weights."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import CONFIG, random_weights, write_checkpoint

from specgen.errors import ModelError
from specgen.models import weights
from specgen.models.checkpoint import Checkpoint, TensorFile
from specgen.models.config import parse_config, read_config
from specgen.models.loading import load_model
from specgen.models.staging import Staging
from specgen.models.weights import Target, load_weights

CPU = torch.device("cpu")
SHAPES = {"small": (3, 4), "rows": (11, 5), "long": (2, 40), "half": (9, 8), "vector": (7,), "scalar": ()}


def plan_of(tensors: dict[str, torch.Tensor]) -> weights.Plan:
    return {name: Target(tuple(t.shape), [(torch.full(t.shape, torch.nan), None)]) for name, t in tensors.items()}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_thread_count_loads_the_same_and_tells_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    g = torch.Generator().manual_seed(0)
    stored = {f"w{i}": torch.randn(3 + i, 5, generator=g) for i in range(20)}
    names = sorted(stored)
    for part in range(3):
        save_file({n: stored[n] for n in names[part::3]}, tmp_path / f"{part}.safetensors")
    monkeypatch.setattr(weights, "_UNIT_BYTES", 300)
    told: list[tuple[int, int]] = []
    threads: set[str] = set()

    def on_progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.current_thread().name)

    plan = plan_of(stored)
    num_bytes = load_weights(Checkpoint(tmp_path), plan, (), on_progress, num_threads)
    assert num_bytes == sum(t.nbytes for t in stored.values())
    for name, tensor in stored.items():
        assert torch.equal(plan[name].parts[0][0], tensor)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (num_bytes, num_bytes)
    assert all(name.startswith("load") for name in threads) == (num_threads > 1)


def test_units_follow_the_file_and_keep_to_their_size(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.zeros(10) for i in range(7)}, tmp_path / "a.safetensors")
    save_file({"big": torch.zeros(100)}, tmp_path / "b.safetensors")
    checkpoint = Checkpoint(tmp_path)
    units = checkpoint.units(checkpoint.names, 100)
    assert sorted(len(unit) for unit in units) == [1, 1, 2, 2, 2]
    assert sum(stored.num_bytes for unit in units for stored in unit) == 7 * 40 + 400


def test_staging_moves_tensors_whole_in_slices_and_in_parts(tmp_path: Path) -> None:
    """What fits a half, what goes in rows, what has rows too long for a half, casts, and transposed views."""
    g = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    tensors["half"] = tensors["half"].bfloat16()
    save_file(tensors, tmp_path / "a.safetensors")
    stored = Checkpoint(tmp_path).tensors
    weights_of = {name: torch.full(t.shape, torch.nan, dtype=torch.float64) for name, t in tensors.items()}
    direct = torch.full((11, 5), torch.nan)
    turned, left, right = (torch.full(shape, torch.nan) for shape in ((5, 11), (3, 1), (3, 3)))
    staging = Staging(CPU, half_bytes=64)
    with TensorFile(tmp_path / "a.safetensors") as file:
        for name, weight in weights_of.items():
            staging.fill(Target(tuple(weight.shape), [(weight, None)]), stored[name], file)
        staging.fill(Target((11, 5), [(direct, None)]), stored["rows"], file)
        staging.fill(Target((11, 5), [(turned.t(), None)]), stored["rows"], file)
        parts = [(left, lambda t: t[:, :1]), (right, lambda t: t[:, 1:])]
        staging.fill(Target((3, 4), parts), stored["small"], file)
    staging.wait()
    for name, tensor in tensors.items():
        assert torch.equal(weights_of[name], tensor.double()), name
    assert torch.equal(direct, tensors["rows"])
    assert torch.equal(turned, tensors["rows"].t())
    assert torch.equal(torch.cat([left, right], dim=1), tensors["small"])


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    stored = Checkpoint(tmp_path).tensors["w"]
    path.write_bytes(path.read_bytes()[:-40])
    with TensorFile(path) as file, pytest.raises(ModelError, match=r"a\.safetensors: ends too early"):
        file.read_rows(stored, 0, 100, torch.empty(400, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory and streams need CUDA")
def test_a_model_on_the_device_is_the_one_on_the_cpu(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = read_config(folder)
    here = load_model(folder, config, 1, 64, torch.bfloat16, CPU)
    there = load_model(folder, config, 1, 64, torch.bfloat16, torch.device("cuda", 0))
    for ours, theirs in ((here.target, there.target), (here.mtp, there.mtp)):
        assert ours is not None and theirs is not None
        for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):  # type: ignore[attr-defined]
            assert torch.equal(a, b.cpu()), name


def test_copies_of_the_targets_embedding_and_head_are_shared(tmp_path: Path) -> None:
    tensors = random_weights(CONFIG)
    prefix = f"model.layers.{CONFIG['num_hidden_layers']}."
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder = write_checkpoint(tmp_path / "same", tensors)
    model = load_model(folder, read_config(folder), 1, 64, torch.float32, CPU)
    assert model.mtp is not None
    assert model.mtp.embed_tokens is model.target.embed_tokens
    assert model.mtp.heads[0] is model.target.lm_head
    tensors[prefix + "shared_head.head.weight"] = 2 * tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path / "own", tensors)
    model = load_model(folder, read_config(folder), 1, 64, torch.float32, CPU)
    assert model.mtp is not None
    assert model.mtp.heads[0] is not model.target.lm_head


def test_random_weights_have_the_scale_of_a_model() -> None:
    """Matrices have variance 1 / inputs, norms are 1, nothing stays unset, and they are the same every time."""
    config = parse_config(CONFIG | {"hidden_size": 256, "vocab_size": 1024}, "test")
    told: list[tuple[int, int]] = []
    first, second = (
        load_model(None, config, 1, 64, torch.bfloat16, CPU, lambda done, total: told.append((done, total)))
        for _ in range(2)
    )
    assert told[-1] == (first.num_bytes, first.num_bytes)
    head = first.target.lm_head.weight.float()
    assert float(head.std()) == pytest.approx(256**-0.5, rel=0.02)
    assert float(head.mean()) == pytest.approx(0, abs=0.001)
    for name, weight in first.target.named_parameters():  # type: ignore[attr-defined]
        if "norm" in name:
            assert bool((weight == 1).all()), name
        assert bool(weight.isfinite().all()) and float(weight.float().abs().max()) < 10, name
    assert torch.equal(first.target.lm_head.weight, second.target.lm_head.weight)
    assert first.mtp is not None
    assert first.mtp.heads[0] is first.target.lm_head
