# SPDX-License-Identifier: Apache-2.0
"""What hangs on the optimizers of an operator: each step that was taken is followed up.

The hooks sit on the optimizers themselves, so that every loop is followed, the default one, a
user's own and Lightning's; and a step that a GradScaler leaves out is followed by nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.errors import ConfigurationError
from lockstep.randomness import derive_seed, preserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from lockstep.operator import TrainingOperator
    from lockstep.operator.backstage import Backstage
    from lockstep.operator.setting import Options


_USUAL_DECAY: Final = 0.999


def follow_steps(operator: TrainingOperator) -> list[RemovableHandle]:
    """Note each step of a registered optimizer, and call the operator's `after_step` after it."""
    run = operator._lockstep.registered
    if run is None:
        return []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not operator._lockstep.is_default_step:
            _refuse_own_step(operator)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _was_taken(optimizer):
            _follow(operator, optimizer)

    handles = [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]
    if operator._brings_own_loop() and of_default_loop(operator._lockstep.setting.options):
        handles += [optimizer.register_step_pre_hook(before) for optimizer in run.optimizers]
    return handles


def _was_taken(optimizer: torch.optim.Optimizer) -> bool:
    # A fused optimizer is told of infinities by the scaler, and leaves the step out by itself.
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def _follow(operator: TrainingOperator, optimizer: torch.optim.Optimizer) -> None:
    stage = operator._lockstep
    if operator._brings("after_step"):
        # The same numbers on every rank: what is drawn goes into weights that ranks share.
        seed = derive_seed(
            stage.setting.placement.seed, "after_step", operator.global_step, len(stage.stepped)
        )
        with torch.no_grad(), preserved(seed):
            operator.after_step()
    stage.stepped.append(optimizer)


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


def _refuse_own_step(operator: TrainingOperator) -> None:
    name = of_default_loop(operator._lockstep.setting.options)[0]
    raise ConfigurationError(
        f"{name} belongs to the default loop, and an optimizer stepped outside of it",
        where=f"{type(operator).__name__}, rank {operator.world_rank}, step {operator.global_step}",
        cause="train_batch or train_epoch is overridden, and steps the optimizer itself; the step"
        " was not taken",
        fix=OWN_LOOP_LINES[name],
    )


def refuse_left_out(operator: TrainingOperator) -> None:
    """Raise if the batch that is over did not go through the default loop's step, once.

    Windows of `accumulate` batches are counted as the batches are delivered; one that was left
    out, computed twice, or read ahead would end up in another window, or in none.
    """
    stage = operator._lockstep
    if stage.setting.options.accumulate == 1 or stage.num_computed == 1:
        return
    raise ConfigurationError(
        "accumulate counts global batches, and one did not go through train_batch once",
        where=f"{type(operator).__name__}, rank {operator.world_rank}, step {operator.global_step}",
        expected="super().train_batch() once for each batch, before the next one is read",
        got=f"{stage.num_computed} calls",
        fix=OWN_LOOP_LINES["accumulate"],
    )


# ---------------------------------------------------------------------- averages of weights


def averages_of(
    given: Any, models: Sequence[nn.Module], device: torch.device
) -> list[AveragedModel]:
    """What ``register(ema=...)`` asks for: an average of each model, in eval mode.

    Args:
        given: True, or a decay between 0 and 1; a function from a model to an `AveragedModel`;
            `AveragedModel`s, one for each model; or None.
        models: without wrappers, on `device`.
    """
    if given is None:
        return []
    if callable(given) and not isinstance(given, nn.Module):
        averages = [given(model) for model in models]
    elif isinstance(given, list | tuple | nn.Module):
        averages = [given] if isinstance(given, nn.Module) else list(given)
    else:
        averages = [_exponential(given, model) for model in models]
    if not all(isinstance(each, AveragedModel) for each in averages):
        raise _no_average(given, "a decay as in ema=0.999, or a torch AveragedModel")
    if [_shapes(each) for each in averages] != [_shapes(each) for each in models]:
        raise _no_average(given, "one AveragedModel(model, ...) for each registered model")
    for average in averages:
        average.module.to(device)
        average.eval()
    return averages


def _exponential(decay: Any, model: nn.Module) -> AveragedModel:
    if decay is True:
        decay = _USUAL_DECAY
    is_decay = isinstance(decay, float) and 0 < decay < 1
    if not is_decay:
        raise _no_average(decay, "a decay between 0 and 1, as in ema=0.999, or an AveragedModel")
    return _ExponentialAverage(model, decay)


class _ExponentialAverage(AveragedModel):
    """An average of weights and of running statistics; other buffers are the model's own.

    Torch's with ``use_buffers=True`` averages every buffer: an infinity of an attention mask
    becomes NaN, and positions of tokens, which are integers, become other positions.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._decay = decay

    def update_parameters(self, model: nn.Module) -> None:
        buffers = [each for each in self.module.buffers() if each.is_floating_point()]
        before = [each.detach().clone() for each in buffers]
        begins = not bool(self.n_averaged)
        super().update_parameters(model)  # copies the buffers
        if begins:
            return
        with torch.no_grad():
            for average, old in zip(buffers, before, strict=True):
                mixed = old.lerp(average, 1 - self._decay)
                average.copy_(torch.where(mixed.isfinite(), mixed, average))


def _shapes(model: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in model.parameters()]


def _no_average(given: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(
        "register(ema=...) was given something else", expected=expected, got=f"ema={given!r:.80}"
    )


def update_averages(stage: Backstage) -> None:
    """A global batch is over: average the models whose optimizers stepped in it, once each."""
    stepped, stage.stepped = stage.stepped, []
    run = stage.registered
    if not stepped or run is None or not run.averages:
        return
    for model, average in zip(run.plain_models(), run.averages, strict=True):
        if len(run.averages) == 1 or _holds_any(stepped, model):
            average.update_parameters(model)


def _holds_any(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> bool:
    own = set(map(id, model.parameters()))
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(id(parameter) in own for group in groups for parameter in group["params"])
