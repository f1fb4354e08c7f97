# SPDX-License-Identifier: Apache-2.0
"""The state that the hooks in torch share.

One probe per process. Everything it puts into torch is in `Patches` and is taken out by `stop`.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep.audit.facts import ReducerUse
from lockstep.audit.ledger import FIRST_STEPS, FIRST_STEPS_WATCH, Ledger
from lockstep.audit.probe.names import held_by
from lockstep.audit.probe.patches import Patches
from lockstep.audit.probe.records import Evaluated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.audit.facts import (
        Backward,
        Clip,
        Collective,
        Draws,
        Forward,
        Gathered,
        Loading,
        Mode,
        Step,
        Track,
    )
    from lockstep.audit.finding import Place
    from lockstep.audit.probe.graphs import Mark
    from lockstep.audit.probe.records import (
        Arrival,
        KeptBuffers,
        Known,
        Reduced,
        Schedule,
    )


_kept: list[Any] = []
_UNSEEN: Final = 8
_LOSSES: Final = 8
"""So many that a GradScaler has multiplied are known, the last ones."""


@dataclass
class TrainersRun:
    """What lockstep's own trainer knows of the run that is watched.

    Attributes:
        synchronised: by lockstep, and not by a wrapper of the user's own.
        shares_out: lockstep gives each rank its part of the data.
        first_step: the optimizer steps that the run has behind it.
        rarest: at least every so many steps are looked at.
        modules: those whose names count.
        optimizers: those that will step.
        thread: who runs the worker; rank 0 may live in the user's process.
    """

    rank: int
    world_size: int
    synchronised: bool
    shares_out: bool
    first_step: int
    rarest: int
    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)


class Wrapper:
    """One DistributedDataParallel: what it knows, and whether its reducer is armed."""

    def __init__(self, module: Any, key: str) -> None:
        self.ref = weakref.ref(module)
        self.key = key
        self.ranks = dist.get_process_group_ranks(module.process_group)
        held = dict(held_by(module.module))
        left_out = getattr(module, "parameters_to_ignore", ())
        self.known = {id(p) for name, p in held.items() if p.requires_grad and name not in left_out}
        self.ignored = {id(p) for name, p in held.items() if name in left_out}
        self.is_armed = False
        self.was_unsynced = False
        self.joins = False

    def issued(self) -> int:
        """How many collectives its group has seen, C++'s own included."""
        # Not kept: a group closes when the last reference to it is gone.
        module = self.ref()
        return -1 if module is None else sequence_number(module.process_group)

    def use(self, issued_before: int) -> ReducerUse:
        """How it took part in a backward."""
        return ReducerUse(
            armed=self.is_armed,
            no_sync=self.was_unsynced,
            issued=self.issued() - issued_before,
            group=len(self.ranks),
        )


def default_group() -> Any:
    """This process's, or the one that it was forked with; None if there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def sequence_number(group: Any) -> int:
    """The group's count of collectives; -1 where its backend does not keep one."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return -1


class Watched:
    """One optimizer, its track in the ledger and the step that is under way.

    Attributes:
        began: so many steps it had taken when it came to hold these parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, track: Track, began: int = 0) -> None:
        self.ref = weakref.ref(optimizer)
        self.track = track
        self.began = began
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.counts = [p.samples for p in track.parameters]
        self.held = sum(math.prod(p.shape) for p in track.parameters)
        self.names = {
            id(p): d.name for p, d in zip(self.parameters, track.parameters, strict=False)
        }
        self.parts_sent: set[int] = set()
        self.step: Step | None = None
        self.next_is_detailed = True
        self.looks_beside = False
        self.frozen: list[weakref.ref[torch.Tensor]] = []
        self.messages_before = self.broadcasts_before = 0
        self.fewest_messages: int | None = None
        self._put_back: Callable[[], None] | None = None

    @property
    def taken(self) -> int:
        """How many steps it has taken with these parameters."""
        return self.track.count - self.began

    def look_behind_hooks(self, look: Callable[[Any], None]) -> None:
        """Call `look` with the optimizer when the last of its own hooks before a step has run.

        In that hook's place, and not in one more: a hook may take itself off while it runs, which
        a dictionary bears only where nothing comes after it.
        """
        optimizer = self.ref()
        assert optimizer is not None
        hooks = optimizer._optimizer_step_pre_hooks
        key, theirs = list(hooks.items())[-1]

        def with_a_look(one: Any, args: Any, kwargs: Any) -> Any:
            result = theirs(one, args, kwargs)
            look(one)
            return result

        def put_back() -> None:
            if hooks.get(key) is with_a_look:
                hooks[key] = theirs

        hooks[key] = with_a_look
        self._put_back = put_back

    def look_no_more(self) -> None:
        """Put the optimizer's own hook back, if `look_behind_hooks` has taken its place."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does the optimizer still hold the same parameters?"""
        held = [p for g in optimizer.param_groups for p in g["params"]]
        return len(held) == len(self.parameters) and all(map(is_, held, self.parameters))


