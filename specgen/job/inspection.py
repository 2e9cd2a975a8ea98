"""What is in a model's folder: its shape, its tensors, its tokens, what fits on the devices here, and its draft head.

Reads headers and small files; loads weights only to test the draft head, if there is one and the device has the room.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specgen.errors import ModelError, SpecgenError
from specgen.models.checkpoint import Checkpoint
from specgen.models.config import ModelConfig, read_config
from specgen.models.deepseek_v3 import MoE
from specgen.models.families import Family, find_family
from specgen.models.head_folder import build_head, read_head
from specgen.models.head_health import HeadHealth, encoded_texts, measure_head
from specgen.models.kept_float8 import keep_float8
from specgen.models.loading import load_model, unused_prefixes
from specgen.models.weights import Plan, tensor_problems
from specgen.stats import counted
from specgen.tokenizer import Tokenizer, declared_eos, read_json
from specgen.worker.memory import available_memory

_META = torch.device("meta")
_SHARE = 0.85  # of a device's memory that weights and KV may have, as engine.memory_fraction has it
_TEST_TOKENS = 256


class Device(NamedTuple):
    """A device and its memory in bytes, the part that is free among it."""

    name: str
    total: int
    free: int


class StopToken(NamedTuple):
    """A token that ends a row, and the files that say so."""

    token_id: int
    text: str | None
    origins: tuple[str, ...]


@dataclass(slots=True)
class Inspection:
    """A model, counted. Sizes in bytes; parameters as they are held, a tied head once.

    max_tokens: of a row, with its drafts. draft_layers: that the checkpoint, or the head's folder, really holds.
    stored: bytes by dtype. weight_bytes in `dtype` (or as stored, where FP8 is kept) and kv_bytes_per_token in
    `kv_dtype`: draft layers included. kv_tokens: that fit beside the weights on the first device. tensor_parallel: how
    many such devices hold the weights; 1 if one does. head_properties: what is declared about the draft head, and whose
    embedding and output head it uses. problems: what stops a run.
    """

    folder: str
    model_type: str
    layers: int
    draft_layers: int
    vocab_size: int
    max_tokens: int
    parameters: int
    active_parameters: int
    draft_parameters: int
    stored: dict[str, int]
    dtype: str
    keeps_float8: bool
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    devices: list[Device]
    kv_tokens: int
    tensor_parallel: int
    stop_tokens: list[StopToken] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    head_properties: dict[str, str] = field(default_factory=dict)
    head: HeadHealth | None = None
    head_note: str | None = None
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        content = asdict(self)
        content["devices"] = [device._asdict() for device in self.devices]
        content["stop_tokens"] = [token._asdict() for token in self.stop_tokens]
        content["head"] = self.head.as_json() if self.head is not None else None
        return content


class _Parts(NamedTuple):
    """Target and draft layers without memory, and where the tensors of the model's files go."""

    target: Any
    draft: Any
    draft_layers: int
    max_tokens: int
    plan: Plan
    problems: list[str]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Target and draft layers, if there are any."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    def weight_bytes(self) -> int:
        """Bytes of all weights and scales, what both use once."""
        weights = {id(p): p.nbytes for module in self.modules for p in module.parameters()}
        moes = [part for module in self.modules for part in module.modules() if isinstance(part, MoE)]
        return sum(weights.values()) + sum(t.nbytes for moe in moes if moe.scales is not None for t in moe.scales)


