# SPDX-License-Identifier: Apache-2.0
"""What happens to gradients where values of other ranks enter a loss.

Three facts of a loss that is built from gathered rows are measured: whether they entered it
(their memory is saved by an operation in the loss's graph), whether the rows had a gradient when
they were sent, and whether backward communicates.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.audit.facts import Gathered
from lockstep.audit.probe import aliases, arrivals, passed_back
from lockstep.audit.probe.frames import looks_at_its_locals, outwards
from lockstep.audit.probe.graphs import Graph, mark_of
from lockstep.audit.probe.loss_graph import weight_at
from lockstep.audit.probe.records import Reduced

if TYPE_CHECKING:
    from lockstep.audit.facts import Backward, Collective
    from lockstep.audit.probe.probe import Probe

GATHERS: Final = {"all_gather", "all_gather_into_tensor", "all_gather_single"}
_FRAMES: Final = 12
_SMALL: Final = 65_536
_HELD: Final = 4
"""Results that keep their graphs, at most."""
_MOST: Final = 64
"""Between two steps, the last ones."""


def note(probe: Probe, call: Collective, tensor: torch.Tensor, given: dict[str, Any]) -> None:
    """A collective has ended: remember what it sent or changed, if it had a gradient."""
    if len(call.group) < 2 or call.in_backward or not tensor.is_floating_point():
        return
    if call.op in GATHERS:
        context = _function_context()
        outputs: Any = given.get("tensor_list", given.get("output_tensor"))
        parts = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        is_there = not given.get("async_op")
        if context is not None or tensor.requires_grad:
            taint(probe, call, tensor, parts, context, is_there=is_there)
        elif tensor.numel() > 1 and is_there:
            probe.follows = True
            arrivals.keep(probe, _origin(call, tensor, None), tensor, parts, detached=True)
            arrivals.join(probe)
    elif call.op == "all_reduce":
        context = _function_context()
        origin = replace(
            _origin(call, tensor, context),
            reduction=call.reduction,
            of_input=context is not None and list(tensor.shape) in _shapes_given(context),
        )
        node = tensor.grad_fn if context is None else context
        if node is not None:
            keep_reduced(probe, tensor, node, origin)
        elif call.after is not None and not (call.parameter or call.weights):
            _note_alias(probe, tensor, call.after, origin)


def _note_alias(probe: Probe, tensor: torch.Tensor, left: float, origin: Gathered) -> None:
    """The same through ``.data``, which autograd does not see either."""
    changed = aliases.with_gradient(tensor)
    if changed is not None:
        since = aliases.number_of_next_node()
        keep_reduced(probe, changed, changed.grad_fn, origin, (left, since))


def keep_reduced(
    probe: Probe,
    result: torch.Tensor,
    node: Any,
    origin: Gathered,
    through_data: tuple[float, int] | None = None,
) -> None:
    """Remember a sum over ranks until the next step; for `through_data` see `Reduced`."""
    value = result.detach() if result.numel() <= _SMALL else None
    held = result if origin.differentiable else None
    known = probe.reduced_in_place
    known.append(Reduced(weakref.ref(result), value, mark_of(node), origin, held, through_data))
    for earlier in known[:-_HELD]:
        earlier.held = None
    del known[:-_MOST]


def note_exchange(
    probe: Probe,
    call: Collective,
    sent: list[torch.Tensor],
    received: list[torch.Tensor],
    *,
    is_there: bool,
) -> None:
    """Rows came from other ranks, and rows of this one went to them."""
    context = _function_context()
    with_gradient = [t for t in sent if t.requires_grad and torch.is_grad_enabled()]
    if call.in_backward or not (sent and received) or (context is None and not with_gradient):
        return
    taint(probe, call, sent[0], received, context, is_there=is_there)


def taint(
    probe: Probe,
    call: Collective,
    rows: torch.Tensor,
    outputs: list[torch.Tensor],
    context: Any,
    *,
    adjoint: bool = False,
    is_there: bool = True,
) -> None:
    """Remember that `outputs` hold rows of other ranks, which have been sent what `rows` are like.

    `context` is that of the autograd Function that communicates, if it is one; with `adjoint` it is
    torch's own, whose backward is known to add up. With ``is_there=False`` they are under way.
    """
    probe.follows = True
    arrivals.join(probe)
    origin = replace(_origin(call, rows, context), adjoint=adjoint)
    arrivals.keep(probe, origin, rows, outputs, is_there=is_there)
    if context is not None:
        probe.gather_nodes.append((mark_of(context), origin))
        del probe.gather_nodes[:-_MOST]


def _origin(call: Collective, rows: torch.Tensor, context: Any) -> Gathered:
    return Gathered(call.op, call.where, len(call.group), list(rows.shape), context is not None)


def _shapes_given(context: Any) -> list[list[int]]:
    """Of what an autograd Function was given and that has a gradient."""
    found = []
    for node, place in getattr(context, "next_functions", ()):
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(list(variable.shape))
        elif node is not None:
            found.append(list(node._input_metadata[place].shape))
    return found


def _function_context() -> Any:
    """The context of the autograd Function whose forward is on the stack, or None.

    It is also the node that stands for it in the graph: where there is one, and not under no_grad.
    """
    for frame in itertools.islice(outwards(sys._getframe(2)), _FRAMES):
        code = frame.f_code
        of_function = code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
        if of_function and not looks_at_its_locals(frame):
            context = frame.f_locals.get("ctx")
            return context if getattr(context, "next_functions", True) else None
    return None


def describe(probe: Probe, record: Backward, root: torch.Tensor, weight: float) -> None:
    """Write down which of what was communicated is in the graph of `root`."""
    if not (probe.arrivals or probe.gather_nodes or probe.reduced_in_place):
        return
    graph = Graph(root.grad_fn)
    scaled = passed_back.before_functions(graph.nodes) if probe.reduced_in_place else set()
    for reduced in probe.reduced_in_place:
        node, result = graph.find(reduced.mark), reduced.result()
        if node is None:
            continue
        fact = replace(reduced.origin, weight=weight_at(root, node, weight))
        if reduced.through_data is not None:
            tensor = reduced.value if result is None else result
            if tensor is not None:
                fact.alias = aliases.facts_of(tensor, node, graph.nodes, *reduced.through_data)
            if fact.alias is None:
                continue
        record.gathered.append(fact)
        if node not in scaled and result is not None:
            probe.harmlessly(passed_back.watch, probe, result, node, fact)
    for mark, origin in probe.gather_nodes:
        if origin.op == "all_gather" and (node := graph.find(mark)) is not None:
            probe.harmlessly(passed_back.watch_gather, probe, node, origin)
    record.gathered.extend(_gathered_in(probe, graph))


def _gathered_in(probe: Probe, graph: Graph) -> list[Gathered]:
    """Whose rows the graph holds: by an operation that brought them, or by what it was given."""
    told = [origin for mark, origin in probe.gather_nodes if graph.find(mark) is not None]
    found = {id(origin): origin for origin in [*told, *arrivals.found_in(probe, graph)]}
    return list(found.values())
