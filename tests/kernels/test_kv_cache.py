"""A cache in FP8: what is written is torch's own cast of it, cut to the range; what is read is exactly that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter_float8 import correct_interpreter

from specgen.kernels import gqa_attention as gqa
from specgen.kernels import mla_attention as mla
from specgen.kernels._kv_cache import to_float8
from specgen.kernels.float8_linear import FLOAT8
from specgen.kernels.mla_inputs import mla_inputs, mla_inputs_torch, mla_inputs_triton
from specgen.kernels.prepare_qkv import prepare_qkv, prepare_qkv_torch, prepare_qkv_triton
from specgen.models.rope_table import rope_table

CANARY = -88.0  # a value of FP8
RANK, ROPE, HEADS, KV_HEADS, DIM = 20, 6, 3, 2, 16
TABLE, _ = rope_table(ROPE, 100, 10_000.0, None)
ALL = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


@pytest.fixture(autouse=True)
def exact_interpreter(monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> None:
    if kernel_device == "cpu":
        correct_interpreter(monkeypatch)


def special_values() -> torch.Tensor:
    """Every FP8 value, NaN among them; the ties between neighbours, what lies beside a tie, and what is too large."""
    largest_first = ALL[:127]
    ties = (largest_first[1:] + largest_first[:-1]) / 2
    beside = torch.cat([ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    beyond = torch.tensor([449.0, 464.0, 479.9, 480.0, 512.0, 1e30, torch.inf])
    positive = torch.cat([ties, beside, beyond])
    return torch.cat([ALL, positive, -positive])


def assert_same_float8(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but that NaN has two of them."""
    got, want = got.cpu(), want.cpu()
    assert got.dtype == want.dtype == FLOAT8
    is_nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), is_nan)
    assert torch.equal(got.view(torch.uint8)[~is_nan], want.view(torch.uint8)[~is_nan])


def test_a_value_is_the_nearest_and_the_even_one_of_two() -> None:
    x = special_values()
    inside = x[x.abs() <= 448]
    assert_same_float8(to_float8(inside), inside.to(FLOAT8))
    assert_same_float8(to_float8(ALL), ALL.to(FLOAT8))
    assert to_float8(torch.tensor([449.0, -480.0, torch.inf, -torch.inf])).tolist() == [448.0, -448.0, 448.0, -448.0]
    assert to_float8(torch.tensor([torch.nan])).isnan().all()
    # by hand: steps of 2 between 16 and 32, of 2^-9 below 2^-6
    hand = to_float8(torch.tensor([17.0, 19.0, 18.9, 127.5, 2**-10, 3 * 2**-10]))
    assert hand.tolist() == [16.0, 20.0, 18.0, 128.0, 0.0, 2**-8]


@pytest.mark.parametrize("use_kernel", [False, True])
def test_keys_and_values_are_rounded_as_they_are_written(kernel_device: str, use_kernel: bool) -> None:
    """Value heads pass unchanged, so they show every special value; queries are as over a wide cache."""
    op, device = (prepare_qkv_triton, kernel_device) if use_kernel else (prepare_qkv_torch, "cpu")
    x, per_token = special_values(), KV_HEADS * DIM
    num_tokens = -(-len(x) // per_token) + 1
    qkv = torch.randn(num_tokens, (HEADS * KV_HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(0))
    qkv[:, -2 * per_token : -per_token] *= 300
    # a row ends with its values
    qkv[:-1, -per_token:] = torch.cat([x, x.new_zeros((num_tokens - 1) * per_token - len(x))]).view(-1, per_token)
    slots = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1)) + 2
    slots[-1] = -1
    caches = [torch.full((num_tokens + 4, 1, 2 * per_token), CANARY).to(dtype) for dtype in (torch.float32, FLOAT8)]
    queries = []
    for i in range(2):
        caches[i] = caches[i].to(device)
        given = (qkv, torch.arange(num_tokens), TABLE, slots)
        queries.append(op(*(t.to(device) for t in given), caches[i], HEADS * KV_HEADS, KV_HEADS))
    wide, narrow = (cache.cpu() for cache in caches)
    assert torch.equal(*queries)
    assert_same_float8(narrow, to_float8(wide))
    assert (wide[slots[:-1], 0, :per_token].abs() > 448).any()
    assert_same_float8(narrow[slots[:-1], 0, per_token:].flatten()[: len(x)], to_float8(x))


@pytest.mark.parametrize("use_kernel", [False, True])
def test_latents_are_rounded_as_they_are_written(kernel_device: str, use_kernel: bool) -> None:
    op, device = (mla_inputs_triton, kernel_device) if use_kernel else (mla_inputs_torch, "cpu")
    g = torch.Generator().manual_seed(0)
    slots = torch.tensor([3, -1, 9, 0, 15, -1, 2])
    latent = torch.randn(7, RANK + ROPE, generator=g) * 200
    latent[2, RANK + 1] = torch.nan
    q_pe, weight = torch.randn(7, HEADS, ROPE, generator=g), torch.randn(RANK, generator=g) * 300
    found = []
    for dtype in (torch.float32, FLOAT8):
        cache = torch.full((4, 4, RANK + ROPE), CANARY).to(dtype).to(device)
        q = torch.zeros(7, HEADS, RANK + ROPE, device=device)
        latent, q_pe, weight, positions, table, at = (
            t.to(device) for t in (latent, q_pe, weight, torch.arange(7), TABLE, slots)
        )
        op(latent, q_pe, weight, 1e-6, positions, table, True, at, cache, q)
        found.append((cache.cpu().view(16, -1), q))
    (wide, wide_q), (narrow, narrow_q) = found
    assert torch.equal(wide_q, narrow_q)
    assert_same_float8(narrow, to_float8(wide))
    assert (wide.abs() > 448).any() and wide[9].isnan().sum() == 2 and (narrow[1].float() == CANARY).all()


