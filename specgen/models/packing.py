"""Weights in the layout of the CPU's own products.

Knows which of a model's products gain by it, not how they are made.
"""

from __future__ import annotations

from specgen.models.families import DraftModel, TargetModel
from specgen.models.layers import Embedding, Linear

# Elements of a weight from which on it pays: smaller ones are read within the time that the other call takes longer.
_LARGE = 1 << 17


def pack_products(target: TargetModel, mtp: DraftModel | None) -> None:
    """Holds the large weights of the models' products in the CPU's own layout, those that embeddings share twice."""
    modules = {id(module): module for model in (target, mtp) if model is not None for module in model.modules()}
    shared = {m.weight.untyped_storage().data_ptr() for m in modules.values() if isinstance(m, Embedding)}
    for module in modules.values():
        if isinstance(module, Linear) and module.packed is None and module.weight.numel() >= _LARGE:
            module.pack(keeps_weight=module.weight.untyped_storage().data_ptr() in shared)
