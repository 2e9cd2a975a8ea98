"""What a step must read and compute at the least, and how long a machine needs for it: the floor of its time.

Knows a model's sizes and arithmetic on them; nothing of kernels or devices. A step is a list of operations that follow
one another, each bound by memory or by arithmetic, so that its floor is the sum over operations of the larger of the
two times. Counted are weights (each read once an operation), the experts' as far as tokens are expected to touch them,
KV, and multiply-adds (as two operations). Not counted is what a kernel can keep to itself: activations and logits.
"""

from __future__ import annotations

from typing import NamedTuple

from specgen.models.config import DeepseekV3Config, ModelConfig
from specgen.models.dense_config import DenseConfig


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


class DraftCosts(NamedTuple):
    """How draft layers are cheaper than the target's. float8: their head and experts are held in FP8 (a byte).

    vocab_size: rows of their head, None is all.
    """

    float8: bool = False
    vocab_size: int | None = None


AS_TARGET = DraftCosts()
_IN_FLOAT8 = ("head", "experts", "shared experts")


class CostModel:
    """The cost of steps of one model. `weight_bytes` and `kv_bytes` are of one element."""

    def __init__(
        self,
        config: DeepseekV3Config | DenseConfig,
        weight_bytes: int,
        kv_bytes: int | None = None,
        drafts: DraftCosts = AS_TARGET,
    ) -> None:
        """KV elements are as large as weights unless said otherwise."""
        self.config = config
        self._weight_bytes = weight_bytes
        self._kv_bytes = kv_bytes or weight_bytes
        self._drafts = drafts

    def decode(self, rows: float, context: float, num_drafts: int) -> Cost:
        """A step of `rows` rows with `context` tokens of KV each, which verifies and proposes `num_drafts` a row."""
        verify = _Tokens(rows * (1 + num_drafts), rows * context, rows * (1 + num_drafts) * context)
        ops = self._target(verify, verify.num)
        num_layers = min(self.config.num_nextn_predict_layers, num_drafts)
        for _ in range(num_layers):
            ops += self._draft_layer(verify)
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
        ops = self._target(step, prompts / num_steps)
        for _ in range(min(self.config.num_nextn_predict_layers, num_drafts)):
            ops += self._draft_layer(step)
        return Cost(tuple(op._replace(num_bytes=op.num_bytes * num_steps, flops=op.flops * num_steps) for op in ops))

    def _target(self, tokens: _Tokens, num_logits: float) -> list[Op]:
        c = self.config
        ops: list[Op] = []
        for layer in range(c.num_hidden_layers):
            ops += self._layer("target", tokens, c.is_moe_layer(layer))
        return [*ops, self._head("target", num_logits)]

    def _draft_layer(self, tokens: _Tokens) -> list[Op]:
        c = self.config
        project = self._product("draft", "eh_proj", 2 * c.hidden_size * c.hidden_size, tokens.num)
        return [project, *self._layer("draft", tokens, c.is_moe_layer(c.num_hidden_layers))]

    def _head(self, part: str, num_logits: float) -> Op:
        vocab_size = self.config.vocab_size
        if part == "draft":
            vocab_size = min(self._drafts.vocab_size or vocab_size, vocab_size)
        return self._product(part, "head", vocab_size * self.config.hidden_size, num_logits)

    def _bytes_of(self, part: str, name: str) -> int:
        """Of an element of a product's weights."""
        return 1 if part == "draft" and self._drafts.float8 and name in _IN_FLOAT8 else self._weight_bytes

    def _product(self, part: str, name: str, num_weights: float, num_tokens: float) -> Op:
        return Op(part, name, num_weights * self._bytes_of(part, name), 2 * num_weights * num_tokens)

    def _layer(self, part: str, tokens: _Tokens, is_moe: bool) -> list[Op]:
        ops = self._attention(part, tokens)
        c = self.config
        if not is_moe:
            return [*ops, self._product(part, "mlp", 3 * c.hidden_size * c.intermediate_size, tokens.num)]
        expert = 3 * c.hidden_size * c.moe_intermediate_size
        touched = expected_experts(c.n_routed_experts, c.num_experts_per_tok, tokens.num)
        flops = 2 * expert * c.num_experts_per_tok * tokens.num
        ops.append(self._product(part, "router", c.n_routed_experts * c.hidden_size, tokens.num))
        ops.append(Op(part, "experts", touched * expert * self._bytes_of(part, "experts"), flops))
        if c.n_shared_experts:
            ops.append(self._product(part, "shared experts", c.n_shared_experts * expert, tokens.num))
        return ops

    def _attention(self, part: str, tokens: _Tokens) -> list[Op]:
        c = self.config
        weights, per_head = self._grouped(c) if isinstance(c, DenseConfig) else self._latent(c, tokens.expanded)
        kv_bytes = tokens.kv_entries * c.kv_width * self._kv_bytes
        return [
            self._product(part, "attention products", weights, tokens.num),
            Op(part, "attention", kv_bytes, 2.0 * c.num_attention_heads * per_head * tokens.pairs),
        ]

    @staticmethod
    def _grouped(c: DenseConfig) -> tuple[int, int]:
        """Weights of a layer's products, and multiply-adds of a head for a pair of query and key."""
        return c.hidden_size * (2 * c.num_attention_heads * c.head_dim + c.kv_width), 2 * c.head_dim

    @staticmethod
    def _latent(c: DeepseekV3Config, expanded: bool) -> tuple[int, int]:
        """As `_grouped`."""
        num_q = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        weights = c.hidden_size * ((c.q_lora_rank or num_q) + c.latent_size) + (c.q_lora_rank or 0) * num_q
        weights += c.num_attention_heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
        weights += c.num_attention_heads * c.v_head_dim * c.hidden_size
        per_head = c.latent_size + c.kv_lora_rank  # scores over the latent and its rotary key, sums over the latent
        if expanded:
            per_head = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
        return weights, per_head


def cost_model(
    config: ModelConfig, weight_bytes: int, kv_bytes: int | None = None, drafts: DraftCosts = AS_TARGET
) -> CostModel | None:
    """Return the cost model of a model, None for a kind that has none."""
    if not isinstance(config, DeepseekV3Config | DenseConfig):
        return None
    return CostModel(config, weight_bytes, kv_bytes, drafts)
