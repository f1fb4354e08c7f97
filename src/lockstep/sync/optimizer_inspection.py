# SPDX-License-Identifier: Apache-2.0
"""What an optimizer object holds: parameters, a state, attributes of its own, other optimizers."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import AMP_SCALING_ATTR, WAS_STEPPED_ATTR, is_step_wrapper
from lockstep.local_rows import LocalRows
from lockstep.sync.optimizer_step_patch import LoadElsewhere
from lockstep.tensor_copies import is_shard
from lockstep.tensor_tree import leaves_with_path, tree_map_with_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch.optim import Optimizer

    from lockstep.tensor_tree import KeyPath

_ATTRIBUTES_OF_STEPPING: Final = frozenset(
    {"step", "state_dict", "load_state_dict", AMP_SCALING_ATTR}
    | {WAS_STEPPED_ATTR, "grad_scale", "found_inf"}
)


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in all groups of `optimizer`, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def share_parameters(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers hold a parameter that is the same tensor."""
    own = set(map(id, optimizer_parameters(one)))
    return any(id(parameter) in own for parameter in optimizer_parameters(other))


def is_step_running(optimizers: Iterable[Optimizer]) -> bool:
    """Whether the `step` of one of `optimizers` is being called.

    Of a `step` that torch has hooked the function within the hooks counts: the hooks of the first
    one run before it. Methods that call `step` (``step_and_clear``) are none.

    Torch calls no hook after a step that has raised, which a loop may catch and call again.
    """
    steps = [(each, step) for each in optimizers for step in _hooked_steps(type(each))]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if any(_is_part_of(code, step) and _is_called_on(one, frame, step) for one, step in steps):
            return True
        frame = frame.f_back
    return False


def _hooked_steps(kind: type[Optimizer]) -> list[CodeType]:
    """The functions within the hooks that torch has put around the `step` of `kind` and its bases.

    Torch does so when the first optimizer of a class is made.
    """
    own: list[Any] = [vars(base).get("step") for base in kind.__mro__]
    found = [inspect.unwrap(step) for step in own if any(map(is_step_wrapper, _chain(step)))]
    return [step.__code__ for step in found if hasattr(step, "__code__")]


def _chain(step: Any) -> Iterator[Any]:
    """`step` and what it wraps: a program may put a wrapper of its own around torch's."""
    while step is not None:
        yield step
        step = getattr(step, "__wrapped__", None)


def _is_part_of(code: CodeType, step: CodeType) -> bool:
    """Whether `code` is that of `step`, or what torch.compile has made of it or of a part of it."""
    if code is step:
        return True
    is_resumed = code.co_name.startswith(f"torch_dynamo_resume_in_{step.co_name}_at_")
    if code.co_filename != step.co_filename or not (is_resumed or code.co_name == step.co_name):
        return False
    last = max(line or 0 for _, _, line in step.co_lines())
    return step.co_firstlineno <= code.co_firstlineno <= last


def _is_called_on(optimizer: Optimizer, frame: FrameType, step: CodeType) -> bool:
    first = frame.f_locals.get(step.co_varnames[0]) if step.co_varnames else None
    return optimizer is (first[0] if isinstance(first, tuple) and first else first)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that `optimizer` holds as attributes of its own, to step its parameters.

    SAM and Lookahead hold one. Its state need not be in their ``state_dict``.
    """
    found, waiting = [optimizer], [optimizer]
    while waiting:
        for each in _held_by(waiting.pop()):
            if not any(each is known for known in found) and share_parameters(optimizer, each):
                found.append(each)
                waiting.append(each)
    return found[1:]


def _held_by(optimizer: Optimizer) -> list[Optimizer]:
    held: list[Any] = []
    for value in own_attributes(optimizer).values():
        items = [*value.values()] if isinstance(value, dict) else value
        held += items if isinstance(items, list | tuple) else [items]
    return [each for each in held if isinstance(each, torch.optim.Optimizer)]


def optimizers_with_state(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """`optimizers`, and behind them those within them that have a state of their own."""
    found = list(optimizers)
    for each in [inner for optimizer in found for inner in inner_optimizers(optimizer)]:
        if not any(each is known or each.state is known.state for known in found):
            found.append(each)
    return found


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that `optimizer` keeps for each of its parameters (momenta, step counts)."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = (value for state in states for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that only this kind of optimizer has; its copies and pickles lack them."""
    skipped = _attributes_of_every_optimizer() | _ATTRIBUTES_OF_STEPPING
    return {name: value for name, value in vars(optimizer).items() if name not in skipped}


