# SPDX-License-Identifier: Apache-2.0
"""What hangs on the optimizers of an operator: each step that was taken is followed up.

The hooks sit on the optimizers themselves, so that every loop is followed, the default one, a
user's own and Lightning's; and a step that a GradScaler leaves out is followed by nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError
from lockstep.operator.interface import place
from lockstep.randomness import derive_seed, preserved

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.operator.interface import Operator
    from lockstep.operator.rank_context import Options
    from lockstep.operator.training_parts import TrainingParts


def follow_steps(operator: Operator, run: TrainingParts) -> list[RemovableHandle]:
    """Note each step of the optimizers of `run`, and call the operator's `after_step` after it."""
    state = operator._lockstep

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not state.step.is_stepping:
            _refuse_own_step(operator)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _was_taken(optimizer):
            _follow(operator, optimizer)

    handles = [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]
    if operator._overrides_loop() and of_default_loop(state.context.options):
        handles += [optimizer.register_step_pre_hook(before) for optimizer in run.optimizers]
    return handles


def _was_taken(optimizer: torch.optim.Optimizer) -> bool:
    # A fused optimizer is told of infinities by the scaler, and leaves the step out by itself.
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def _follow(operator: Operator, optimizer: torch.optim.Optimizer) -> None:
    state = operator._lockstep
    number = len(state.step.stepped)
    state.step.stepped.append(optimizer)  # first: the step was taken, also if `after_step` fails
    if operator._overrides("after_step"):
        # The same numbers on every rank: what is drawn goes into weights that ranks share.
        seed = derive_seed(state.context.placement.seed, "after_step", operator.global_step, number)
        with torch.no_grad(), preserved(seed):
            operator.after_step()


# ------------------------------------------------------- what only the default loop can do


OWN_LOOP_LINES: Final = {
    'precision="fp16"': "override compute_loss, or call super().train_batch(); or in your loop"
    " write: with torch.autocast(self.device.type, torch.float16): ..., and"
    " scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(), and leave precision"
    " out of TorchTrainer",
    "reproducible": "override compute_loss instead: only shards that are computed one by one can"
    " be added up in a fixed order",
    "accumulate": "call super().train_batch(), or in your loop write: with self.no_sync():"
    " self.backward(loss) for every batch but the last of a window, and step the optimizer after"
    " that one, and leave accumulate out of TorchTrainer",
    "clip_grad_norm": "call super().train_batch(), or in your loop write, before"
    " optimizer.step(): torch.nn.utils.clip_grad_norm_(model.parameters(), ...), and leave"
    " clip_grad_norm out of TorchTrainer",
}
"""What to write in a loop of one's own instead of an option of the default loop."""


def of_default_loop(options: Options) -> list[str]:
    """The options asked for that only a step of the default loop heeds."""
    wanted = {
        'precision="fp16"': options.precision == "fp16",
        "accumulate": options.accumulate > 1,
        "clip_grad_norm": options.clip_grad_norm is not None,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _refuse_own_step(operator: Operator) -> None:
    name = of_default_loop(operator._lockstep.context.options)[0]
    raise ConfigurationError(
        f"{name} belongs to the default loop, and an optimizer stepped outside of it",
        where=f"{type(operator).__name__}, {place(operator)}",
        cause="train_batch or train_epoch is overridden, and steps the optimizer itself; the step"
        " was not taken",
        fix=OWN_LOOP_LINES[name],
    )


def refuse_left_out(operator: Operator) -> None:
    """Raise if the batch that is over did not go through the default loop's step, once.

    Windows of `accumulate` batches are counted as the batches are delivered; one that was left
    out, computed twice, or read ahead would end up in another window, or in none.
    """
    state = operator._lockstep
    num_computed = state.step.num_computed
    if state.context.options.accumulate == 1 or num_computed == 1:
        return
    raise ConfigurationError(
        "accumulate counts global batches, and one did not go through train_batch once",
        where=f"{type(operator).__name__}, {place(operator)}",
        expected="super().train_batch() once for each batch, before the next one is read",
        got=f"{num_computed} calls",
        fix=OWN_LOOP_LINES["accumulate"],
    )
