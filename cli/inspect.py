"""`specgen inspect`: what is in a model's folder, whether it fits here, and whether its draft head works."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import codes
from specgen.cli.render import Console, to_stdout
from specgen.model_path import resolve_head, resolve_model
from specgen.recipe_sections import ModelSection
from specgen.stats import counted

if TYPE_CHECKING:
    from specgen.job.inspection import Inspection


def inspect_folder(section: ModelSection, head: str | None, *, self_test: bool, strict: bool, as_json: bool) -> int:
    """Print what is in the folder of `section.path`, counted in its dtypes, and return the exit code.

    2 if a run would stop there, or `strict` and a bad head.

    Raises: SpecgenError if it is no model's folder.
    """
    assert section.path is not None
    folder = resolve_model(section.path)
    head_folder = resolve_head(head) if head is not None else None
    from specgen.job.inspection import inspect_model
    from specgen.worker.config import make_products_exact, resolve_device, resolve_dtype, resolve_kv_dtype

    where = resolve_device(section.device)
    if where.type == "cuda":
        make_products_exact()
    dtype = resolve_dtype(section.dtype, where)
    kv_dtype = resolve_kv_dtype(section.kv_dtype, dtype, where)
    keeps = section.float8 == "keep"
    found = inspect_model(folder, head_folder, dtype, where, self_test=self_test, kv_dtype=kv_dtype, keeps_float8=keeps)
    to_stdout(json.dumps(found.as_json(), indent=2) + "\n" if as_json else _table(found, head_folder))
    console = Console()
    errors, bad_head = list(found.problems), found.head.problem if found.head is not None else None
    if bad_head is not None and strict:
        errors.append(bad_head)
    elif bad_head is not None:
        console.warn(bad_head)
    for problem in errors:
        console.show(f"error: {problem}", style="red")
    return codes.WRONG if errors else codes.OK


def _table(found: "Inspection", head_folder: Path | None) -> str:
    rows = [
        ("folder", found.folder),
        ("model", f"{found.model_type}, {counted(found.layers, 'layer')}, vocabulary {found.vocab_size:,}"),
        ("draft layers", f"{found.draft_layers}" + (f", from {head_folder}" if head_folder is not None else "")),
        ("parameters", _parameters(found)),
        ("stored", ", ".join(f"{name} {_size(size)}" for name, size in found.stored.items()) or "nothing"),
        ("weights here", f"{_size(found.weight_bytes)} {_held(found)}, draft layers included"),
        ("KV", f"{found.kv_bytes_per_token:,} bytes a token in {found.kv_dtype}; at most {found.max_tokens:,} a row"),
    ]
    rows += [("device", f"{d.name}, {_size(d.total)}, {_size(d.free)} free") for d in found.devices]
    rows += [
        ("fits", _fit(found)),
        ("stop tokens", ", ".join(_token(t.token_id, t.text, t.origins) for t in found.stop_tokens) or "none"),
        ("before a prompt", ", ".join(map(str, found.prefix_ids)) or "nothing"),
        ("chat template", found.chat_template or "none"),
        ("generation_config", ", ".join(f"{k} {v}" for k, v in found.generation_config.items()) or "none"),
    ]
    if found.head_properties:
        rows.append(("head's input", ", ".join(f"{name}: {value}" for name, value in found.head_properties.items())))
    if found.head is not None:
        shares = ", ".join(f"{rate:.0%}" for rate in found.head.rates)
        verdict = "works" if found.head.problem is None else "does not fit"
        rows.append(("draft head", f"{verdict}: agrees with the model at {shares} of positions, by draft"))
    else:
        rows.append(("draft head", found.head_note or ""))
    return "".join(f"{name.ljust(18)}{text}\n" for name, text in rows)


def _parameters(found: "Inspection") -> str:
    active = "" if found.active_parameters == found.parameters else f", {_count(found.active_parameters)} active"
    draft = f", and {_count(found.draft_parameters)} in the draft layers" if found.draft_parameters else ""
    return f"{_count(found.parameters)}{active}{draft}"


def _held(found: "Inspection") -> str:
    return f"with FP8 kept, the rest in {found.dtype}" if found.keeps_float8 else f"in {found.dtype}"


def _fit(found: "Inspection") -> str:
    if found.tensor_parallel > 1:
        return f"no: {found.tensor_parallel} such devices would hold the weights"
    if found.kv_tokens == 0:
        return "no: the free memory holds the weights and no KV"
    return f"yes, with {found.kv_tokens:,} tokens of KV"


def _token(token_id: int, text: str | None, origins: tuple[str, ...]) -> str:
    return f"{token_id} {text or '?'} ({', '.join(origins)})"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
