# SPDX-License-Identifier: Apache-2.0
"""The collectives that Python calls: in which order, on which gradient, at which line.

What DistributedDataParallel issues from C++ does not pass here; its group's sequence number
tells of it (`lockstep.audit.probe.probe.Wrapper`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep.audit.facts import Collective
from lockstep.audit.ledger import ADDING_UP, REDUCING, SCATTERING, WITHOUT_NUMBERS
from lockstep.audit.probe import gathers, handed_on, meetings, models_sent, scattered
from lockstep.audit.probe.frames import is_called_by, lines_through_a_library
from lockstep.audit.probe.optimizers import watch_made
from lockstep.audit.probe.probe import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_OTHERS: Final = ("broadcast", "gather", "recv", "scatter", "send")
NAMES: Final = sorted({*ADDING_UP, *WITHOUT_NUMBERS, *gathers.GATHERS, *handed_on.SWAPS, *_OTHERS})
_OWN: Final = {
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_to_all_single": "output",
    "reduce_scatter": "output",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
}
"""What a rank's own tensor is called, where it is not ``tensor``."""

_KEPT: Final = 64


def install(probe: Probe) -> None:
    """Watch the functions of ``torch.distributed``, and the start of process groups."""
    modules = (dist.distributed_c10d, dist)
    for name in NAMES:
        probe.patches.wrap_in_each(modules, name, functools.partial(_watch, probe, name))
    note_start = probe.afterwards(lambda *_: probe.note_group())
    probe.patches.wrap_in_each(modules, "init_process_group", note_start)
    probe.patches.wrap_in_each(modules, "new_group", probe.afterwards(_note_subgroup))


def _note_subgroup(probe: Probe, _: Any, args: Any, kwargs: Any) -> None:
    ranks = args[0] if args else kwargs.get("ranks")
    probe.ledger.facts.subgroups.append(None if ranks is None else [int(rank) for rank in ranks])


