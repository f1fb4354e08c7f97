# SPDX-License-Identifier: Apache-2.0
"""Where a program's own text multiplies its loss by the number of ranks, or divides by it.

And whether its learning rate is divided by them, which makes up for a sum.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from lockstep.audit.finding import Place
from lockstep.audit.program_text.parsed_source import (
    called_in,
    last_name,
    left_sides,
    names_in,
    parsed,
    spans,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RANKS: Final = frozenset(
    {"world", "worldsize", "worldsz", "getworldsize"}
    | {"numprocesses", "nprocs", "nproc", "numranks", "nranks", "numreplicas"}
    | {"ngpu", "ngpus", "numgpus"}
)
"""In lower case, without underscores. Shorter names may stand for anything: what the program gives
them tells."""


def line_with_factor(lines: Sequence[Place], *, divides: bool) -> Place | None:
    """The line that gives the loss of the backward at `lines` its factor.

    Looked at are what backward is called on, what is assigned to that name or to one with "loss" in
    it, and what functions return that such an assignment calls. A learning rate is none of them.
    """
    wanted = ast.Div if divides else ast.Mult
    for place in lines[:3]:
        module = parsed(place.file)
        ranks = _number_of_ranks(module)
        for statement in _about_the_loss(module, place.line):
            number = _factor_in(statement, wanted, ranks)
            if number is not None:
                return Place(place.file, number, place.function, "")
    return None


def divides_rate(lines: Sequence[Place]) -> bool:
    """Is the learning rate of the optimizer that is made at `lines` divided by the ranks?"""
    if not lines:
        return False
    module = parsed(lines[0].file)
    nodes, ranks = list(ast.walk(module)), _number_of_ranks(module)
    calls = [n for n in nodes if isinstance(n, ast.Call) and spans(n, lines[0].line)]
    rates = [k.value for c in calls for k in c.keywords if k.arg == "lr"]
    known = {last_name(rate) for rate in rates} - {""}
    # `args.batch_size` is not `args.lr`: the last name counts.
    assigned = [n for n in nodes if known.intersection(map(last_name, left_sides(n)))]
    return any(_factor_in(n, ast.Div, ranks) is not None for n in (*rates, *assigned))


def _about_the_loss(module: ast.Module, line: int) -> Iterator[ast.stmt]:
    roots: set[str] = set()
    calls: set[str] = set()
    nodes = list(ast.walk(module))
    for node in nodes:
        if isinstance(node, ast.Expr) and spans(node.value, line):
            roots.update(names_in(node))
            calls.update(called_in(node))
            yield node
    for node in nodes:
        targets = [name for target in left_sides(node) for name in names_in(target)]
        if any(name in roots or "loss" in name.lower() for name in targets):
            assert isinstance(node, ast.stmt)
            calls.update(called_in(node))
            yield node
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name in calls:
            yield from (n for n in ast.walk(node) if isinstance(n, ast.Return))


def _number_of_ranks(module: ast.Module) -> frozenset[str]:
    """What the program calls it: by one of the known names, or what is set to such a one."""
    found = set(_RANKS)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in _pairs(target, node.value):
                    if _is_number_of_ranks(value, _RANKS):
                        found.add(_as_written(name))
    return frozenset(found)


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of ``rank, n = get_rank(), get_world_size()``, both."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _as_written(node: ast.expr) -> str:
    return last_name(node).lower().replace("_", "")


def _factor_in(statement: ast.AST, wanted: type[ast.operator], ranks: frozenset[str]) -> int | None:
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, wanted):
            operands = [node.value]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, wanted):
            operands = [node.right] if wanted is ast.Div else [node.left, node.right]
        else:
            continue
        factors = [factor for operand in operands for factor in _factors(operand)]
        if any(_is_number_of_ranks(factor, ranks) for factor in factors):
            return node.lineno
    return None


def _factors(node: ast.expr) -> list[ast.expr]:
    """Of ``steps * world_size``, both."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _factors(node.left) + _factors(node.right)
    return [node]


def _is_number_of_ranks(node: ast.expr, ranks: frozenset[str]) -> bool:
    if isinstance(node, ast.Subscript):  # os.environ["WORLD_SIZE"]
        return isinstance(node.slice, ast.Constant) and node.slice.value == "WORLD_SIZE"
    if isinstance(node, ast.Call):
        if any(isinstance(a, ast.Constant) and a.value == "WORLD_SIZE" for a in node.args):
            return True
        if isinstance(node.func, ast.Name) and node.func.id in ("float", "int") and node.args:
            return _is_number_of_ranks(node.args[0], ranks)
        node = node.func
    return _as_written(node) in ranks
