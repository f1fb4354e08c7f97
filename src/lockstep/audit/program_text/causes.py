# SPDX-License-Identifier: Apache-2.0
"""Lines of the program's own text that lead to the line where something was measured.

What is measured stands at a step or a backward. What has to be changed is often some lines away:
where the loss is put together, where the loader is made, under which condition the step is taken.
These lines are read in the text around the measured one. They explain no finding and make none.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lockstep.audit.finding import Place, with_text
from lockstep.audit.program_text.parsed_source import (
    called_in,
    last_name,
    left_sides,
    names_in,
    parsed,
    spans,
)
from lockstep.audit.program_text.rank_factors import line_with_factor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep.audit.finding import Finding

_SHOWN: Final = 2
"""Of such lines, beside one that was measured."""

_FSDP_FACTORS: Final = frozenset(
    {
        "set_gradient_divide_factor",
        "set_reduce_scatter_divide_factor",
        "set_force_sum_reduction_for_comms",
    }
)
_SCHEDULES: Final = frozenset(
    {
        "LRScheduler",
        "LambdaLR",
        "MultiplicativeLR",
        "StepLR",
        "MultiStepLR",
        "ConstantLR",
        "LinearLR",
        "ExponentialLR",
        "PolynomialLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "OneCycleLR",
        "SequentialLR",
        "ChainedScheduler",
    }
)
"""Torch's own; a name that only ends like one may be anything."""
_SENDING: Final = frozenset({"broadcast", "broadcast_object_list", "scatter", "send"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def with_causes(finding: Finding) -> Finding:
    """The same finding, with the lines that lead to its first one behind that."""
    look = _LOOKS.get(finding.code)
    if look is None or not finding.where:
        return finding
    first, *others = finding.where
    measured = (first.file, first.line)
    found = [place for place in look(finding) if (place.file, place.line) != measured][:_SHOWN]
    return replace(finding, where=with_text([first, *found, *others]))


def _of_the_loss(finding: Finding) -> Iterator[Place]:
    """The last assignment to what backward is called on."""
    for place in finding.where[:2]:
        scope, names = _names_at(place)
        told = [name for name in names if "loss" in name.lower()] or names
        assigned = list(_assigned_before(scope, told, place.line))
        if assigned:
            yield _as_place(place.file, assigned[-1])
            return


def _of_the_factor(finding: Finding) -> Iterator[Place]:
    """The line that multiplies the loss by the number of ranks, or divides by it; then the loss."""
    divides = finding.evidence.get("ratio", 1.0) < 1.0
    found = line_with_factor(finding.where, divides=divides)
    if found is not None:
        yield found
    yield from _of_the_loss(finding)


def _of_the_model(finding: Finding) -> Iterator[Place]:
    """Where the modules are made whose parameters an optimizer in that function is given."""
    place = finding.where[0]
    scope, _ = _names_at(place)
    given = {
        node.func.value.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
        and isinstance(node.func.value, ast.Name)
    }
    for node in _assigned_before(scope, sorted(given), place.line):
        yield _as_place(place.file, node)


def _of_the_loader(finding: Finding) -> Iterator[Place]:
    """Where the loader that a loop reads is made, and the sampler that it is given."""
    for place in finding.where[:2]:
        scope, names = _names_at(place)
        lines: list[ast.AST] = list(_assigned_before(scope, names, place.line))
        given = [n for node in lines for n in names_in(node) if "sampler" in n.lower()]
        lines += _assigned_before(scope, given, place.line)
        makers = {name for node in lines for name in called_in(node)}
        for function in _functions(place.file):
            if function.name in makers:
                lines += [node for node in ast.walk(function) if _makes_a_loader(node)]
        chosen = [node for node in lines if _makes_a_loader(node)]
        if chosen:
            # The sampler says which samples a rank gets, and comes first.
            chosen.sort(key=lambda node: not any("Sampler" in n for n in called_in(node)))
            yield from (_as_place(place.file, node) for node in chosen)
            return


def _makes_a_loader(node: ast.AST) -> bool:
    told = ("Loader", "Sampler", "random_split")
    return isinstance(node, ast.Assign | ast.Return) and any(
        word in name for name in called_in(node) for word in told
    )


def _condition(finding: Finding) -> Iterator[Place]:
    """The innermost ``if`` that the line stands in."""
    place = finding.where[0]
    scope = _function_at(place)
    holding = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.If) and spans(node, place.line) and node.lineno < place.line
    ]
    if holding:
        yield _as_place(place.file, max(holding, key=lambda node: node.lineno))


def _setting(finding: Finding) -> Iterator[Place]:
    """Where a setting that differs is written by the program itself, or its schedule steps."""

    def fits(node: ast.AST) -> bool:
        return _writes_to(node, finding.evidence) or _steps_a_schedule(node)

    yield from _nodes_like(fits)(finding)
    # Else it depends on how the schedule was made, as on how long this rank's loader is.
    yield from _nodes_like(_makes_a_schedule)(finding)


def _writes_to(node: ast.AST, settings: dict[str, object]) -> bool:
    keys = [side.slice for side in left_sides(node) if isinstance(side, ast.Subscript)]
    return any(isinstance(key, ast.Constant) and key.value in settings for key in keys)


def _makes_a_schedule(node: ast.AST) -> bool:
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    return name in _SCHEDULES or (name.startswith("get_") and "schedule" in name)


def _steps_a_schedule(node: ast.AST) -> bool:
    """With an argument, as one that follows a loss; or made to follow one."""
    if isinstance(node, ast.Call) and last_name(node.func) == "ReduceLROnPlateau":
        return True
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return False
    names = " ".join(names_in(node.func.value)).lower()
    return node.func.attr == "step" and ("sched" in names or "plateau" in names)


