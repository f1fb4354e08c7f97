# SPDX-License-Identifier: Apache-2.0
"""What a module and a datamodule add to a checkpoint, by their hooks and states, comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from lockstep.integrations.lightning.lightning_operator import LightningOperator


def offered_to_hook(operator: LightningOperator) -> dict[str, Any]:
    """A checkpoint as Lightning would write it, for the hooks to look at."""
    module, run = operator.module, operator._lockstep.registered
    assert run is not None, "register() comes in setup"
    return {
        "epoch": operator._view.current_epoch,
        "global_step": operator._view.global_step,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in run.optimizers],
        "lr_schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
        "hyper_parameters": dict(module.hparams),
    }


def added_by_hook(operator: LightningOperator) -> dict[str, Any]:
    """What the module's (and the datamodule's) `on_save_checkpoint` put into the checkpoint.

    Raises:
        NotAvailableError: it left out or renamed weights; lockstep saves all of them.
    """
    offered = offered_to_hook(operator)
    names = list(offered["state_dict"])
    checkpoint = {**offered}
    _call_on_owners(operator, "on_save_checkpoint", checkpoint)
    state = checkpoint.get("state_dict")
    if state is not offered["state_dict"] or list(state) != names:
        raise NotAvailableError(
            "on_save_checkpoint changed which weights are saved",
            where=type(operator.module).__name__,
            cause="a trainer that goes on from the checkpoint needs all of them",
            fix="leave checkpoint['state_dict'] as it is; choose when you load it elsewhere",
        )
    return {key: value for key, value in checkpoint.items() if key not in offered}


def give_back(operator: LightningOperator, added: dict[str, Any]) -> None:
    """Hand the owners what `added_by_hook` returned, beside what a checkpoint always holds."""
    _call_on_owners(operator, "on_load_checkpoint", {**offered_to_hook(operator), **added})


def _call_on_owners(operator: LightningOperator, hook: str, checkpoint: dict[str, Any]) -> None:
    # Lightning's own datamodule has neither hook, and calls a user's.
    for owner in reversed(operator._owners):
        if hasattr(owner, hook):
            getattr(owner, hook)(checkpoint)