def inspect_model(
    folder: Path,
    head_folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    self_test: bool,
    kv_dtype: torch.dtype | None = None,
    keeps_float8: bool = False,
) -> Inspection:
    """Return what is in `folder`; `head_folder` is of a draft head in place of the model's own.

    `kv_dtype`: of the KV cache, None is `dtype`; the draft head is tested with a cache in `dtype`. `keeps_float8`:
    products that are stored in FP8 are counted, and tested, so.

    Raises: ModelError if the folder is none of a model that is supported.
    """
    kv_dtype = kv_dtype or dtype
    config, checkpoint, problem = read_config(folder), None, None
    try:
        checkpoint = Checkpoint(folder)
    except ModelError as error:  # the shape alone tells most of it
        problem = str(error)
    parts = _parts(config, checkpoint, head_folder, dtype)
    total, active = _count(parts.target)
    draft = sum(p.numel() for p in _own(parts)) if parts.draft is not None else 0
    draft_width = parts.draft.kv_width * parts.draft_layers if parts.draft is not None else 0
    kv = (config.kv_width * config.num_hidden_layers + draft_width) * kv_dtype.itemsize
    if keeps_float8 and checkpoint is not None and not parts.problems:
        for module in parts.modules:
            keep_float8(module, parts.plan, checkpoint.tensors, _META)
    weight_bytes = parts.weight_bytes()
    devices = _devices(device)
    room = devices[0].free * _SHARE
    found = Inspection(
        folder=str(folder),
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        draft_layers=parts.draft_layers,
        vocab_size=config.vocab_size,
        max_tokens=parts.max_tokens,
        parameters=total,
        active_parameters=active,
        draft_parameters=draft,
        stored=_stored(checkpoint) if checkpoint is not None else {},
        dtype=str(dtype).removeprefix("torch."),
        keeps_float8=keeps_float8,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv,
        devices=devices,
        kv_tokens=max(0, int(room - weight_bytes) // kv),
        tensor_parallel=_devices_needed(weight_bytes, devices[0].total * _SHARE),
        problems=parts.problems if problem is None else [problem, *parts.problems],
    )
    tokenizer = _read_tokens(found, folder)
    if parts.draft is not None:
        found.head_properties = _head_properties(parts)
    if parts.draft is None:
        found.head_note = "no draft layers: plain decoding, or a head from a second folder"
    elif found.problems or tokenizer is None:
        found.head_note = "the draft head was not tested: the model cannot be run as it is"
    elif not self_test:
        found.head_note = "the draft head was not tested: that was not wanted"
    elif weight_bytes > room:
        found.head_note = "the draft head was not tested: the weights don't fit here"
    elif (prompts := encoded_texts(tokenizer, config, min(_TEST_TOKENS, parts.max_tokens))) is None:
        found.head_note = "the draft head was not tested: the tokenizer gives ids that the model has not, or too few"
    else:
        try:
            found.head = _test_head(found, head_folder, config, prompts, dtype, device)
        except ModelError as error:  # what the headers don't tell
            found.problems.append(str(error))
            found.head_note = "the draft head was not tested: the model cannot be run as it is"
    return found


def _parts(config: ModelConfig, checkpoint: Checkpoint | None, head_folder: Path | None, dtype: torch.dtype) -> _Parts:
    """Target and draft layers; without a checkpoint, what the configuration promises."""
    family = find_family(config.model_type)
    target = family.build(config, 1, dtype, _META)
    plan = family.plan(target)
    if head_folder is not None:
        head = read_head(head_folder, config, 1)
        num_layers = head.config.num_nextn_predict_layers
        built = build_head(head, target, num_layers, 1, dtype, _META)
        problems = _problems(plan, checkpoint, unused_prefixes(family, config, 0))
        problems += _problems(built.plan, head.checkpoint, built.unused)
        max_tokens = min(config.max_position_embeddings, head.config.max_position_embeddings)
        return _Parts(target, built.head, num_layers, max_tokens, plan, problems)
    draft, problems = None, []
    num_layers = _own_draft_layers(family, config, checkpoint)
    if num_layers < config.num_nextn_predict_layers:
        promised = counted(config.num_nextn_predict_layers, "draft layer")
        problems.append(
            f"config.json promises {promised}, the files hold {num_layers}: a converter may have dropped them; plain "
            "decoding works"
        )
    if num_layers:
        assert family.draft is not None
        names = checkpoint.names if checkpoint is not None else frozenset[str]()
        draft = family.draft.build(target, num_layers, names, dtype, _META)
        plan |= family.draft.plan(draft, config, names)
    problems += _problems(plan, checkpoint, unused_prefixes(family, config, num_layers))
    return _Parts(target, draft, num_layers, config.max_position_embeddings, plan, problems)


def _own_draft_layers(family: Family, config: ModelConfig, checkpoint: Checkpoint | None) -> int:
    """How many of the promised draft layers have tensors."""
    if family.draft is None or checkpoint is None:
        return config.num_nextn_predict_layers if family.draft is not None else 0
    prefixes = [family.draft.prefix(config, i) for i in range(config.num_nextn_predict_layers)]
    return sum(any(name.startswith(prefix) for name in checkpoint.names) for prefix in prefixes)


def _problems(plan: Plan, checkpoint: Checkpoint | None, unused: tuple[str, ...]) -> list[str]:
    """What a checkpoint's headers tell is wrong, the first of each kind."""
    return [str(problem) for problem in tensor_problems(checkpoint, plan, unused)] if checkpoint is not None else []


def _count(target: torch.nn.Module) -> tuple[int, int]:
    """Parameters, and those that one token uses."""
    total = sum(p.numel() for p in target.parameters())
    idle = 0.0
    for part in target.modules():
        if isinstance(part, MoE):
            c = part.config
            routed = (part.w13.numel() + part.w2.numel()) * c.n_routed_experts
            routed //= c.n_routed_experts + c.n_shared_experts
            idle += routed * (1 - c.num_experts_per_tok / c.n_routed_experts)
    return total, total - round(idle)


def _own(parts: _Parts) -> list[torch.nn.Parameter]:
    """The draft layers' parameters that are not the target's."""
    shared = {id(p) for p in parts.target.parameters()}
    return [p for p in parts.draft.parameters() if id(p) not in shared]


def _head_properties(parts: _Parts) -> dict[str, str]:
    """What the first draft layer is run under, and what it shares with the target."""
    layer = parts.draft.layers[0]
    own_embedding = parts.draft.embed_tokens is not parts.target.embed_tokens
    own_head = parts.draft.heads[0] is not parts.target.lm_head
    return {
        "hidden states": "after the final norm" if parts.target.head_reads_normed else "before the final norm",
        "projection": "hidden state first" if layer.hidden_first else "embedding first",
        "position 0": "masked" if layer.mask_first_embedding else "not masked",
        "carried on": "its own output after its final norm",
        "embedding": "its own" if own_embedding else "the model's",
        "output head": "its own" if own_head else "the model's",
    }


def _stored(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype_name] = sizes.get(tensor.dtype_name, 0) + tensor.num_bytes
    return dict(sorted(sizes.items()))


def _devices(device: torch.device) -> list[Device]:
    if device.type != "cuda":
        total, free = available_memory()
        return [Device("CPU", total, free)]
    found = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found.append(Device(torch.cuda.get_device_name(i), total, free))
    return found


def _devices_needed(weight_bytes: int, room: float) -> int:
    """The least power of two of devices that hold the weights and a tenth of their memory's share for KV."""
    count = 1
    while weight_bytes / count > 0.9 * room and count < 1024:
        count *= 2
    return count


def _read_tokens(found: Inspection, folder: Path) -> Tokenizer | None:
    """Fills in tokens, chat template and generation_config; None if the tokenizer cannot be read."""
    found.generation_config = {
        key: value
        for key, value in read_json(folder / "generation_config.json").items()
        if key not in ("_from_model_config", "transformers_version")
    }
    declared = read_json(folder / "tokenizer_config.json")
    if (folder / "chat_template.jinja").is_file():
        found.chat_template = "chat_template.jinja"
    elif declared.get("chat_template"):
        found.chat_template = "tokenizer_config.json"
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = Tokenizer(folder)
        found.prefix_ids = list(tokenizer.prefix_ids)
    except SpecgenError as error:
        found.problems.append(str(error))
    try:
        stop_tokens = declared_eos(folder, tokenizer)
    except SpecgenError as error:
        found.problems.append(str(error))
        return None
    for token_id, names in stop_tokens.items():
        text = tokenizer.token_text(token_id) if tokenizer is not None else None
        found.stop_tokens.append(StopToken(token_id, text or None, tuple(names)))
    return tokenizer


def _test_head(
    found: Inspection,
    head_folder: Path | None,
    config: ModelConfig,
    prompts: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> HeadHealth:
    limit = max(map(len, prompts))
    num_drafts = max(found.draft_layers, 3)
    folder, keeps = Path(found.folder), found.keeps_float8
    model = load_model(folder, config, num_drafts, limit, dtype, device, None, head_folder, keeps_float8=keeps)
    assert model.mtp is not None
    return measure_head(model.target, model.mtp, prompts, num_drafts)
