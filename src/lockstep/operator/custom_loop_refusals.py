# SPDX-License-Identifier: Apache-2.0
"""Options of `TorchTrainer` that only the default loop applies, and their refusal elsewhere; and
the warning about borrowed batches that a loop has counted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from lockstep.data.shard_loader import RankLoader
from lockstep.errors import ConfigurationError, NotShardableError
from lockstep.keys import NUM_SAMPLES
from lockstep.operator.loop_protocols import Operator, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lockstep.operator.rank_context import Options

_log = logging.getLogger(__name__)

_MAX_MEMBERS: Final = 64
"""Containers in `self` with more members are not searched for loaders."""

CUSTOM_LOOP_FIXES: Final = {
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
"""For each option that only the default loop applies: what to write in one's own loop instead."""


def requested_loop_options(options: Options) -> list[str]:
    """The names of the requested `options` that only a step of the default loop applies."""
    wanted = {
        'precision="fp16"': options.precision == "fp16",
        "accumulate": options.accumulate > 1,
        "clip_grad_norm": options.clip_grad_norm is not None,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def refuse_late_reduction(operator: Operator) -> None:
    """Raise if `loss_reduction` was set after `register`.

    Raises:
        ConfigurationError: `register` has read another value.
    """
    run = operator._lockstep.registered
    reduction = operator.loss_reduction
    if run is not None and run.sync_options.averages is not (reduction == "mean"):
        raise ConfigurationError(
            f'loss_reduction became "{reduction}" after register',
            where=type(operator).__name__,
            cause="register has told the gradients' synchronisation whether to add them up or to"
            " average them",
            fix=f'loss_reduction = "{reduction}" in the class, or'
            f' self.register(..., loss_reduction="{reduction}")',
        )


def refuse_kept_parts(operator: Operator) -> None:
    """Raise if the operator keeps this rank's part of a loader, as `shard_loader` makes it.

    After a worker's death nobody would read the part of the lost rank, and no checkpoint holds its
    position. A part that a loop makes and reads to its end is right.

    Raises:
        NotShardableError: it would outlive the ranks for which it was cut.
    """
    if not operator._lockstep.context.options.add_dist_sampler:
        return  # the workers stay the same, and the user's parts are read
    for name, value in vars(operator).items():
        if any(isinstance(each, RankLoader) for each in _few_members_of(value)):
            raise NotShardableError(
                f"self.{name} is one rank's part of a loader",
                where=type(operator).__name__,
                cause="with another number of workers rows would come twice, or not at all",
                fix="self.register_data(train_loader=DataLoader(StackDataset(...), ...)) for pairs"
                " of samples, ConcatDataset for one after the other; or in the loop that reads all"
                ' of it: part = shard_loader(loader), part.set_epoch(info["epoch_idx"])',
            )


def _few_members_of(value: Any) -> Iterable[Any]:
    """What `value` holds, if it is a small container of Python's; of anything else, itself.

    Each call of `train` asks this of all attributes: a queue may be long, and a mapping a file.
    """
    if not isinstance(value, dict | list | tuple):
        return [value]
    if len(value) > _MAX_MEMBERS:
        return []
    return value.values() if isinstance(value, dict) else value


def refuse_assigned_methods(operator: Operator) -> None:
    """Raise if `setup` has assigned a method to the operator that its class does not override.

    Raises:
        ConfigurationError: lockstep would call it in some loops, and not in all.
    """
    for name in vars(operator):
        method = getattr(Operator, name, None)
        if callable(method) and not operator._lockstep_overrides(method):
            raise ConfigurationError(
                f"{name} was assigned to the operator, and belongs into its class",
                where=type(operator).__name__,
                cause="lockstep asks the class which methods are overridden: this one would run in"
                " some calls, and not in others",
                fix=f"def {name}(self, ...) in the class, which may call what self.config asks for",
            )


def refuse_own_step(operator: Operator) -> None:
    """Raise: the user's own loop steps an optimizer, and an option of the default loop is on."""
    name = requested_loop_options(operator._lockstep.context.options)[0]
    raise ConfigurationError(
        f"{name} belongs to the default loop, and an optimizer stepped outside of it",
        where=f"{type(operator).__name__}, {rank_and_step(operator)}",
        cause="train_batch or train_epoch is overridden, and steps the optimizer itself; the step"
        " was not taken",
        fix=CUSTOM_LOOP_FIXES[name],
    )


def refuse_skipped_batch(operator: Operator) -> None:
    """Raise if the default loop's step did not compute the finished batch exactly once.

    Windows of `accumulate` batches are counted as the batches are delivered; a batch that the loop
    leaves out, computes twice or reads ahead would count in another window, or in none.
    """
    state = operator._lockstep
    num_train_batch_calls = state.global_batch.num_train_batch_calls
    if state.context.options.accumulate == 1 or num_train_batch_calls == 1:
        return
    raise ConfigurationError(
        "accumulate counts global batches, and one did not go through train_batch once",
        where=f"{type(operator).__name__}, {rank_and_step(operator)}",
        expected="super().train_batch() once for each batch, before the next one is read",
        got=f"{num_train_batch_calls} calls",
        fix=CUSTOM_LOOP_FIXES["accumulate"],
    )


def warn_of_borrowed_counts(
    operator: Operator, result: Mapping[str, Any], num_samples: int, num_borrowed: int
) -> None:
    """Warn, once, of a loop of the user's own that has counted the batches that it was lent.

    The gradients are right all the same; the means that the loop returns beside its count cannot be
    taken apart any more.

    Args:
        result: of the user's `train_epoch` or `validate`.
        num_samples: this worker's own in that pass.
        num_borrowed: those of another worker that the loop was given beside them.
    """
    state, counted = operator._lockstep, result.get(NUM_SAMPLES)
    if not num_borrowed or state.has_warned_of_borrowed_counts:
        return
    if not isinstance(counted, int | float) or counted != num_samples + num_borrowed:
        return
    state.has_warned_of_borrowed_counts = True
    _log.warning(
        "the loop of %s on rank %d has returned num_samples=%d: its own %d, and %d of other workers"
        " in steps in which this rank has none. What it returns counts them twice; gradients do"
        " not. Leave out of your counts, sums and queues the batches for which"
        " self.is_borrowed_batch is true",
        *(type(operator).__name__, operator.world_rank, counted, num_samples, num_borrowed),
    )
