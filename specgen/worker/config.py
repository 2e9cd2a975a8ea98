"""What a worker is built from, and how a recipe's `auto` and `null` become what the device wants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specgen.errors import RecipeError
from specgen.kernels.float8_linear import FLOAT8
from specgen.models.cheap_drafts import AS_LOADED, CheapDrafts
from specgen.models.config import ModelConfig
from specgen.worker.speculator import DRAFTING, Drafting


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is built from; the recipe's values with `auto` resolved. Lengths in tokens.

    folder: None fills the model with random weights. acceptance: the rates at which drafts are accepted by lot.
    by_ratio: drafts are judged by the ratio of the two distributions, and drawn with noise of their own. draft_folder:
    of a draft head that takes the place of the model's own. exact: products on CUDA don't depend on how many rows there
    are. kv_dtype: of the KV pool, target's and draft layers'; None is dtype. widens_steps: steps have twice the tokens
    where the KV of all rows leaves memory for it. pads_decode_steps: a few decode steps of a size run with more rows
    before there is a graph for it.
    """

    folder: Path | None
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int | None
    memory_fraction: float
    num_speculative_tokens: int
    acceptance: tuple[float, ...] | None = None
    drafting: Drafting = DRAFTING
    by_ratio: bool = False
    cuda_graphs: bool = True
    tune_cpu_threads: bool = False
    draft_folder: Path | None = None
    keeps_float8: bool = False
    cheap_drafts: CheapDrafts = AS_LOADED
    exact: bool = True
    kv_dtype: torch.dtype | None = None
    widens_steps: bool = False
    pads_decode_steps: bool = True

    @property
    def pool_dtype(self) -> torch.dtype:
        """What the KV pool holds."""
        return self.kv_dtype or self.dtype


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        RecipeError: CUDA was asked for and is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("model.device is cuda, and torch sees no CUDA device", hint="set model.device to auto or cpu")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def resolve_block_size(block_size: int | None, device: torch.device) -> int:
    """`None` is 64 tokens on CUDA, where an attention step's keys are then one piece of memory, and 16 elsewhere."""
    return block_size or (64 if device.type == "cuda" else 16)


def is_exact(exactness: str, device: torch.device) -> bool:
    """Whether products must not depend on how many rows there are.

    Raises:
        RecipeError: `fast` on a device that has no other products.
    """
    if exactness == "fast" and device.type != "cuda":
        raise RecipeError(
            f"engine.exactness is fast, and on the {device.type.upper()} there are only exact products",
            hint="leave it out: it lets a GPU's libraries choose products by the number of rows",
        )
    return exactness == "exact"


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is `dtype`, `float8` is e4m3.

    Raises:
        RecipeError: float8 on a device that does not know it.
    """
    if name == "auto":
        return dtype
    check_float8(device, "model.kv_dtype")
    return FLOAT8


def check_float8(device: torch.device, key: str) -> None:
    """Raises RecipeError, naming the recipe's key, where the device can't turn FP8 into another type."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise RecipeError(
            f"{key} is float8, and {torch.cuda.get_device_name(device)} does not know FP8",
            hint=f"it takes compute capability 8.9 or more; set {key} to auto",
        )


def resolve_max_num_batched_tokens(num_tokens: int | None, device: torch.device) -> int:
    """`None` is 8192 tokens a step on CUDA, where prompts are read 4 % faster than in halves, and 4096 elsewhere.

    On CUDA it is twice that where rows leave memory unused (`WorkerConfig.widens_steps`): 256 rows with prompts of 512
    tokens are 3 % faster then.
    """
    return num_tokens or (8192 if device.type == "cuda" else 4096)


def make_products_exact() -> None:
    """Takes cuBLAS its workspaces and TF32, so that a row's product does not depend on how many rows there are.

    Must run before the first product on CUDA: the libraries read their environment once.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