def _calls_of(*attributes: str) -> Callable[[Finding], Iterator[Place]]:
    wanted = set(attributes)
    return _nodes_like(
        lambda node: isinstance(node, ast.Call) and last_name(node.func) in wanted,
    )


def _of_the_window(finding: Finding) -> Iterator[Place]:
    """Where a wrapper is told not to synchronise, if that is the reason."""
    if finding.evidence.get("reason") in ("wrong window", "not reduced yet"):
        yield from _calls_of("no_sync", "no_backward_sync", "set_requires_gradient_sync")(finding)


def _own_backward(finding: Finding) -> Iterator[Place]:
    """What the backward of the Function returns whose forward communicates."""
    for place in finding.where:
        for node in ast.walk(parsed(place.file)):
            if not isinstance(node, ast.ClassDef) or not spans(node, place.line):
                continue
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "backward":
                    for returned in ast.walk(function):
                        if isinstance(returned, ast.Return):
                            yield Place(place.file, returned.lineno, "backward", "")


def _nodes_like(fits: Callable[[ast.AST], bool]) -> Callable[[Finding], Iterator[Place]]:
    def look(finding: Finding) -> Iterator[Place]:
        for file in dict.fromkeys(place.file for place in finding.where):
            found = [node for node in ast.walk(parsed(file)) if fits(node)]
            found.sort(key=lambda node: getattr(node, "lineno", 0))
            yield from (_as_place(file, node) for node in found)

    return look


def _writes_gradients(node: ast.AST) -> bool:
    """In place, as ``p.grad.add_(noise)``; clearing and dividing belong to every reduction."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    own = node.func.value
    writes = node.func.attr.endswith("_") and node.func.attr not in ("zero_", "div_", "copy_")
    return writes and isinstance(own, ast.Attribute) and own.attr == "grad"


def _parameters_written(finding: Finding) -> Iterator[Place]:
    """Where a parameter that changed is written by its name, or parameters are copied to."""
    names = {name.rpartition(".")[2].partition("#")[0] for name in finding.parameters}
    names -= {"weight", "bias"}  # of any layer

    def by_name(node: ast.AST) -> bool:
        written = [s.value for s in left_sides(node) if isinstance(s, ast.Subscript)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            written += [node.func.value] if node.func.attr.endswith("_") else []
        return any(not names.isdisjoint(names_in(own)) for own in written)

    yield from _nodes_like(by_name)(finding)
    yield from _calls_of("copy_", "lerp_", "load_state_dict", "vector_to_parameters")(finding)


def _leaves_out_none(node: ast.AST) -> bool:
    """``if p.grad is None: continue``, or the other way round."""
    return isinstance(node, ast.If) and any(
        isinstance(n, ast.Compare)
        and isinstance(n.left, ast.Attribute)
        and n.left.attr == "grad"
        and isinstance(n.ops[0], ast.Is | ast.IsNot)
        for n in ast.walk(node.test)
    )


def _is_given(keyword: str) -> Callable[[ast.AST], bool]:
    return lambda node: (
        isinstance(node, ast.Call) and any(given.arg == keyword for given in node.keywords)
    )


_LOOKS: Final[dict[str, Callable[[Finding], Iterator[Place]]]] = {
    "LS101": _of_the_window,
    "LS102": _calls_of("fully_shard", "prepare", "setup_module"),
    "LS104": _nodes_like(_writes_gradients),
    "LS106": _nodes_like(_leaves_out_none),
    "LS107": _calls_of(*_SENDING),
    "LS203": _of_the_loss,
    "LS205": _calls_of(*_FSDP_FACTORS),
    "LS206": _of_the_factor,
    "LS208": _own_backward,
    "LS302": _of_the_model,
    "LS303": _parameters_written,
    "LS304": _calls_of("load_state_dict"),
    "LS305": _setting,
    "LS308": _condition,
    "LS309": _nodes_like(_is_given("broadcast_buffers")),
    "LS311": _calls_of("eval"),
    "LS503": _of_the_loader,
    "LS504": _of_the_loader,
    "LS505": _of_the_loader,
    "LS506": _of_the_loader,
    "LS508": _of_the_loader,
    "LS509": _of_the_loader,
}


def _functions(file: str) -> list[_Function]:
    return [node for node in ast.walk(parsed(file)) if isinstance(node, _Function)]


def _function_at(place: Place) -> _Function | ast.Module:
    """The innermost function that the line stands in, or the module."""
    holding = [f for f in _functions(place.file) if spans(f, place.line)]
    return max(holding, key=lambda f: f.lineno) if holding else parsed(place.file)


def _names_at(place: Place) -> tuple[_Function | ast.Module, list[str]]:
    """The function that the line stands in, and the names that the line's own code uses."""
    scope = _function_at(place)
    used = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name | ast.Attribute) and node.lineno == place.line
    ]
    return scope, list(dict.fromkeys(name for node in used for name in names_in(node)))


def _assigned_before(scope: ast.AST, names: Sequence[str], line: int) -> Iterator[ast.stmt]:
    """Assignments of what a call gives to one of `names`, as the text has them."""
    wanted = set(names)
    found = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and node.lineno < line
        and wanted.intersection(name for side in left_sides(node) for name in names_in(side))
    ]
    yield from sorted(found, key=lambda node: node.lineno)


def _as_place(file: str, node: ast.AST) -> Place:
    line = getattr(node, "lineno", 0)
    scope = _function_at(Place(file, line, "", ""))
    return Place(file, line, scope.name if isinstance(scope, _Function) else "<module>", "")