@cache
def _attributes_of_every_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros((), device="cpu")])))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step evaluates the loss itself, maybe several times (LBFGS)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def evaluates_closure_first(optimizer: Optimizer) -> bool:
    """Whether a step evaluates its closure once, before all else: one that is torch's own does.

    Of any other class's step nobody can tell: SAM evaluates it again, in the midst of the step.
    """
    own = type(optimizer).step.__module__.startswith("torch.optim.")
    return own and not needs_closure(optimizer)


def given_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The closure among these arguments of an optimizer's hook; None: the step has none."""
    # Bound methods of a patched `step` pass the optimizer itself as the first argument.
    positional = [each for each in args[:2] if not isinstance(each, torch.optim.Optimizer)]
    found = kwargs.get("closure") or (positional[0] if positional else None)
    return found if callable(found) else None  # an optimizer may take something else


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[..., Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """These arguments of an optimizer's hook, with another closure in the place of the given."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    position = int(isinstance(args[0], torch.optim.Optimizer))
    return (*args[:position], closure, *args[position + 1 :]), kwargs


def load_state(stepper: Any, state: Mapping[str, Any], *, of_same_weights: bool = True) -> None:
    """``stepper.load_state_dict(state)``; an optimizer keeps the very `param_groups` it had.

    torch puts new ones in their place. A user who has kept ``optimizer.param_groups[0]`` to set
    the learning rate by hand would from then on set that of a group which no step reads. So would
    a scheduler of a wrapper that shares its groups with the optimizer within it.

    torch also rounds a state to the dtype of its parameter: a float32 copy of bfloat16 weights
    would not be what it was.

    Args:
        stepper: an optimizer, a scheduler or a GradScaler.
        state: of its ``state_dict``; an optimizer keeps its tensors.
        of_same_weights: whether the parameters had the dtypes that they have now; if so, each
            tensor keeps the dtype that it has in `state`.
    """
    if not isinstance(stepper, torch.optim.Optimizer):
        if state:  # that of a GradScaler that was not enabled is empty, and one that is refuses it
            stepper.load_state_dict(state)
        return
    inner = inner_optimizers(stepper)
    sharing = [each for each in inner if each.state is stepper.state]
    held = [(each, each.param_groups) for each in (stepper, *inner)]
    elsewhere = vars(stepper).get("load_state_dict")
    if isinstance(elsewhere, LoadElsewhere):
        elsewhere.load(dict(state), of_same_weights=of_same_weights)
    else:
        stepper.load_state_dict(dict(state))
    for optimizer, groups in held:
        for group, settings in zip(groups, optimizer.param_groups, strict=True):
            if group is not settings:
                group.clear()
                group.update(settings)
        optimizer.param_groups = groups
    is_torchs = type(stepper).load_state_dict is torch.optim.Optimizer.load_state_dict
    if of_same_weights and is_torchs and not isinstance(elsewhere, LoadElsewhere):
        _restore_dtypes(stepper, state)
    for optimizer in sharing:
        optimizer.state = stepper.state


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Let the tensors that were loaded from `state` have the dtypes, and all the bits, of there."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, optimizer_parameters(optimizer), strict=True):
        held = optimizer.state.get(param, {})
        saved = dict(leaves_with_path(state["state"].get(number, {})))
        held.update(_in_saved_dtypes(held, saved))


def _in_saved_dtypes(held: dict[str, Any], saved: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The state of one parameter that torch has loaded, in the dtypes that it has in `saved`."""

    def restore(path: KeyPath, now: Any) -> Any:
        value: Any = saved.get(path)
        rows = value.rows if isinstance(value, LocalRows) else value
        are_tensors = isinstance(now, torch.Tensor) and isinstance(rows, torch.Tensor)
        if not are_tensors or now.dtype == rows.dtype:
            return now
        return _shard_like(value, now) if is_shard(now) else rows.to(now.device)

    restored: dict[str, Any] = tree_map_with_path(restore, held)
    return restored


def _shard_like(value: torch.Tensor | LocalRows, shard: Any) -> torch.Tensor:
    from lockstep.sync.parameter_shards import shard_like  # its import takes long

    return shard_like(value, shard)
