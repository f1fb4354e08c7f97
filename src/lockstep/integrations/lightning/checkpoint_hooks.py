# SPDX-License-Identifier: Apache-2.0
"""`on_save_checkpoint` and `on_load_checkpoint` of a module and of its datamodule.

Lightning calls both hooks with a whole checkpoint, which they may add to. Here a hook is shown a
checkpoint as Lightning would write it; what the hook adds is saved with the operator's state, and
shown to the other hook when that state is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.integrations.lightning.trainer_view import TrainerView


def added_by_hook(trainer: TrainerView, owners: Sequence[Any]) -> dict[str, Any]:
    """What `on_save_checkpoint` of `owners` put into the checkpoint.

    Args:
        owners: the datamodule, if there is one, and the module.

    Raises:
        NotAvailableError: the hook left out or renamed weights; lockstep saves all of them.
    """
    offered = _checkpoint(trainer)
    names = list(offered["state_dict"])
    checkpoint = {**offered}
    _call_on_owners(owners, "on_save_checkpoint", checkpoint)
    state = checkpoint.get("state_dict")
    if state is not offered["state_dict"] or list(state) != names:
        raise NotAvailableError(
            "on_save_checkpoint changed which weights are saved",
            where=type(trainer.lightning_module).__name__,
            cause="a trainer that goes on from the checkpoint needs all of them",
            fix="leave checkpoint['state_dict'] as it is; choose when you load it elsewhere",
        )
    return {key: value for key, value in checkpoint.items() if key not in offered}


def give_back(trainer: TrainerView, owners: Sequence[Any], added: dict[str, Any]) -> None:
    """Call `on_load_checkpoint` of `owners` with `added`, beside what every checkpoint holds."""
    _call_on_owners(owners, "on_load_checkpoint", {**_checkpoint(trainer), **added})


def _checkpoint(trainer: TrainerView) -> dict[str, Any]:
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


def _call_on_owners(owners: Sequence[Any], hook: str, checkpoint: dict[str, Any]) -> None:
    # Lightning's own datamodule has neither hook, and calls a user's.
    for owner in reversed(owners):
        if hasattr(owner, hook):
            getattr(owner, hook)(checkpoint)
