# SPDX-License-Identifier: Apache-2.0
"""A program's own text, as Python reads it: the names and calls of its lines."""

from __future__ import annotations

import ast
import functools
import linecache


@functools.lru_cache(maxsize=16)
def parsed(file: str) -> ast.Module:
    """The whole file; an empty module for what cannot be read as Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # the last two: nested too deeply
        return ast.Module(body=[], type_ignores=[])


def spans(node: ast.stmt | ast.expr, line: int) -> bool:
    """Does that line belong to it?"""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def names_in(node: ast.AST) -> list[str]:
    """Variables first, then attributes."""
    found = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return found + [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]


def called_in(node: ast.AST) -> list[str]:
    """The last names of what is called."""
    return [last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]


def last_name(node: ast.expr) -> str:
    """Of ``args.world_size``, ``world_size``."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def left_sides(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to; nothing for anything else."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
