# SPDX-License-Identifier: Apache-2.0
"""Calls `on_save_checkpoint` and `on_load_checkpoint` of a module and of its datamodule.

Lightning calls both hooks with a whole checkpoint, to which they may add entries. lockstep calls
`on_save_checkpoint` with a checkpoint as Lightning would write it, saves the entries that the hook
adds with the operator's state, and gives them to `on_load_checkpoint` when that state is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError
from lockstep.integrations.lightning.unsupported import overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.integrations.lightning.trainer_view import TrainerView


def adds_to_checkpoints(hook_targets: Sequence[Any]) -> bool:
    """Whether a hook of the user's adds entries, of what a validation may have changed."""
    *datamodules, _ = hook_targets
    hooks = [(target, "on_save_checkpoint") for target in hook_targets]
    hooks += [(datamodule, "state_dict") for datamodule in datamodules]
    return any(overrides(*hook) for hook in hooks)


def run_on_save_hooks(trainer: TrainerView, hook_targets: Sequence[Any]) -> dict[str, Any]:
    """Call `on_save_checkpoint` of `hook_targets`, and return the entries that the hooks add.

    Args:
        hook_targets: the datamodule, if there is one, and the module.

    Raises:
        NotAvailableError: a hook left out or renamed weights; lockstep saves all of them.
    """
    offered = _lightning_checkpoint(trainer)
    names = list(offered["state_dict"])
    checkpoint = {**offered}
    _call_hook(hook_targets, "on_save_checkpoint", checkpoint)
    state = checkpoint.get("state_dict")
    if state is not offered["state_dict"] or list(state) != names:
        raise NotAvailableError(
            "on_save_checkpoint changed which weights are saved",
            where=type(trainer.lightning_module).__name__,
            cause="a trainer that goes on from the checkpoint needs all of them",
            fix="leave checkpoint['state_dict'] as it is; choose when you load it elsewhere",
        )
    return {key: value for key, value in checkpoint.items() if key not in offered}


def run_on_load_hooks(
    trainer: TrainerView, hook_targets: Sequence[Any], added: dict[str, Any]
) -> None:
    """Call `on_load_checkpoint` of `hook_targets` with a checkpoint that holds `added`."""
    _call_hook(hook_targets, "on_load_checkpoint", {**_lightning_checkpoint(trainer), **added})


def _lightning_checkpoint(trainer: TrainerView) -> dict[str, Any]:
    """A checkpoint as Lightning would write it now."""
    module = trainer.lightning_module
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "hyper_parameters": dict(module.hparams),
    }


def _call_hook(hook_targets: Sequence[Any], hook: str, checkpoint: dict[str, Any]) -> None:
    # Lightning's datamodule class has neither hook; a user's subclass may have them.
    for target in reversed(hook_targets):
        if hasattr(target, hook):
            getattr(target, hook)(checkpoint)