class Window:
    """What happened since an optimizer's last step."""

    def __init__(self) -> None:
        self.backwards: list[Backward] = []
        self.collectives: list[Collective] = []
        self.clips: list[Clip] = []
        self.bypasses: list[list[Place]] = []
        self.inputs: list[Forward] = []
        self.fed: int | None = None
        self.fed_shapes: list[list[int]] = []
        self.fed_rows: list[int] = []
        self.draws: dict[Place, Draws] = {}
        self.drawn = 0
        self.has_called = False
        self.has_forward = False
        self.acting: tuple[weakref.ref[torch.nn.Module], list[Place]] | None = None
        self.mode: Mode | None = None
        self.frozen: list[tuple[weakref.ref[torch.nn.Module], list[Place]]] = []

    LIMIT = 400
    """Of each kind: an unbounded window (no optimizer ever steps) must not fill the memory."""

    def copied(self) -> Window:
        """The same, to which other things can happen."""
        same = Window()
        vars(same).update(
            {n: copy.copy(x) if isinstance(x, list | dict) else x for n, x in vars(self).items()}
        )
        return same


class Probe:
    """The state that hooks share, in one process.

    Args:
        mode: ``full`` or ``watch``.
        steps: watch so many optimizer steps, or None for all.
        when_done: called once when `steps` are in.
        keeps_groups: process groups live until the process ends. A script's last reference to a
            group may go with its wrapper, under the interpreter's lock, while a thread of the group
            waits for that lock to let go of a tensor: torch then hangs, with or without us, and
            what we do in between makes it more likely.
        run: what a trainer knows of the run and need not be found out.
    """

    messages = broadcasts = 0
    """How many of either this rank has taken part in; see `lockstep.audit.probe.meetings`."""
    inherited: Any = None
    """The default process group of the process that this one was forked from, if any: whoever
    computes something beside a rank has its group, and is none of its members."""
    scale: float | None = None
    """What losses were multiplied by, while a GradScaler steps."""
    given: bool | None = None
    """Was the first module with something to train that was called since `delivered` gave a batch
    called for gradients? None: none was called."""

    def __init__(
        self,
        mode: str = "full",
        steps: int | None = None,
        when_done: Callable[[], None] | None = None,
        keeps_groups: bool = False,
        run: TrainersRun | None = None,
    ) -> None:
        self.mode = mode
        self.run = run
        self.first = FIRST_STEPS if mode == "full" else FIRST_STEPS_WATCH
        self.limit = steps
        self.when_done = when_done
        self.keeps_groups = keeps_groups
        self.patches = Patches()
        self.following = Patches()
        self.drawing = Patches()
        self.ledger = Ledger(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )
        self.wrappers: list[Wrapper] = []
        self.owned: dict[int, weakref.ref[Any]] = {}
        self.windows: weakref.WeakKeyDictionary[Any, Window] = weakref.WeakKeyDictionary()
        self.recent = Window()
        self.is_frozen: dict[int, Known] = {}
        self.unnamed: list[tuple[Collective, weakref.ref[torch.Tensor]]] = []
        self.arrivals: list[Arrival] = []
        self.gather_nodes: list[tuple[Mark, Gathered]] = []
        self.received: list[tuple[Collective, weakref.ref[torch.Tensor]]] = []
        self.has_sent = self.follows = False
        self.reduced_in_place: list[Reduced] = []
        self.passing_back = ExitStack()
        self.scatters = False
        self.depth = threading.local()
        self.optimizers: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()
        self.made: list[weakref.ref[Any]] = []
        self.made_waiting: list[weakref.ref[Any]] = []
        self.made_at: dict[int, list[Place]] = {}
        self.schedules: list[Schedule] = []
        self.in_backward = False
        self.scaled: deque[tuple[weakref.ref[torch.Tensor], float]] = deque(maxlen=_LOSSES)
        self.living: list[weakref.ref[torch.nn.Module]] = []
        self.step_hooks: tuple[Any, ...] = ()
        self.gradient_names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self.loaders_seen = 0
        self.known_loaders: weakref.WeakKeyDictionary[Any, Loading] = weakref.WeakKeyDictionary()
        self.loading: weakref.WeakKeyDictionary[Any, Loading] = weakref.WeakKeyDictionary()
        self.worker_memory: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.delivered: Loading | None = None
        self.stepping: list[int] = []
        self.steps_done = 0
        self.evaluated = Evaluated()
        self.buffers_used: dict[int, KeptBuffers] = {}
        self.detailed = True
        self.compiles = False
        self.forward_hook: Callable[[], None] | None = None
        self.is_on = False
        self.store: Any = None
        self.when_training: Callable[[], None] | None = None
        self._trained_in = 0

    def inside(self, name: str) -> int:
        """How many calls of that kind are on this thread's stack."""
        return int(getattr(self.depth, name, 0))

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Counts as a call of that kind for `inside`, for as long as it runs."""
        setattr(self.depth, name, self.inside(name) + 1)
        try:
            yield
        finally:
            setattr(self.depth, name, self.inside(name) - 1)

    def living_modules(self) -> list[torch.nn.Module]:
        """Those of the modules that were found last that are still there."""
        return [module for reference in self.living if (module := reference()) is not None]

    def each_window(self) -> list[Window]:
        """The windows of all optimizers, and the one that a new optimizer will begin with."""
        return [self.recent, *self.windows.values()]

    def remember(self, kind: str, thing: Any, limit: int = Window.LIMIT) -> None:
        """Keep it in what happened since each optimizer's step: so many of a kind."""
        for window in self.each_window():
            held: list[Any] = getattr(window, kind)
            if len(held) < limit:
                held.append(thing)

    def parameters_held(self) -> set[int]:
        """By ``id``: what an optimizer holds that was made, or has stepped."""
        known = [r() for r in self.made] + [w.ref() for w in self.optimizers.values()]
        return {id(p) for o in known if o is not None for g in o.param_groups for p in g["params"]}

    def wrapper_of(self, param: torch.Tensor) -> Wrapper | None:
        """The wrapper that reduces this parameter."""
        for wrapper in self.wrappers:
            if id(param) in wrapper.known and wrapper.ref() is not None:
                return wrapper
        return None

    def look(self, closely: bool) -> None:
        """From now on what happens is written down, or is not.

        The hook on module calls is the only one that costs something where it does nothing.
        """
        self.detailed = closely
        if self.forward_hook is not None:
            self.forward_hook()

    def have_enough(self) -> None:
        """The steps that were asked for are in: nothing is looked at any more.

        The hooks stay. This is called from one of them, and torch goes through them meanwhile.
        """
        self.is_on = False
        self.look(closely=False)
        self.drawing.undo()
        self.forget_gathered()
        self.windows.clear()
        self.recent = Window()
        done, self.when_done = self.when_done, None
        if done is not None:
            done()

    def afterwards(self, look: Callable[..., None]) -> Callable[..., Any]:
        """For `Patches.wrap`: call the original, then ``look(probe, result, args, kwargs)``."""

        def watch(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.harmlessly(look, self, result, args, kwargs)
            return result

        return watch

    def harmlessly(self, look: Callable[..., Any], *args: Any) -> Any:
        """``look(*args)``; what it raises is ours, and not the program's to deal with."""
        try:
            return look(*args)
        except Exception as error:
            unseen = self.ledger.facts.unseen
            if len(unseen) < _UNSEEN:
                unseen.append(f"{look.__name__}: {type(error).__name__}: {error}"[:300])
            return None

    def is_elsewhere(self) -> bool:
        """Is this another thread than the one that a trainer's worker runs in?"""
        return self.run is not None and self.run.thread != threading.get_ident()

    def count_backward(self) -> None:
        """One more; `when_training` is called with the first in each process, which may fork."""
        facts = self.ledger.facts
        facts.backwards += 1
        if self.when_training is not None and self._trained_in != os.getpid():
            self._trained_in = os.getpid()
            self.harmlessly(self.when_training)

    @property
    def trains_on(self) -> Loading | None:
        """What batches are read from; None if they are made by hand, or evaluated."""
        return None if self.given is False else self.delivered

    def sync_of_lockstep(self) -> bool:
        """Does one of lockstep's own ways to synchronise weigh the gradients of this process?"""
        if self.run is not None:
            return self.run.synchronised
        guard = sys.modules.get("lockstep.sync.optimizer_guard")
        return guard is not None and len(guard._registry._owners) > 0

    def forget_gathered(self) -> None:
        """A step was taken: what was gathered for it is no longer of interest."""
        self.following.undo()
        self.arrivals.clear()
        self.gather_nodes.clear()
        self.received.clear()
        self.has_sent = False
        self.reduced_in_place.clear()
        self.unnamed.clear()

    def keep_group(self, group: Any) -> None:
        """Let no wrapper be the last to hold `group`; see `keeps_groups`."""
        if self.keeps_groups and not any(group is known for known in _kept):
            _kept.append(group)

    def note_group(self) -> None:
        """A default process group exists: its rank is the one that counts."""
        if self.run is not None:
            self.ledger.started_group = True
            self.ledger.rank, self.ledger.world_size = self.run.rank, self.run.world_size
        elif dist.is_initialized() and dist.group.WORLD is not self.inherited:
            self.ledger.started_group = True
            self.ledger.rank = dist.get_rank()
            self.ledger.world_size = dist.get_world_size()
            self.keep_group(dist.group.WORLD)
            if self.store is None:
                self.store = dist.distributed_c10d._get_default_store()

    def pause(self) -> None:
        """Take everything out, and remember what was seen: `hook_in` goes on."""
        self.is_on = False
        self.forward_hook = None
        for watched in list(self.optimizers.values()):
            watched.look_no_more()
        self.drawing.undo()
        self.patches.undo()
        self.forget_gathered()

    def stop(self) -> Ledger:
        """Take everything out. The second call changes nothing."""
        self.pause()
        self.windows.clear()
        self.optimizers.clear()
        return self.ledger
