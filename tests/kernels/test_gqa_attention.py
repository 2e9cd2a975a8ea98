"""Grouped-query attention: naive float64 values, kernel and twin, and the law: a row's bits are its own."""

from typing import Any

import pytest
import torch
from paged_model import LENGTH, MIXED, SCALE, Op, PagedModel, Part

from specgen.kernels import gqa_attention as module
from specgen.kernels.gqa_attention import gqa_attention, gqa_attention_torch, gqa_attention_triton


class Model(PagedModel):
    """Keys and values of a few heads."""

    def __init__(
        self,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 16,
        seed: int = 0,
        length: int = LENGTH,
    ) -> None:
        super().__init__(2 * kv_heads * dim, (heads, dim), kv_heads, block_size, seed, length)

    def naive(self, slot: int, position: int, key_start: int = 0) -> torch.Tensor:
        """Return one row in float64: softmax over all keys it may see."""
        rows = self.keys[slot, key_start : position + 1].double().view(-1, 2, self.layout, self.queries.shape[3])
        query = self.queries[slot, position].double()
        if not len(rows):
            return torch.zeros(query.shape, dtype=torch.float32)
        keys, values = rows.repeat_interleave(len(query) // self.layout, 2).unbind(1)
        weights = torch.softmax(torch.einsum("hd,shd->hs", query, keys) * SCALE, dim=-1)
        return torch.einsum("hs,shd->hd", weights, values).float()


@pytest.fixture(params=["twin", "kernel", "kernel_without_join"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Op:
    """All implementations; the kernel with short splits, so that rows here have up to three."""
    monkeypatch.setattr(module, "_SPLIT_KEYS", 64)
    if request.param == "kernel_without_join":
        monkeypatch.setattr(module, "_MANY_PROGRAMS", 0)
    return gqa_attention_torch if request.param == "twin" else gqa_attention_triton


@pytest.fixture
def device(op: Op, kernel_device: str) -> str:
    """The kernel's device, and the CPU for the twin."""
    return kernel_device if op is gqa_attention_triton else "cpu"


@pytest.mark.parametrize(
    ("sizes", "key_start"),
    [
        ({}, 0),
        ({}, 1),
        ({"heads": 9, "kv_heads": 3, "dim": 24, "block_size": 7}, 0),
        ({"heads": 5, "kv_heads": 5, "block_size": 1}, 3),
    ],
)
def test_values(op: Op, device: str, sizes: dict[str, int], key_start: int) -> None:
    model = Model(**sizes)
    results = model.run(op, device, MIXED, padding=3, key_start=key_start)
    for (slot, position), row in results.items():
        torch.testing.assert_close(row, model.naive(slot, position, key_start), rtol=1e-4, atol=1e-5)


def test_values_with_more_heads_than_a_tile(op: Op, device: str) -> None:
    model = Model(heads=70, kv_heads=2)
    for (slot, position), row in model.run(op, device, [Part(0, 70, 2), Part(2, 3, 1)]).items():
        torch.testing.assert_close(row, model.naive(slot, position), rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_as_decode_verify_and_chunk(op: Op, device: str) -> None:
    # The interpreter is slow: two splits of its 64 keys are enough.
    model, length = Model(), 139 if op is gqa_attention_torch else 75
    whole = model.run(op, device, [Part(1, length, length)])
    size_steps = (
        [(1, 37), (4, 67), (37, 38)] if op is gqa_attention_triton else [(1, 1), (2, 3), (4, 3), (5, 5), (37, 37)]
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
    for parts, padding, seed in [(MIXED[::-1], 7, 1), (MIXED[:1] + MIXED[2:], 1, 2)]:
        for key, row in Model(seed=seed).run(op, device, parts, padding).items():
            assert torch.equal(row, alone[key]), key


def test_many_requests_of_the_twin_in_company(threads: int) -> None:
    model = Model()
    parts = [Part(i % 3, 20 + i, 1 + i % 9) for i in range(60)]
    together = gqa_attention(*model.args(parts, 5, 0, model.cache([Part(s, LENGTH, 1) for s in range(3)]), "cpu"))
    row = 0
    for part in parts:
        for (_, position), alone in model.run(gqa_attention, "cpu", [part]).items():
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
    one_split = gqa_attention_triton(*args)
    args[8:10] = [500, 700]
    assert torch.equal(gqa_attention_triton(*args), one_split)
    monkeypatch.setattr(module, "_SCRATCH_BYTES", 1)  # no room for partial results
    assert torch.equal(gqa_attention_triton(*args), one_split)


def test_a_program_a_split_and_a_loop_over_the_splits_give_the_same_bits(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SPLIT_KEYS", 64)
    model = Model()
    args = model.args(MIXED, 0, 0, model.cache(MIXED), kernel_device)
    joined = gqa_attention_triton(*args)
    monkeypatch.setattr(module, "_MANY_PROGRAMS", 0)
    assert torch.equal(gqa_attention_triton(*args), joined)


def test_twin_where_the_place_in_a_tile_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tile_queries", lambda *_: 1)
    model = Model()
    whole = model.run(gqa_attention, "cpu", [Part(1, 139, 139)])
    for (slot, position), row in model.run(gqa_attention, "cpu", [Part(1, 139, 11)]).items():
        assert torch.equal(row, whole[slot, position])
        torch.testing.assert_close(row, model.naive(slot, position), rtol=1e-4, atol=1e-5)


def test_a_block_past_2_31_elements(kernel_device: str) -> None:
    model = Model(heads=2, kv_heads=1, dim=24)
    far = 2**31 // (16 * 48) + 1
    try:  # hardly any of it becomes real memory on the CPU
        cache = torch.empty(far + 1, 16, 48, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")
    cache[far] = model.keys[0, :16].to(kernel_device)
    model.tables[0, 0] = far
    args = model.args([Part(0, 13, 1)], 0, 0, torch.empty(0), kernel_device)
    args[1] = cache
    got = gqa_attention_triton(*args)[0].cpu()
    torch.testing.assert_close(got, model.naive(0, 12), rtol=1e-4, atol=1e-5)


def test_nothing_to_do() -> None:
    model = Model()
    args = model.args([Part(-1, 0, 0)], 4, 0, model.cache([]), "cpu")
    assert not gqa_attention(*args).any()


def test_half_precision(op: Op, device: str) -> None:
    # The interpreter's dot multiplies bfloat16's bits, so float16 stands in for it there.
    half = torch.bfloat16 if device == "cuda" or op is gqa_attention_torch else torch.float16
    model = Model()
    model.keys, model.queries = model.keys.to(half).float(), model.queries.to(half).float()
    args = model.args(MIXED[:1], 0, 0, model.cache(MIXED[:1]), device)
    args[:2] = [args[0].to(half), args[1].to(half)]
    for i, row in enumerate(op(*args).float().cpu()):
        # Weights and result are rounded to 8 bits each (bfloat16).
        torch.testing.assert_close(row, model.naive(1, 128 + i), rtol=2**-6, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
@pytest.mark.parametrize("split_keys", [64, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (28, 4, 128)])
def test_law_on_the_gpu_in_bfloat16_also_from_a_graph(
    heads: int, kv_heads: int, dim: int, block_size: int, split_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, verification and single tokens give a row the same bits, on Hopper in both forms, over ten steps."""
    monkeypatch.setattr(module, "_SPLIT_KEYS", split_keys)
    model = Model(heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, length=640)
    parts = [Part(1, 600, 600), Part(0, 633, 4), Part(2, 77, 1)]

    def in_half(*args: Any) -> torch.Tensor:
        return gqa_attention_triton(args[0].bfloat16(), args[1].bfloat16(), *args[2:])

    with monkeypatch.context() as not_on_hopper:
        not_on_hopper.setattr(module, "_hopper_blocks", lambda *_: None)
        whole = model.run(in_half, "cuda", parts)
    for key, row in model.run(in_half, "cuda", parts).items():
        assert torch.equal(row, whole[key]), key
    for size, step in [(1, 13), (4, 31), (37, 77)]:
        for end in range(size, 600, step):
            for key, row in model.run(in_half, "cuda", [Part(1, end, size)]).items():
                assert torch.equal(row, whole[key]), (size, key)
    args = model.args(parts[1:], 0, 0, model.cache(parts), "cuda")
    args[:2] = [args[0].bfloat16(), args[1].bfloat16()]
    want = gqa_attention_triton(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gqa_attention_triton(*args)
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
        (6, 4, "kv_cache: expected shape"),
        (0, args[0].transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            gqa_attention(*args[:i], wrong, *args[i + 1 :])
