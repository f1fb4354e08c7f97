# SPDX-License-Identifier: Apache-2.0
"""What optimizers hold, what they consume, and what comes out.

Torch's global hooks run before and after every ``step`` of every ``torch.optim.Optimizer``. Where
the step is given a closure, the gradients that count are those after the closure ran.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.audit.facts import Backward, Step, Track
from lockstep.audit.fingerprint import dense, numpy_state, take
from lockstep.audit.ledger import is_detailed, thin_out
from lockstep.audit.probe import draws, meetings, schedules
from lockstep.audit.probe.arrivals import join
from lockstep.audit.probe.called import prints_of
from lockstep.audit.probe.described import describe
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.fully_sharded import note_kept_back
from lockstep.audit.probe.loss_graph import constant_of
from lockstep.audit.probe.patches import is_recorded
from lockstep.audit.probe.probe import Watched, Window
from lockstep.audit.probe.shards import is_piece
from lockstep.audit.probe.unheld import note_told_within, note_unfrozen, note_unheld
from lockstep.compiler_disable import disable_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.facts import Clip
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.probe.probe import Probe


CLOSELY: Final = 8
"""So many steps are looked at more closely: gradients also after each backward, the optimizer's
state, and norms of parameters."""

_WHOLE_EVERY: Final = 64
"""Of the steps after them in a trainer's run, those in which its state is looked at again."""

KEPT_STEPS: Final = 96
"""Of a run of a trainer's, which has no end that is known."""

_LOADED: Final = 8
"""So many lines that load an optimizer's state are kept."""

_TRACKS: Final = 256
"""Optimizers that are watched: some programs make one in each round."""


def install(probe: Probe) -> None:
    """Watch the construction and the steps of optimizers."""
    if probe.run is not None:
        known = [o for o in probe.run.optimizers if o not in probe.optimizers]
        probe.made_waiting += map(weakref.ref, known)
    if probe.run is None or not probe.run.synchronised:  # else what was made is known
        probe.patches.wrap(Optimizer, "__init__", functools.partial(_construct, probe))
        probe.patches.wrap(Optimizer, "load_state_dict", functools.partial(_load, probe))
        probe.patches.wrap(torch, "compile", functools.partial(_compile, probe))
    _hook(probe)


