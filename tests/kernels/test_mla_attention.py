"""Latent attention: naive float64 values, kernel and twin, and the law: a row's bits are its own in any call."""

from typing import Any

import pytest
import torch
from paged_model import LENGTH, MIXED, SCALE, Op, PagedModel, Part

from specgen.kernels import mla_attention as module
from specgen.kernels.mla_attention import mla_attention, mla_attention_torch, mla_attention_triton


class Model(PagedModel):
    """Latents and rotated keys."""

    def __init__(
        self,
        heads: int = 4,
        rank: int = 32,
        rope: int = 16,
        block_size: int = 16,
        seed: int = 0,
        length: int = LENGTH,
    ) -> None:
        super().__init__(rank + rope, (heads, rank + rope), rank, block_size, seed, length)

    def naive(self, slot: int, position: int, key_start: int = 0) -> torch.Tensor:
        """Return one row in float64: softmax over all keys it may see."""
        keys = self.keys[slot, key_start : position + 1].double()
        if not len(keys):
            return torch.zeros(self.queries.shape[2], self.layout)
        weights = torch.softmax(self.queries[slot, position].double() @ keys.T * SCALE, dim=-1)
        return (weights @ keys[:, : self.layout]).float()


@pytest.fixture(params=["twin", "wide kernel", "whole kernel"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Op:
    """All implementations; the kernels with short splits, so that rows here have up to three."""
    monkeypatch.setattr(module, "_SPLIT_KEYS", 64)
    monkeypatch.setattr(module, "_is_wide", lambda *_: request.param == "wide kernel")
    return mla_attention_torch if request.param == "twin" else mla_attention_triton


@pytest.fixture
def device(op: Op, kernel_device: str) -> str:
    """The kernel's device, and the CPU for the twin."""
    return kernel_device if op is mla_attention_triton else "cpu"


@pytest.mark.parametrize(
    ("sizes", "key_start"),
    [
        ({}, 0),
        ({}, 1),
        ({"block_size": 64}, 0),
        ({"block_size": 128}, 3),
        ({"heads": 3, "rank": 24, "rope": 8, "block_size": 7}, 0),
        ({"heads": 5, "block_size": 1}, 3),
    ],
)
def test_values(op: Op, device: str, sizes: dict[str, int], key_start: int) -> None:
    model = Model(**sizes)
    results = model.run(op, device, MIXED, padding=3, key_start=key_start)
    for (slot, position), row in results.items():
        torch.testing.assert_close(row, model.naive(slot, position, key_start), rtol=1e-4, atol=1e-5)


def test_values_with_more_heads_than_a_tile(op: Op, device: str) -> None:
    model = Model(heads=70)
    for (slot, position), row in model.run(op, device, [Part(0, 70, 2), Part(2, 3, 1)]).items():
        torch.testing.assert_close(row, model.naive(slot, position), rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_as_decode_verify_and_chunk(op: Op, device: str) -> None:
    model, length = Model(), 139
    whole = model.run(op, device, [Part(1, length, length)])
    size_steps = (
        [(1, 23), (4, 31), (5, 17), (37, 37)]
        if op is mla_attention_triton
        else [(1, 1), (2, 3), (4, 3), (5, 5), (37, 37)]
    )
    for size, step in size_steps:
        for end in range(size, length + 1, step):
            for key, row in model.run(op, device, [Part(1, end, size)]).items():
                assert torch.equal(row, whole[key]), (size, key)


def test_a_row_is_the_same_in_any_company_padding_and_place(op: Op, device: str) -> None:
    model, alone = Model(), {}
    for part in MIXED:
        if part.slot >= 0:
            alone |= model.run(op, device, [part])
    for parts, padding, seed in [(MIXED, 0, 0), (MIXED[::-1], 7, 1), (MIXED[:1] + MIXED[2:], 1, 2)]:
        for key, row in Model(seed=seed).run(op, device, parts, padding).items():
            assert torch.equal(row, alone[key]), key


def test_many_requests_of_the_twin_in_company(threads: int) -> None:
    model = Model()
    parts = [Part(i % 3, 20 + i, 1 + i % 9) for i in range(130)]
    together = mla_attention(*model.args(parts, 5, 0, model.cache([Part(s, LENGTH, 1) for s in range(3)]), "cpu"))
    row = 0
    for part in parts:
        for (_, position), alone in model.run(mla_attention, "cpu", [part]).items():
            assert torch.equal(together[row + position - part.seq_len + part.query_len], alone)
        row += part.query_len


def test_unwritten_drafts_do_not_reach_the_rows_before_them(op: Op, device: str) -> None:
    model = Model()
    want = model.run(op, device, [Part(1, 131, 2)])
    got = model.run(op, device, [Part(1, 133, 4)], holes=[(1, 131), (1, 132)])
    assert all(torch.equal(got[key], row) for key, row in want.items())


def test_bounds_and_launches_do_not_matter(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, parts = Model(), [Part(1, 60, 20), Part(0, 33, 1)]
    args = model.args(parts, 0, 0, model.cache(parts), kernel_device)
    one_split = mla_attention_triton(*args)
    args[8:10] = [500, 3000]
    assert torch.equal(mla_attention_triton(*args), one_split)
    monkeypatch.setattr(module, "_SCRATCH_BYTES", 1)  # one tile a launch
    assert torch.equal(mla_attention_triton(*args), one_split)


def test_twin_where_the_place_in_a_tile_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tile_queries", lambda *_: 1)
    model = Model()
    whole = model.run(mla_attention, "cpu", [Part(1, 139, 139)])
    for (slot, position), row in model.run(mla_attention, "cpu", [Part(1, 139, 11)]).items():
        assert torch.equal(row, whole[slot, position])
        torch.testing.assert_close(row, model.naive(slot, position), rtol=1e-4, atol=1e-5)


def test_a_block_past_2_31_elements(kernel_device: str) -> None:
    model = Model(heads=2, rank=32, rope=16)
    far = 2**31 // (16 * 48) + 1
    try:  # hardly any of it becomes real memory on the CPU
        cache = torch.empty(far + 1, 16, 48, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")
    cache[far] = model.keys[0, :16].to(kernel_device)
    model.tables[0, 0] = far
    args = model.args([Part(0, 13, 1)], 0, 0, torch.empty(0), kernel_device)
    args[1] = cache
    got = mla_attention_triton(*args)[0].cpu()
    torch.testing.assert_close(got, model.naive(0, 12), rtol=1e-4, atol=1e-5)


def test_nothing_to_do() -> None:
    model = Model()
    args = model.args([Part(-1, 0, 0)], 4, 0, model.cache([]), "cpu")
    assert not mla_attention(*args).any()


def test_half_precision(op: Op, device: str) -> None:
    # The interpreter's dot multiplies bfloat16's bits, so float16 stands in for it there.
    half = torch.bfloat16 if device == "cuda" or op is mla_attention_torch else torch.float16
    model = Model()
    model.keys, model.queries = model.keys.to(half).float(), model.queries.to(half).float()
    args = model.args(MIXED[:1], 0, 0, model.cache(MIXED[:1]), device)
    args[:2] = [args[0].to(half), args[1].to(half)]
    for i, row in enumerate(op(*args).float().cpu()):
        # Weights and result are rounded to 8 bits each (bfloat16).
        torch.testing.assert_close(row, model.naive(1, 128 + i), rtol=2**-6, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
@pytest.mark.parametrize("split_keys", [64, 256, 1024])
@pytest.mark.parametrize(("heads", "block_size", "key_start"), [(16, 64, 0), (16, 64, 1), (16, 16, 0), (128, 64, 0)])
def test_law_on_the_gpu_in_bfloat16_also_from_a_graph(
    heads: int, block_size: int, key_start: int, split_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forms, chunks, verification and single tokens give a row the same bits, over up to ten steps of keys."""
    model = Model(heads=heads, rank=512, rope=64, block_size=block_size, length=640)
    parts = [Part(1, 600, 600), Part(0, 633, 4), Part(-1, 0, 3), Part(2, 77, 1)]

    def in_half(*args: Any) -> torch.Tensor:
        return mla_attention_triton(args[0].bfloat16(), args[1].bfloat16(), *args[2:])

    monkeypatch.setattr(module, "_SPLIT_KEYS", split_keys)
    with monkeypatch.context() as only_whole:
        only_whole.setattr(module, "_is_wide", lambda *_: False)
        only_whole.setattr(module, "_hopper_blocks", lambda *_: None)
        whole = model.run(in_half, "cuda", parts, 0, key_start)
    for is_wide in (False, True):  # False: on Hopper its own form, where it applies
        with monkeypatch.context() as one_form:
            one_form.setattr(module, "_is_wide", lambda *_, is_wide=is_wide: is_wide)
            for key, row in model.run(in_half, "cuda", parts, 0, key_start).items():
                assert torch.equal(row, whole[key]), key
    monkeypatch.setattr(module, "_WIDE_TILES", 20)
    for size, step in [(1, 13), (4, 31), (37, 77)]:
        for end in range(size, 600, step):
            for key, row in model.run(in_half, "cuda", [Part(1, end, size)], 0, key_start).items():
                assert torch.equal(row, whole[key]), (size, key)
    args = model.args(parts[1:], 0, key_start, model.cache(parts, key_start), "cuda")
    args[:2] = [args[0].bfloat16(), args[1].bfloat16()]
    want = mla_attention_triton(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_attention_triton(*args)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)


def test_wrong_arguments_are_refused() -> None:
    model = Model()
    args = model.args(MIXED, 0, 0, model.cache([]), "cpu")
    for i, wrong, message in [
        (2, args[2].long(), "block_tables: expected dtype"),
        (5, args[5][:1], "seq_lens: expected shape"),
        (1, args[1][..., 1:], "kv_cache: expected shape"),
        (6, 100, "kv_lora_rank"),
        (0, args[0].transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            mla_attention(*args[:i], wrong, *args[i + 1 :])
