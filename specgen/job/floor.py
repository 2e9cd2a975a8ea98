"""What a step must read and compute at the least, and how long a machine needs for it: the floor of its time.

Knows a model's sizes and arithmetic on them; nothing of kernels or devices. A step is a list of operations that follow
one another, each bound by memory or by arithmetic, so that its floor is the sum over operations of the larger of the
two times. Counted are weights (each read once an operation), the experts' as far as tokens are expected to touch them,
KV, and multiply-adds (as two operations). Not counted is what a kernel can keep to itself: activations and logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specgen.kernels.float8_linear import MAX_ROWS
from specgen.models.cheap_drafts import LARGE_WEIGHT
from specgen.models.config import DeepseekV3Config, ModelConfig
from specgen.models.context import reads_first_outputs
from specgen.models.dense_config import DenseConfig
from specgen.models.fp8 import BLOCK

_Shape = tuple[int, int]


class Ceilings(NamedTuple):
    """What the machine was measured to do: bytes/s read and written by a large copy, FLOP/s of a large product."""

    bytes_per_second: float
    flops_per_second: float


class Op(NamedTuple):
    """One operation of one layer in one part ("target" or "draft") of a step."""

    part: str
    name: str
    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The least time: bytes or arithmetic, whichever takes longer."""
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