def _hook(probe: Probe) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_recorded():
            return None
        return probe.harmlessly(_before_step, probe, optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_recorded():
            probe.harmlessly(_after_step, probe, optimizer, args, kwargs)

    if not probe.ledger.facts.fullgraph:
        # Called from compiled steps, too: there the graph breaks and goes on after them.
        before, after = disable_dynamo(before), disable_dynamo(after)
    probe.step_hooks = (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    )
    for handle in probe.step_hooks:
        probe.patches.keep(handle.remove)


def _compile(probe: Probe, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    probe.compiles = True
    probe.drawing.undo()  # else compiled code is compiled once more when they are gone
    probe.look(probe.detailed)
    if kwargs.get("fullgraph") and not probe.ledger.facts.fullgraph:
        # A graph that may not break cannot call us. Steps inside it are not seen.
        probe.ledger.facts.fullgraph = True
        for handle in probe.step_hooks:
            handle.remove()
        _hook(probe)
    return original(*args, **kwargs)


def _construct(
    probe: Probe, original: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any
) -> None:
    original(optimizer, *args, **kwargs)
    for made in (probe.made, probe.made_waiting):
        made.append(weakref.ref(optimizer))
        if len(made) > _TRACKS:
            made[:] = [reference for reference in made if reference() is not None]
    probe.made_at[id(optimizer)] = users_lines()


def _load(probe: Probe, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Where states were loaded: a program has several such lines, and some may never run."""
    lines = probe.ledger.facts.states_loaded
    if probe.is_on and len(lines) < _LOADED:
        lines += users_lines()[:1]
    return original(*args, **kwargs)


def _before_step(probe: Probe, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if probe.is_elsewhere():
        return None
    if id(optimizer) in probe.stepping:
        # Its last step raised, and nobody took it off.
        del probe.stepping[probe.stepping.index(id(optimizer)) :]
    probe.stepping.append(id(optimizer))
    if not probe.is_on or len(probe.stepping) > 1:
        # An optimizer inside an optimizer (ZeRO, wrappers of libraries): the outer one counts.
        return None
    watched = _watch(probe, optimizer)
    if watched is None:
        return None
    if not _is_detailed(probe, watched.taken):
        probe.harmlessly(meetings.before_step, probe, watched)
        return None
    if not probe.detailed:
        return None  # the first step of one that came late: what led to it was not looked at
    step = Step(watched.track.count, users_lines(), inside_backward=probe.in_backward)
    watched.step = step
    watched.look_no_more()
    step.entry = take(watched.parameters, watched.counts, norms=watched.taken < CLOSELY)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if callable(closure):
        step.has_closure = True
        return _with_watched_closure(probe, watched, args, kwargs, closure)
    if not optimizer._optimizer_step_pre_hooks:
        _consume(probe, watched, optimizer)
        return None
    # Hooks of its own come after those of all: they may reduce what the step is to use.
    watched.look_behind_hooks(functools.partial(probe.harmlessly, _consume, probe, watched))
    return None


def _is_detailed(probe: Probe, number: int) -> bool:
    return is_detailed(number, probe.first, probe.run.rarest if probe.run else None)


def _with_watched_closure(
    probe: Probe, watched: Watched, args: Any, kwargs: Any, closure: Callable[..., Any]
) -> tuple[Any, Any]:
    def then_look(*given: Any, **named: Any) -> Any:
        outer, probe.stepping = probe.stepping, []
        try:
            result = closure(*given, **named)
        finally:
            probe.stepping = outer
        optimizer = watched.ref()
        if probe.is_on and optimizer is not None and watched.step is not None:
            probe.harmlessly(_consume, probe, watched, optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_look}
    return (args[0], then_look, *args[2:]), kwargs


def _consume(probe: Probe, watched: Watched, optimizer: Optimizer) -> None:
    """The gradients as the optimizer is about to use them, and how they came to be."""
    step = watched.step
    assert step is not None
    step.gradients = take([p.grad for p in watched.parameters], watched.counts)
    if probe.scale is None:  # else a GradScaler leaves out the step, or has the optimizer do it
        step.not_finite = probe.harmlessly(_not_finite, watched, step.gradients) or []
    step.hyper = probe.harmlessly(_settings, optimizer) or []
    window = probe.windows.get(optimizer) or probe.recent
    probe.harmlessly(_name_late, probe, watched)
    step.backwards = _concerned(window.backwards, watched.track.key)
    step.collectives = list(window.collectives)
    step.clips = [clip for clip in window.clips if _concerns(probe, clip, watched)]
    for clip in step.clips:
        clip.used.append(watched.track.key)
    step.bypasses = list(window.bypasses)
    step.inputs = list(window.inputs)
    step.fed, step.fed_shapes, step.mode = window.fed, window.fed_shapes, window.mode
    step.fed_rows = window.fed_rows
    step.draws = list(window.draws.values())
    if _looks_at_all(probe, watched.taken):
        step.frozen = probe.harmlessly(prints_of, probe, window.frozen) or []
    step.numpy_state = numpy_state()
    if getattr(optimizer, "grad_scale", None) is None:  # else it divides by the scale itself
        step.scale = probe.scale
    probe.harmlessly(note_kept_back, probe, watched, window)
    if watched.taken < CLOSELY:
        probe.harmlessly(note_unheld, probe, watched)
    if watched.frozen:
        probe.harmlessly(note_unfrozen, probe, watched)


def _not_finite(watched: Watched, gradients: Fingerprint) -> list[str]:
    """Looked at element by element only where a norm says so; norms of half precision overflow."""
    found = []
    for place in np.flatnonzero(~np.isfinite(gradients.norms)):
        gradient = watched.parameters[place].grad
        if gradient is not None and not bool(torch.isfinite(dense(gradient)).all()):
            found.append(watched.track.parameters[place].name)
    return found


def _concerns(probe: Probe, clip: Clip, watched: Watched) -> bool:
    """Was it of gradients of this optimizer's, and not all of them used by another one since?

    An outer optimizer that holds what the inner one holds steps with gradients of its own.
    """
    if clip.of and watched.track.key not in clip.of:
        return False
    others = [w for w in probe.optimizers.values() if w is not watched]
    users = [other for other in others if other.track.key in clip.used]
    return not any(watched.names.keys() <= user.names.keys() for user in users)


def _concerned(backwards: list[Backward], key: str) -> list[Backward]:
    """Those that wrote gradients of this optimizer, and not another model's: rank 0's probe."""
    found = [b for b in backwards if b.kind != "backward" or key in b.touched or key in b.local]
    return found if any(key in b.touched or key in b.local for b in found) else list(backwards)


def _looks_at_all(probe: Probe, number: int) -> bool:
    """Also at what may be as large as the model again: the optimizer's state, frozen modules."""
    every = _WHOLE_EVERY if probe.run is not None else CLOSELY
    return number < CLOSELY or number % every == 0


def _name_late(probe: Probe, watched: Watched) -> None:
    """What was reduced before it became a parameter's gradient."""
    places = {
        p.grad.data_ptr(): described.name
        for p, described in zip(watched.parameters, watched.track.parameters, strict=True)
        if p.grad is not None and not hasattr(p, "to_local") and p.grad.layout is torch.strided
    }
    for call, reference in probe.unnamed:
        tensor = reference()
        strided = tensor is not None and tensor.layout is torch.strided
        if tensor is not None and strided and call.parameter is None:
            call.parameter = places.get(tensor.data_ptr())


def _after_step(probe: Probe, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if probe.is_elsewhere():
        return
    if id(optimizer) in probe.stepping:
        del probe.stepping[probe.stepping.index(id(optimizer)) :]
    if not probe.is_on or probe.stepping:
        return
    watched = probe.optimizers.get(optimizer)
    if watched is not None:
        _note_step(probe, optimizer, watched)
        probe.harmlessly(draws.note_step, probe)
    probe.look(_is_next_detailed(probe))
    if probe.follows and probe.detailed:
        # Before the next forward: `torch.cat(gather(model(x)))` looks its function up first.
        join(probe)
    if probe.limit is not None and probe.steps_done >= probe.limit:
        probe.have_enough()


def _note_step(probe: Probe, optimizer: Optimizer, watched: Watched) -> None:
    track, step = watched.track, watched.step
    watched.look_no_more()
    number = watched.taken
    # First of all it is counted: what a program keeps in its optimizer may not be as we expect.
    track.count += 1
    meetings.after_step(probe, watched)
    if step is not None:
        track.steps.append(step)
        if probe.run is not None:
            thin_out(track.steps, KEPT_STEPS)
        probe.harmlessly(_look_after, probe, optimizer, watched, number)
        watched.step = None
    probe.harmlessly(schedules.note_step, probe, optimizer, track)
    watched.next_is_detailed = _is_detailed(probe, watched.taken)
    if step is not None or probe.detailed:
        # Where nothing was written down, nothing has to be forgotten.
        _begin_anew(probe, optimizer)
    probe.steps_done = max(probe.steps_done, track.count)


def _look_after(probe: Probe, optimizer: Optimizer, watched: Watched, number: int) -> None:
    """What the step has left."""
    step = watched.step
    assert step is not None
    step.exit = take(watched.parameters, watched.counts, norms=number < CLOSELY)
    window = probe.windows.get(optimizer) or probe.recent
    probe.harmlessly(note_told_within, watched, window)
    if _looks_at_all(probe, number):
        step.state = probe.harmlessly(_state, optimizer, watched)


def _is_next_detailed(probe: Probe) -> bool:
    """One that was made and does not step counts for as long as the first steps take."""
    waits = probe.steps_done < probe.first
    watched = probe.optimizers.values()
    return any(w.next_is_detailed for w in watched if w.track.count or waits)


def fingerprint_gradients(
    probe: Probe, earlier: Mapping[int, torch.Tensor] | None = None
) -> dict[str, Fingerprint]:
    """Of every optimizer's gradients now, by its track's key; for the first steps only.

    Args:
        earlier: gradients that are out of sight, by the ids of their parameters.
    """
    found = {}
    earlier = earlier or {}
    watch_made(probe)
    for watched in probe.optimizers.values():
        if watched.taken < CLOSELY:
            gradients = [
                earlier.get(id(p)) if p.grad is None else p.grad for p in watched.parameters
            ]
            found[watched.track.key] = take(gradients, watched.counts)
    return found


def _begin_anew(probe: Probe, optimizer: Optimizer) -> None:
    """What happens from here on belongs to this optimizer's next step."""
    for other in probe.optimizers:
        # One that is made and has not stepped yet: this step is not the end of its window.
        if other not in probe.windows:
            probe.windows[other] = probe.recent.copied()
    probe.windows[optimizer] = Window()
    probe.recent = Window()
    probe.forget_gathered()


def gradient_versions(probe: Probe) -> dict[str, list[object]]:
    """By optimizer, what changes when one of its parameters' gradients is written."""
    grads = {w.track.key: [p.grad for p in w.parameters] for w in probe.optimizers.values()}
    return {
        key: [None if g is None else (id(g), g._version) for g in of_one]
        for key, of_one in grads.items()
    }


def watch_made(probe: Probe) -> None:
    """Give a track to optimizers that were made and have not stepped yet."""
    waiting, probe.made_waiting = probe.made_waiting, []
    for reference in waiting:
        optimizer = reference()
        is_made = bool(getattr(optimizer, "param_groups", None))
        if optimizer is not None and optimizer not in probe.optimizers and is_made:
            _watch(probe, optimizer)


def _watch(probe: Probe, optimizer: Optimizer) -> Watched | None:
    """What is known of it; None if there were too many."""
    watched = probe.optimizers.get(optimizer)
    if watched is not None and watched.holds(optimizer):
        return watched
    if watched is None and len(probe.ledger.tracks) >= _TRACKS:
        return None
    probe.note_group()
    if watched is not None:
        # More parameters than before (layers unfrozen): the same optimizer, described anew.
        _keep_apart(probe, watched.track)
        watched.track.parameters = describe(probe, optimizer)
        watched.track.steps, watched.track.meetings = [], []
        fresh = Watched(optimizer, watched.track, began=watched.track.count)
    else:
        kind = type(optimizer).__name__
        same = {t.key_of_all for t in probe.ledger.tracks if t.optimizer == kind}
        track = Track(
            f"{kind}#{len(same)}",
            kind,
            probe.made_at.get(id(optimizer), []),
            parameters=describe(probe, optimizer),
            count=probe.run.first_step if probe.run else 0,
        )
        probe.ledger.tracks.append(track)
        fresh = Watched(optimizer, track)
    probe.optimizers[optimizer] = fresh
    if any(p.is_cpu and p.is_shared() for p in fresh.parameters):  # a device's memory always is
        probe.ledger.facts.shares_memory = True
    return fresh


def _keep_apart(probe: Probe, track: Track) -> None:
    """What an optimizer has done so far, with the parameters that it held, is a track of its own.

    What has happened since its last step is of a step with other parameters.
    """
    if track.steps and len(probe.ledger.tracks) < _TRACKS:
        earlier = replace(track, key=f"{track.key} until step {track.count}")
        for backward in {id(b): b for step in track.steps for b in step.backwards}.values():
            backward.rename(track.key, earlier.key)
        place = next(n for n, known in enumerate(probe.ledger.tracks) if known is track)
        probe.ledger.tracks.insert(place, earlier)
    for window in probe.each_window():
        for backward in window.backwards:
            for of_optimizer in (backward.local, backward.before, backward.gradients):
                of_optimizer.pop(track.key, None)


def _settings(optimizer: Optimizer) -> list[dict[str, float]]:
    return [_numbers(group) for group in optimizer.param_groups]


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    plain = {n: v for n, v in group.items() if n != "params" and not isinstance(v, bool)}
    return {n: number for n, v in plain.items() if (number := constant_of(v)) is not None}


def _state(optimizer: Optimizer, watched: Watched) -> Fingerprint | None:
    tensors, names = [], []
    if getattr(optimizer.state, "is_there", False):
        return None  # a parameter server has it
    for param, described in zip(watched.parameters, watched.track.parameters, strict=True):
        held = optimizer.state.get(param, {})
        # An optimizer of the program's own may keep one tensor, where torch's keep a dictionary.
        named = held if isinstance(held, Mapping) else {"state": held}
        for key, value in sorted(named.items(), key=lambda kv: str(kv[0])):
            # A whole parameter's state may be in pieces: an optimizer that is sharded alone.
            if isinstance(value, torch.Tensor) and not (described.sharded or is_piece(value)):
                tensors.append(value)
                names.append(f"{described.name}.{key}")
    if not tensors:
        return None
    watched.track.state_names = names
    return take(tensors, [0] * len(tensors))
