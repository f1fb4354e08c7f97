# SPDX-License-Identifier: Apache-2.0
"""Refuses features of Lightning that lockstep does not support; the error names the feature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.keys import SCHEDULER_STEP_MANUAL

if TYPE_CHECKING:
    from lockstep.operator import Options

_UNSUPPORTED_HOOKS: Final = {
    "backward": "the weight of a batch has to go to the root of backward: leave the method out,"
    " or set self.automatic_optimization = False and call self.manual_backward(loss)",
    "configure_callbacks": "give the trainer callbacks of its own: TorchTrainer(callbacks=[...])",
    "configure_sharded_model": "build the layers in __init__ or in configure_model",
    "on_validation_model_eval": "choose the modules' modes in on_validation_start",
    "on_validation_model_train": "choose the modules' modes in on_validation_end",
    "on_validation_model_zero_grad": "leave it out: validation computes no gradients",
    "training_epoch_end": "Lightning 2 has none either: write on_train_epoch_end",
    "validation_epoch_end": "Lightning 2 has none either: write on_validation_epoch_end",
    "training_step_end": "Lightning 2 has none either: move it to the end of training_step",
    "validation_step_end": "Lightning 2 has none either: move it to the end of validation_step",
}
"""Hooks that lockstep cannot call with the same meaning, and what to write instead."""

_PREDICTION_HOOKS: Final = (
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_model_eval",
)

AROUND_VALIDATION: Final = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
)
"""Hooks in which a module may swap other weights in for a validation."""

_TRAINER_ARGUMENTS: Final = {
    "accelerator": "TorchTrainer(use_gpu=True or False)",
    "devices": "TorchTrainer(num_workers=...)",
    "num_nodes": "TorchTrainer(num_workers=...): Ray finds the nodes",
    "strategy": 'TorchTrainer(sync="replicate")',
    "precision": 'TorchTrainer(precision="bf16") or "fp16"',
    "accumulate_grad_batches": "TorchTrainer(accumulate=...)",
    "callbacks": "TorchTrainer(callbacks=[...])",
    "max_steps": "trainer.train(num_steps=...)",
    "limit_train_batches": "a loader of fewer samples: DataLoader(Subset(data, range(...)), ...)",
    "limit_val_batches": "a loader of fewer samples: DataLoader(Subset(data, range(...)), ...)",
    "deterministic": "TorchTrainer(reproducible=True)",
    "use_distributed_sampler": "TorchTrainer(add_dist_sampler=...)",
}

_UNSUPPORTED_SYNCS: Final = ("ddp", "fsdp", "data_parallel")


def refuse_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Refuse an argument of Lightning's trainer, and name the argument of `TorchTrainer` for it."""
    for name, value in arguments.items():
        known = _TRAINER_ARGUMENTS.get(name)
        raise ConfigurationError(
            f"from_lightning takes no {name}",
            got=f"{name}={value!r:.60}",
            expected="train_dataloader, val_dataloader, datamodule, gradient_clip_val,"
            " gradient_clip_algorithm, max_epochs",
            fix=f"write {known}" if known else f"leave {name} out",
        )


def setup_error(operator: str) -> ConfigurationError:
    """The error for an operator class whose own `setup` would take the place of Lightning's."""
    return ConfigurationError(
        f"{operator}.setup and the LightningModule would both make what is trained",
        where=f"{operator}.from_lightning",
        fix="leave setup out; or in a subclass of what from_lightning returns call"
        " super().setup(config) in it",
    )


def check_settings(options: Options, has_clip_value: bool) -> None:
    """Refuse trainer options that do not go together with a LightningModule."""
    if options.sync in _UNSUPPORTED_SYNCS:
        raise ConfigurationError(
            f"a LightningModule cannot be synchronised with sync={options.sync!r}",
            cause="that way needs the wrapped model to be called itself, and training_step calls"
            " the module's layers",
            fix='leave sync out, or write sync="parameter_server"',
        )
    if options.scheduler_step_freq not in (None, SCHEDULER_STEP_MANUAL):
        raise ConfigurationError(
            "the LightningModule says itself when its schedulers step",
            got=f"scheduler_step_freq={options.scheduler_step_freq!r}",
            fix='leave scheduler_step_freq out, and return {"scheduler": ..., "interval": "step"'
            ' or "epoch"} from configure_optimizers; or write scheduler_step_freq="manual" and'
            " call trainer.update_scheduler(metric)",
        )
    if has_clip_value and options.clip_grad_norm is not None:
        raise ConfigurationError(
            "two settings clip the gradients",
            got=f"gradient_clip_val and clip_grad_norm={options.clip_grad_norm}",
            fix="leave one of them out",
        )


def check_module(module: Any, options: Options) -> None:
    """Refuse a `module` that defines a method which the loop would ignore or call wrongly."""
    name = type(module).__name__
    if not overrides(module, "training_step"):
        raise ConfigurationError(
            "the LightningModule has no training_step", where=name, fix="define training_step"
        )
    for method in ("training_step", "validation_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, method)).parameters:
            raise NotAvailableError(
                f"{method}(dataloader_iter) is not supported: batches come one by one",
                where=name,
                fix=f"def {method}(self, batch, batch_idx): ...",
            )
    for hook, instead in _UNSUPPORTED_HOOKS.items():
        is_called = hook == "backward" and not module.automatic_optimization
        if overrides(module, hook) and not is_called:
            raise NotAvailableError(
                f"the hook {hook} is not supported", where=f"{name}.{hook}", fix=instead
            )
    if options.precision == "fp16" and overrides(module, "optimizer_step"):
        raise NotAvailableError(
            'an optimizer_step of your own is not supported with precision="fp16"',
            where=f"{name}.optimizer_step",
            cause="whether a step is taken is decided by the loss scaling",
            fix='precision="bf16", or write on_before_optimizer_step instead',
        )


def check_prediction(module: Any) -> None:
    """Refuse hooks of Lightning's prediction loop, which `trainer.predict` does not call."""
    for hook in _PREDICTION_HOOKS:
        if overrides(module, hook):
            raise NotAvailableError(
                f"the hook {hook} is not supported by trainer.predict",
                where=f"{type(module).__name__}.{hook}",
                fix="do it in predict_step, or in the program around trainer.predict(loader)",
            )


def overrides(module: Any, method: str) -> bool:
    """Whether a class of the user's defines `method`, and not only a base class of Lightning's."""
    for base in type(module).__mro__:
        if method in vars(base):
            return not base.__module__.startswith(("lightning.", "pytorch_lightning.")) or (
                ".demos." in base.__module__
            )
    return method in vars(module)