@functools.cache
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _watch(
    probe: Probe, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not probe.is_on or probe.inside("collective") or probe.is_elsewhere():
        return original(*args, **kwargs)
    given = {**dict(zip(_names_of(original), args, strict=False)), **kwargs}
    tensor = _own_tensor(name, given)
    meetings.note_message(probe, name, tensor)
    if not probe.detailed and probe.mode == "watch":
        return original(*args, **kwargs)  # nobody asks a watch where a rank stands
    if tensor is not None and name in models_sent.TELLING and not probe.in_backward:
        probe.harmlessly(models_sent.note, probe, name, tensor)
    call = Collective(name, lines_through_a_library(), ranks_of(given.get("group")))
    call.in_backward = probe.in_backward
    probe.harmlessly(note_call, probe, call)
    if name in handed_on.SWAPS and not probe.in_backward:
        probe.ledger.facts.all_to_all = True
    if probe.detailed and tensor is not None:
        probe.harmlessly(_before, probe, call, tensor, given)
    probe.ledger.stuck_in = call
    with probe.counted("collective"):
        result = original(*args, **kwargs)
    # One that raised is left there, until the rank gets through another one.
    probe.ledger.stuck_in = None
    if probe.detailed and tensor is not None:
        probe.harmlessly(_after, probe, call, tensor, result, given)
    elif probe.detailed and name == handed_on.OBJECTS:
        probe.harmlessly(handed_on.note_objects, probe, call, given)
    elif probe.detailed and name in handed_on.SWAPS:
        probe.harmlessly(handed_on.note_swap, probe, call, given)
    return result


def _own_tensor(name: str, given: dict[str, Any]) -> torch.Tensor | None:
    tensor = given.get(_OWN.get(name, "tensor"))
    return tensor if isinstance(tensor, torch.Tensor) else None


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group; None: of all."""
    try:
        return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return []


def note_call(probe: Probe, call: Collective) -> None:
    """Keep it among the last calls, and in what happened since each optimizer's step."""
    ledger = probe.ledger
    ledger.calls_made += 1
    ledger.calls.append(call)
    if len(ledger.calls) > _KEPT:
        del ledger.calls[0]
    if "gather" in call.op and "accelerate" in sys.modules and is_called_by("gather_for_metrics"):
        ledger.facts.leaves_out_padding = True
    if probe.detailed:
        probe.remember("collectives", call)


def _before(probe: Probe, call: Collective, tensor: torch.Tensor, given: dict[str, Any]) -> None:
    call.shape = list(tensor.shape)
    if call.op in REDUCING:
        call.reduction = _reduction_name(given.get("op"))
        call.parameter = _named_gradient(probe, tensor)
        call.weights = _parameter_name(probe, tensor) if call.parameter is None else None
        if call.parameter is None and len(probe.unnamed) < Window.LIMIT:
            probe.unnamed.append((call, weakref.ref(tensor)))
        call.before = _size(tensor)
    elif call.op == "broadcast":
        call.weights = _parameter_name(probe, tensor)
    elif call.op in SCATTERING:
        call.reduction = _reduction_name(given.get("op"))
        scattered.note_given(probe, call, given)


def _after(
    probe: Probe, call: Collective, tensor: torch.Tensor, result: Any, given: dict[str, Any]
) -> None:
    if call.op in SCATTERING:
        scattered.note_received(call, result, given)
    elif call.before is not None and result is None:
        call.after = _size(tensor)
    if call.op in gathers.GATHERS:
        _note_piece(probe, tensor)
        if tensor.numel() == 1 and result is None and not tensor.is_complex():
            arrived = given.get("tensor_list", given.get("output_tensor"))
            call.before, call.after = float(tensor.detach()), _sum_of(arrived)
    if call.op == "broadcast":
        handed_on.note_broadcast(probe, call, tensor, given)
    elif call.op in handed_on.SWAPS:
        handed_on.note_swap(probe, call, given)
    else:
        gathers.note(probe, call, tensor, given)


def _sum_of(numbers: Any) -> float:
    """Of one that each rank has sent, as how many elements it counts."""
    each = numbers if isinstance(numbers, list | tuple) else [numbers]
    return sum(float(number.detach().double().sum()) for number in each)


def _note_piece(probe: Probe, tensor: torch.Tensor) -> None:
    """A parameter of no module whose values are gathered from all ranks: a shard made by hand."""
    for watched in probe.optimizers.values():
        for param, described in zip(watched.parameters, watched.track.parameters, strict=True):
            if not described.in_module and param.data_ptr() == tensor.data_ptr():
                described.sharded = True


def _reduction_name(op: Any) -> str:
    if op is None:
        return "SUM"
    return str(op).rsplit(".", maxsplit=1)[-1].rstrip(">").split(":")[0]


def _size(tensor: torch.Tensor) -> float | None:
    """The value of one number, the norm of more."""
    with torch.no_grad():
        if tensor.is_meta or not tensor.numel():
            return None
        if tensor.numel() == 1:
            return None if tensor.is_complex() else float(tensor)
        return float(tensor.detach().double().norm()) if tensor.is_floating_point() else None


def _named_gradient(probe: Probe, tensor: torch.Tensor) -> str | None:
    """The name of the parameter whose gradient it is, by its memory."""
    pointer = memory_of(tensor)
    held, name = probe.gradient_names.get(pointer, (None, None))
    if held is None or not _has_gradient_at(held(), pointer):
        # Also where it was another one's: memory of the last step's gradients is used again.
        _name_gradients(probe)
        held, name = probe.gradient_names.get(pointer, (None, None))
    param = None if held is None else held()
    return None if param is None or param.shape != tensor.shape else name


def _parameter_name(probe: Probe, tensor: torch.Tensor) -> str | None:
    """Which parameter it is, by its memory."""
    pointer = memory_of(tensor)
    for watched in probe.optimizers.values():
        for param, described in zip(watched.parameters, watched.track.parameters, strict=True):
            if hasattr(param, "to_local"):
                continue  # a piece: what is communicated lies elsewhere
            # The size first: it is known without a look at the memory.
            if param.shape == tensor.shape and param.data_ptr() == pointer:
                return described.name
    return None


def memory_of(tensor: torch.Tensor) -> int:
    """Where its elements are; a sparse tensor has several places, and stands for itself."""
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def _has_gradient_at(param: torch.Tensor | None, pointer: int) -> bool:
    return param is not None and param.grad is not None and memory_of(param.grad) == pointer


def _name_gradients(probe: Probe) -> None:
    probe.gradient_names.clear()
    watch_made(probe)
    for watched in probe.optimizers.values():
        for param, described in zip(watched.parameters, watched.track.parameters, strict=True):
            if param.grad is not None and not hasattr(param, "to_local"):
                found = (weakref.ref(param), described.name)
                probe.gradient_names[memory_of(param.grad)] = found
