# SPDX-License-Identifier: Apache-2.0
"""Which wrapper knows which parameters, and which forwards went round it.

The hook on module calls is torch's global one. It says *where* a forward went round a wrapper;
that it did, and that it mattered, the gradients say: a call of ``ddp.module`` is no evidence.
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import maybe_current_level
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.audit.facts import Forward
from lockstep.audit.fingerprint import numpy_state
from lockstep.audit.probe.batches import ROWS, each_row, hash_of, read_on, tensors_in
from lockstep.audit.probe.buffers_used import note_buffers
from lockstep.audit.probe.called import note_acting, note_call
from lockstep.audit.probe.evaluations import note_evaluation
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.fully_sharded import is_root
from lockstep.audit.probe.patches import is_recorded
from lockstep.audit.probe.probe import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_LINES_PER_WINDOW = 8
_STEPS_OF_ROWS = 64
_PARTS = 4
"""Tensors of what a step's first module call was given."""


def install(probe: Probe) -> None:
    """Watch the construction of wrappers, and module calls."""
    probe.patches.wrap(DDP, "__init__", probe.afterwards(_note_wrapper))
    probe.patches.wrap(DDP, "_pre_forward", functools.partial(_before_ddp, probe))
    hook = probe.forward_hook = _ForwardHook(probe)
    if probe.mode != "watch":
        probe.patches.wrap(torch.nn.Module, "train", probe.afterwards(hook.note_mode))
    hook()
    probe.patches.keep(hook.remove)
    # It says that global hooks may fire twice for a compiled module, which is no harm here.
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global")
    probe.patches.keep(functools.partial(_forget_filter, warnings.filters[0]))


class _ForwardHook:
    """Torch's global hook on module calls, where something of them is of interest.

    While there is one, torch takes a longer way through every call of every module.

    Attributes:
        evaluated: modules that were put into evaluation mode, by id: a step that is not looked at
            is of interest for those that still are. Under "watch" nobody notes them.
    """

    def __init__(self, probe: Probe) -> None:
        self.evaluated: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._probe = probe
        self._look = _module_hook(probe)
        self._handle: Any = None

    def __call__(self) -> None:
        """Put it in, or take it out, as what follows asks for.

        A compiled program keeps it, which would be compiled once more without it.
        """
        probe = self._probe
        is_wanted = probe.detailed or probe.compiles or (probe.is_on and self._is_evaluated())
        if is_wanted and self._handle is None:
            self._handle = register_module_forward_pre_hook(self._look)
        elif not is_wanted:
            self.remove()

    def note_mode(self, _: Probe, module: torch.nn.Module, *__: Any) -> None:
        """``module.train(...)`` was called, which returns the module."""
        if not module.training:
            self.evaluated[id(module)] = weakref.ref(module)
            self()

    def _is_evaluated(self) -> bool:
        # The first that still is will do: `eval()` of a model asks once for each of its modules.
        while self.evaluated:
            key, reference = next(iter(self.evaluated.items()))
            module = reference()
            if module is not None and not module.training:
                return True
            self.evaluated.pop(key, None)
        return False

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _forget_filter(entry: Any) -> None:
    if entry in warnings.filters:
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def _note_wrapper(probe: Probe, _: Any, args: Any, __: Any) -> None:
    made = args[0]
    probe.note_group()
    probe.keep_group(made.process_group)
    probe.wrappers.append(Wrapper(made, f"ddp{len(probe.wrappers)}"))
    for module in made.module.modules():
        probe.owned[id(module)] = weakref.ref(module)