def attention_arguments(name: str, cache_dtype: torch.dtype, device: str) -> list[Any]:
    """Two requests and a padded one over a cache that is NaN where nothing was written, a draft's slot among them."""
    g = torch.Generator().manual_seed(3)
    block_size, width = 8, RANK + ROPE if name == "mla" else 2 * KV_HEADS * DIM
    heads, q_width = (HEADS, width) if name == "mla" else (HEADS * KV_HEADS, DIM)
    cache = torch.full((40, block_size, width), torch.nan)
    tables = torch.randperm(40, generator=g).view(2, 20).int()
    seq_lens, query_lens = [133, 0, 70], [5, 2, 1]
    for slot, length in ((1, 133), (0, 70)):
        at = torch.arange(length)
        cache[tables[slot, at // block_size].long(), at % block_size] = torch.randn(length, width, generator=g) * 1.5
    cache[tables[1, 132 // block_size].long(), 132 % block_size] = torch.nan  # only the last query sees it
    q = torch.randn(8, heads, q_width, generator=g)
    narrow = to_float8(cache)
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    tensors = [q, narrow.to(cache_dtype), tables, torch.tensor([1, -1, 0]).int(), start, torch.tensor(seq_lens).int()]
    sizes = [RANK if name == "mla" else KV_HEADS, 0.3, 5, 133, 0]
    return [*(t.to(device) for t in tensors), *sizes]


FORMS = ["mla twin", "mla wide kernel", "mla whole kernel", "gqa twin", "gqa kernel", "gqa kernel without join"]


@pytest.mark.parametrize("form", FORMS)
def test_attention_reads_exactly_what_is_there(form: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a wide cache of the same values; on a GPU products may add them in another order."""
    monkeypatch.setattr(mla, "_SPLIT_KEYS", 64)
    monkeypatch.setattr(gqa, "_SPLIT_KEYS", 64)
    monkeypatch.setattr(mla, "_is_wide", lambda *_: "wide" in form)
    if "without join" in form:
        monkeypatch.setattr(gqa, "_MANY_PROGRAMS", 0)
    name, is_twin = form[:3], "twin" in form
    twins: dict[str, Callable[..., torch.Tensor]] = {"mla": mla.mla_attention_torch, "gqa": gqa.gqa_attention_torch}
    kernels = {"mla": mla.mla_attention_triton, "gqa": gqa.gqa_attention_triton}
    op, device = (twins[name], "cpu") if is_twin else (kernels[name], kernel_device)
    narrow, wide = (op(*attention_arguments(name, dtype, device)).cpu() for dtype in (FLOAT8, torch.float32))
    assert narrow.dtype == torch.float32 and narrow[:4].isfinite().all() and narrow[7].isfinite().all()
    assert (narrow[5:7] == 0).all()
    tolerance = 0.0 if device == "cpu" else 1e-5
    torch.testing.assert_close(narrow, wide, rtol=tolerance, atol=tolerance, equal_nan=True)
    plain = twins[name](*attention_arguments(name, FLOAT8, "cpu"))
    torch.testing.assert_close(narrow[:4], plain[:4], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(narrow[7], plain[7], rtol=1e-4, atol=1e-5)


def test_any_other_cache_is_refused() -> None:
    for name, op in (("mla", mla.mla_attention), ("gqa", gqa.gqa_attention)):
        arguments = attention_arguments(name, FLOAT8, "cpu")
        for wrong in (torch.float16, torch.float8_e5m2):
            with pytest.raises(ValueError, match=r"kv_cache: expected dtype torch\.float32 or torch\.float8_e4m3fn"):
                op(arguments[0], arguments[1].float().to(wrong), *arguments[2:])
        with pytest.raises(ValueError, match="kv_cache: expected a contiguous tensor"):
            op(arguments[0], arguments[1][::2], *arguments[2:])
    slots, q = torch.zeros(3).long(), torch.zeros(3, HEADS, RANK + ROPE)
    latent, q_pe = torch.zeros(3, RANK + ROPE), torch.zeros(3, HEADS, ROPE)
    with pytest.raises(ValueError, match="kv_cache: expected dtype"):
        mla_inputs(latent, q_pe, torch.ones(RANK), 1e-6, slots, TABLE, True, slots, torch.zeros(2, 4, 26).half(), q)
    with pytest.raises(ValueError, match="kv_cache: expected dtype"):
        prepare_qkv(torch.zeros(3, 10 * DIM), slots, TABLE, slots, torch.zeros(2, 4, 64).half(), 6, 2)
