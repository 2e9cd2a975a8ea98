"""What kernels do before they wait for the ones before them, read from their source: a race would show now and then."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specgen.kernels

LATE, EARLY = "wait_for_inputs", "start_next_and_wait"
# Kernels behind which another one reads, before it waits, what had been written before them; each is the last barrier
# between the two, or would be if another of them were early.
LATE_ONES = {
    "_gather_kernel": "the first product of sorted rows reads tiles",
    "_place_kernel": "tiles of the gated product",
    "_grouped_kernel": "the second product reads tiles and choices, combine_norm choices' weights and the residual",
    "_produce": "the second product of sorted rows reads tiles, combine_norm places and the residual",
    "mla_scores_hopper_kernel": "the values' kernel reads the cache",
    "mla_scores_kernel": "the values' kernel reads the cache's layout",
    "_block_float8_grouped_kernel": "combine_norm reads choices' weights and the residual",
    "few_rows_hopper_kernel": "attention reads the step's layout, if it is the first layer's",
    "_draft_layer_inputs_kernel": "attention reads the step's layout",
}


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def functions() -> dict[str, ast.FunctionDef]:
    """All functions of the kernel files that wait, by name."""
    found = {}
    for file in sorted(Path(specgen.kernels.__path__[0]).glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(called(n) in (LATE, EARLY) for n in ast.walk(node)):
                found[node.name] = node
    return found


@pytest.mark.parametrize("name", sorted(LATE_ONES))
def test_the_next_kernel_does_not_begin_too_early(name: str) -> None:
    calls = {called(node) for node in ast.walk(functions()[name])}
    assert LATE in calls and EARLY not in calls, LATE_ONES[name]


def writes_memory(node: ast.AST) -> bool:
    """Whether it is a store through pointers, not one of a block of shared memory."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return called(node) in ("store_kv", "_store_pairs")
    return node.func.attr.startswith(("store", "atomic")) and ast.unparse(node.func.value) in ("tl", "gl")


def test_nothing_is_written_before_the_wait() -> None:
    waiting = functions()
    assert len(waiting) > 25
    for name, function in waiting.items():
        waits = [node.lineno for node in ast.walk(function) if called(node) in (LATE, EARLY)]
        writes = [node.lineno for node in ast.walk(function) if writes_memory(node)]
        assert min(writes, default=10**9) > min(waits), name


def test_a_kernel_that_waits_knows_whether_it_is_launched_so() -> None:
    for name, function in functions().items():
        assert "PDL" in {arg.arg for arg in function.args.args}, name