def _before_ddp(probe: Probe, begin: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The begin of DDP's forward: the hook on calls is not told what is given by name."""
    if probe.is_on and probe.detailed and torch.is_grad_enabled():
        probe.harmlessly(_note_inputs, probe, (args[1:], kwargs))
    return begin(*args, **kwargs)


def _module_hook(probe: Probe) -> Callable[..., None]:
    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not probe.is_on:
            return
        if not probe.detailed and module.training:
            return  # most of a run's calls: nothing of them is of interest
        if is_recorded():
            return
        if probe.detailed and maybe_current_level() is None:
            # Inside a transform of torch.func tensors have no numbers to read.
            probe.harmlessly(_look_at, probe, module, args)
        if probe.given is None and _has_something_to_train(probe, module):
            probe.given = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            _note_forward(probe, module, args)
        elif not module.training and probe.ledger.started_group:
            probe.harmlessly(note_evaluation, probe, module)

    return before_forward


def _has_something_to_train(probe: Probe, module: torch.nn.Module) -> bool:
    known = probe.is_frozen.get(id(module))
    if known is not None and known.module() is module:
        return known.trained is not None
    return any(p.requires_grad for p in module.parameters())


def _look_at(probe: Probe, module: torch.nn.Module, args: Any) -> None:
    note_call(probe, module)
    if probe.is_frozen[id(module)].trained is not None and torch.is_grad_enabled():
        probe.recent.has_forward = True
    if torch.is_grad_enabled():
        if not probe.recent.has_called or probe.recent.fed is None:
            _note_fed(probe, args)
        note_acting(probe, module)
        if probe.ledger.started_group:
            note_buffers(probe, module)


def _note_forward(probe: Probe, module: torch.nn.Module, args: Any) -> None:
    if isinstance(module, DDP):
        _arm(probe, module)
    elif probe.detailed and is_root(module):
        probe.harmlessly(_note_inputs, probe, args)
    elif DDP._active_ddp_module is None and probe.detailed:
        known = probe.owned.get(id(module))
        if known is not None and known() is module:
            _note_bypass(probe)


def _arm(probe: Probe, module: Any) -> None:
    for wrapper in probe.wrappers:
        held: Any = wrapper.ref()
        if held is module:
            wrapper.is_armed = bool(module.require_backward_grad_sync)
            wrapper.was_unsynced = not wrapper.is_armed
            wrapper.joins |= bool(module._join_config.enable)


def _note_fed(probe: Probe, args: Any) -> None:
    """What a batch's first module call is given: ranks that share one's work have the same.

    Of a step's first batch the whole, and of each of its batches the rows.
    """
    given = tensors_in(args, _PARTS + 1)
    tensors = given[:_PARTS]
    windows = list(probe.each_window())
    if tensors and any(window.fed is None for window in windows):
        fed = hash_of(tensors)
        for window in windows:
            if window.fed is None:
                window.fed = fed
                window.fed_shapes = [list(t.shape) for t in tensors]
    # After a call by names alone, this one's tensors are a part of the batch, and not its rows.
    few = [w for w in windows if not w.has_called and len(w.fed_rows) < ROWS]
    rows = probe.harmlessly(_rows, probe, given) if tensors and few else None
    for window in few:
        if rows and not set(rows) <= set(window.fed_rows):
            window.fed_rows += rows
    for window in windows:
        window.has_called = True


def _rows(probe: Probe, tensors: list[torch.Tensor]) -> list[int]:
    """Of a batch that was made by hand, what stands for each sample; a loader's are known.

    A sample is its row in all tensors that have as many, with all the others as they are: places
    that many samples share are not the samples.
    """
    first = tensors[0]
    if probe.trains_on is not None or probe.steps_done >= _STEPS_OF_ROWS:
        return []
    if first.ndim < 2 or len(tensors) > _PARTS:
        return []
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
            return []
    parts = [t for t in tensors if t.shape[:1] == first.shape[:1]]
    beside = functools.reduce(read_on, [t for t in tensors if t.shape[:1] != first.shape[:1]], 0)
    columns = [each_row(part[:ROWS]) for part in parts]
    return [zlib.crc32(repr(row).encode(), beside) for row in zip(*columns, strict=True)]


def _note_inputs(probe: Probe, args: Any) -> None:
    tensors = tensors_in(args, 4)
    if not tensors:
        return
    noted = Forward(hash_of(tensors), numpy_state(), users_lines())
    noted.shapes = [list(t.shape) for t in tensors]
    probe.remember("inputs", noted, _LINES_PER_WINDOW)


def _note_bypass(probe: Probe) -> None:
    lines = users_lines()
    for window in probe.each_window():
        if len(window.bypasses) < _LINES_PER_WINDOW and lines not in window.bypasses:
            window.bypasses.append(lines)