class Cost(NamedTuple):
    """The operations of a step or of several."""

    ops: tuple[Op, ...]

    @property
    def num_bytes(self) -> float:
        """Bytes that must be read."""
        return sum(op.num_bytes for op in self.ops)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return sum(op.flops for op in self.ops)

    def of(self, part: str) -> Cost:
        """The operations of one part."""
        return Cost(tuple(op for op in self.ops if op.part == part))

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor of the time."""
        return sum(op.seconds(ceilings) for op in self.ops)

    @property
    def kinds(self) -> dict[tuple[str, str], Cost]:
        """The operations by part and name."""
        kinds: dict[tuple[str, str], list[Op]] = {}
        for op in self.ops:
            kinds.setdefault((op.part, op.name), []).append(op)
        return {kind: Cost(tuple(ops)) for kind, ops in kinds.items()}


def expected_experts(num_experts: int, num_chosen: int, num_tokens: float) -> float:
    """How many experts `num_tokens` tokens touch between them, if each chooses `num_chosen` of them evenly."""
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)


class _Tokens(NamedTuple):
    """What a pass of a layer works on: tokens, the KV entries it reads, and pairs of a query and a KV entry.

    `expanded`: whether keys and values are made for every head, as is cheaper for many queries, or queries meet the
    latent itself.
    """

    num: float
    kv_entries: float
    pairs: float
    expanded: bool = False


_NO_TOKENS = _Tokens(0, 0, 0)


class DraftCosts(NamedTuple):
    """How draft layers differ from the target's.

    float8: their large products and experts are held in FP8, as `cheapen` does it. vocab_size: rows of their head, None
    is all. config: the shape of a head that comes in a folder of its own; None is the target's.
    """

    float8: bool = False
    vocab_size: int | None = None
    config: DenseConfig | None = None


AS_TARGET = DraftCosts()
_EXPERTS = ("experts", "shared experts")
# Products that stay in FP8 where a checkpoint stores them so; what is folded into latent attention does not.
_KEPT = ("attention products", "mlp", *_EXPERTS)
# Those of draft layers that are made FP8 where they are large.
_CHEAP = ("eh_proj", "attention products", "mlp")
_SCALE_BYTES = 4


class CostModel:
    """The cost of steps of one model. `weight_bytes` and `kv_bytes` are of one element."""

    def __init__(
        self,
        config: DeepseekV3Config | DenseConfig,
        weight_bytes: int,
        kv_bytes: int | None = None,
        drafts: DraftCosts = AS_TARGET,
        keeps_float8: bool = False,
    ) -> None:
        """KV elements are as large as weights unless said otherwise.

        `keeps_float8`: products that FP8 checkpoints store in FP8 are a byte an element, and a scale a block.
        """
        self.config = config
        self._draft_config = drafts.config or config
        self._weight_bytes = weight_bytes
        self._kv_bytes = kv_bytes or weight_bytes
        self._drafts = drafts
        self._keeps_float8 = keeps_float8

    def decode(self, rows: float, context: float, num_drafts: int) -> Cost:
        """A step of `rows` rows with `context` tokens of KV each, which verifies and proposes `num_drafts` a row."""
        verify = _Tokens(rows * (1 + num_drafts), rows * context, rows * (1 + num_drafts) * context)
        ops = self._target(verify, verify.num)
        num_layers = min(self._draft_config.num_nextn_predict_layers, num_drafts)
        ops += self._first_pass(verify, _Tokens(rows, rows * context, rows * context), num_drafts)
        for step in range(num_drafts):
            if step:
                width = min(step, num_layers)
                ops += self._draft_layer(_Tokens(rows * width, rows * context, rows * width * context))
            ops.append(self._head("draft", rows))
        return Cost(tuple(ops))

    def prefill(self, prompts: float, prompt_len: float, tokens_per_step: float, num_drafts: int) -> Cost:
        """All steps that read `prompts` prompts of `prompt_len` tokens, up to each one's first token and draft."""
        total = prompts * prompt_len
        num_steps = max(1.0, total / tokens_per_step)
        chunk = total / num_steps
        step = _Tokens(chunk, chunk, prompts * prompt_len * (prompt_len + 1) / 2 / num_steps, expanded=True)
        ends = prompts / num_steps
        ops = [*self._target(step, ends), *self._first_pass(step, _Tokens(ends, chunk, chunk), num_drafts)]
        return Cost(tuple(op._replace(num_bytes=op.num_bytes * num_steps, flops=op.flops * num_steps) for op in ops))

    def _target(self, tokens: _Tokens, num_logits: float) -> list[Op]:
        c = self.config
        ops: list[Op] = []
        for layer in range(c.num_hidden_layers):
            ops += self._layer("target", c, tokens, c.is_moe_layer(layer))
        return [*ops, self._head("target", num_logits)]

    def _first_pass(self, tokens: _Tokens, ends: _Tokens, num_drafts: int) -> list[Op]:
        """Of all draft layers over a step's tokens; of the last one's outputs those of `ends` are read, or none."""
        num_layers = min(self._draft_config.num_nextn_predict_layers, num_drafts)
        if num_layers == 0:
            return []
        is_read = reads_first_outputs(num_layers, num_drafts)
        below = [op for _ in range(num_layers - 1) for op in self._draft_layer(tokens)]
        return [*below, *self._draft_layer(tokens, ends if is_read else _NO_TOKENS)]

    def _draft_layer(self, tokens: _Tokens, outputs: _Tokens | None = None) -> list[Op]:
        c = self._draft_config
        project = self._product("draft", "eh_proj", [(c.hidden_size, 2 * c.hidden_size)], tokens.num)
        return [project, *self._layer("draft", c, tokens, c.is_moe_layer(c.num_hidden_layers), outputs)]

    def _head(self, part: str, num_logits: float) -> Op:
        vocab_size = self.config.vocab_size
        if part == "draft":
            vocab_size = min(self._drafts.vocab_size or vocab_size, vocab_size)
        return self._product(part, "head", [(vocab_size, self.config.hidden_size)], num_logits)

    def _product(self, part: str, name: str, shapes: list[_Shape], num_tokens: float) -> Op:
        """Products of `num_tokens` tokens with weights of some shapes [out, in], each read once, if there are any."""
        if not num_tokens:
            return Op(part, name, 0, 0)
        num_bytes = sum(self._bytes_of(part, name, shape, num_tokens) for shape in shapes)
        return Op(part, name, num_bytes, 2 * sum(math.prod(shape) for shape in shapes) * num_tokens)

    def _bytes_of(self, part: str, name: str, shape: _Shape, num_tokens: float) -> float:
        """Bytes of a weight, its scales included, in the form in which so many tokens read it."""
        num_out, num_in = shape
        size = num_out * num_in
        config = self._draft_config if part == "draft" else self.config
        is_kept = name not in _EXPERTS or config.moe_intermediate_size % BLOCK == 0
        if self._keeps_float8 and name in _KEPT and is_kept:
            return size + _SCALE_BYTES * -(-num_out // BLOCK) * -(-num_in // BLOCK)
        is_large = name == "head" or (name in _CHEAP and size >= LARGE_WEIGHT)
        in_float8 = name in _EXPERTS or (is_large and num_tokens <= MAX_ROWS)
        if part == "draft" and self._drafts.float8 and in_float8:
            return size + _SCALE_BYTES * num_out
        return size * self._weight_bytes

    def _layer(
        self,
        part: str,
        c: DeepseekV3Config | DenseConfig,
        tokens: _Tokens,
        is_moe: bool,
        outputs: _Tokens | None = None,
    ) -> list[Op]:
        """A layer that writes the KV of `tokens` and gives the outputs of `outputs`, a part of them; None is all."""
        if outputs is None:
            outputs = tokens
        ops = self._attention(part, c, tokens, outputs)
        if not is_moe:
            return [*ops, self._product(part, "mlp", _gated(c.hidden_size, c.intermediate_size), outputs.num)]
        expert = _gated(c.hidden_size, c.moe_intermediate_size)
        touched = expected_experts(c.n_routed_experts, c.num_experts_per_tok, outputs.num)
        one = self._product(part, "experts", expert, c.num_experts_per_tok * outputs.num)
        ops.append(self._product(part, "router", [(c.n_routed_experts, c.hidden_size)], outputs.num))
        ops.append(one._replace(num_bytes=touched * one.num_bytes))
        if c.n_shared_experts:
            ops.append(self._product(part, "shared experts", expert * c.n_shared_experts, outputs.num))
        return ops

    def _attention(self, part: str, c: DeepseekV3Config | DenseConfig, tokens: _Tokens, outputs: _Tokens) -> list[Op]:
        name = "attention products"
        if isinstance(c, DenseConfig):
            num_q, per_head = c.num_attention_heads * c.head_dim, 2 * c.head_dim
            products = [self._product(part, name, [(c.hidden_size, num_q)], outputs.num)]
        else:
            per_head = c.latent_size + c.kv_lora_rank  # scores over the latent and its rotary key, sums over the latent
            if outputs.expanded:
                per_head = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
            num_q, shapes = _latent_shapes(c)
            head_shape = (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
            products = [self._product(part, name, shapes, outputs.num)]
            products.append(self._product(part, "by head", [head_shape], outputs.num))
        # one weight makes queries and KV; the queries of tokens without an output need not be made
        num_q = num_q if outputs.num else 0
        fused = self._product(part, name, [(num_q + c.kv_width, c.hidden_size)], tokens.num)
        flops = fused.flops - 2 * num_q * c.hidden_size * (tokens.num - outputs.num)
        all_products = Cost((fused._replace(flops=flops), *products))
        kv_bytes = outputs.kv_entries * c.kv_width * self._kv_bytes
        return [
            Op(part, name, all_products.num_bytes, all_products.flops),
            Op(part, "attention", kv_bytes, 2.0 * c.num_attention_heads * per_head * outputs.pairs),
        ]


def _gated(hidden: int, inner: int) -> list[_Shape]:
    """The fused weights of a gated MLP or expert."""
    return [(2 * inner, hidden), (hidden, inner)]


def _latent_shapes(c: DeepseekV3Config) -> tuple[int, list[_Shape]]:
    """Of latent attention: rows of the queries in the product that reads the input, and the weights behind it.

    Without those that meet the latent head by head.
    """
    num_q = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    out = (c.hidden_size, c.num_attention_heads * c.v_head_dim)
    return (c.q_lora_rank, [(num_q, c.q_lora_rank), out]) if c.q_lora_rank else (num_q, [out])


def cost_model(
    config: ModelConfig,
    weight_bytes: int,
    kv_bytes: int | None = None,
    drafts: DraftCosts = AS_TARGET,
    keeps_float8: bool = False,
) -> CostModel | None:
    """Return the cost model of a model, None for a kind that has none."""
    if not isinstance(config, DeepseekV3Config | DenseConfig):
        return None
    return CostModel(config, weight_bytes, kv_bytes, drafts, keeps_float8)
