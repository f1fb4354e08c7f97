# SPDX-License-Identifier: Apache-2.0
"""Manual optimisation: a `training_step` that calls `manual_backward` and steps its optimizers.

`LightningModule.optimizers()` and `LightningModule.manual_backward()` go through the trainer's
strategy. `ManualStrategyView` stands there, and Lightning's own ``LightningOptimizer`` around each
optimizer, so that modules find ``toggle_model`` and closures as they know them. The operator gives
`training_step` all samples of its worker as one batch, as to any loop of a user's own: a step that
updates weights between two backwards cannot be computed shard by shard.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning.module_factory import PACKAGES
from lockstep.integrations.lightning.trainer_view import StrategyView, update_view
from lockstep.integrations.lightning.unsupported import overrides
from lockstep.operator.custom_loop_refusals import requested_loop_options
from lockstep.sync.optimizer_inspection import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lockstep.integrations.lightning.trainer_view import TrainerView
    from lockstep.operator import Options


def of_manual_module(operator_cls: type[Any]) -> type[Any]:
    """The class of an operator whose module steps its optimizers itself.

    Lockstep asks the class what is overridden. That a module optimises manually is known when it is
    made, and is so for one operator: others of its class may hold modules of the other kind.
    """
    names = {name: getattr(operator_cls, name) for name in ("__module__", "__qualname__")}
    return type(operator_cls.__name__, (operator_cls,), {**names, "_is_manual": True})


def refuse_automatic_options(options: Options, gradient_clip_val: float | None, where: str) -> None:
    """Refuse options that Lightning and lockstep apply to steps of their own.

    Raises:
        ConfigurationError: names the first one.
    """
    wanted = requested_loop_options(options)
    wanted += ["reproducible"] if options.reproducible else []
    wanted += ["gradient_clip_val"] if gradient_clip_val is not None else []
    if wanted:
        raise ConfigurationError(
            f"{wanted[0]} does not go together with manual optimisation",
            where=f"{where}.automatic_optimization = False",
            cause="training_step steps the optimizers itself",
            fix=_FIXES.get(wanted[0], f"leave {wanted[0]} out"),
        )


_FIXES = {
    'precision="fp16"': 'precision="bf16"',
    "accumulate": "leave accumulate out, and step every so many batches in training_step",
    "clip_grad_norm": "leave clip_grad_norm out, and write self.clip_gradients(optimizer, ...)"
    " before optimizer.step()",
    "gradient_clip_val": "leave gradient_clip_val out, and write"
    " self.clip_gradients(optimizer, gradient_clip_val=...) before optimizer.step()",
}


_BACKWARD_PARAMETERS: Final = ("gradient", "retain_graph", "create_graph", "inputs")
"""Of ``Tensor.backward``, in its order."""


class ManualStrategyView(StrategyView):
    """The strategy of a module that optimises manually.

    Args:
        trainer: the view whose strategy this is.
        optimizers: what `configure_optimizers` returned, in its order.
        backward: backpropagates a loss, by its weight and the keywords of ``Tensor.backward``.
    """

    def __init__(
        self,
        trainer: TrainerView,
        optimizers: Sequence[torch.optim.Optimizer],
        backward: Callable[..., None],
    ) -> None:
        super().__init__(trainer)
        self._backward = backward
        wrapper = _lightning_optimizer_class(trainer.lightning_module)
        self._wrapped = [wrapper._to_lightning_optimizer(each, self) for each in optimizers]

    @property
    def lightning_module(self) -> Any:
        """The module, of which ``LightningOptimizer.toggle_model`` asks the strategy."""
        return self._trainer.lightning_module

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return list(self._wrapped)

    def begin_call(self) -> None:
        """Keep the count: it is that of the run."""

    def mark(self) -> int:
        """How often optimizers have stepped, for `restore` should the step be undone."""
        return self._trainer.global_step

    def restore(self, mark: int) -> None:
        """Forget the steps since `mark`."""
        update_view(self._trainer, global_step=mark)

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: object = None,
        *arguments: Any,
        weight: float | None = None,
        **keywords: Any,
    ) -> None:
        """Backpropagate, for ``LightningModule.manual_backward``.

        A `backward` of the module's own is called instead, and backpropagates by itself.

        Args:
            loss: a mean over the samples of this worker's batch, or over `weight` of anything.
            optimizer: Lightning passes None.
            arguments, keywords: of ``Tensor.backward``.
            weight: how much this loss counts against the other workers' losses; the number of
                samples if None.

        Gradient:
            That of the global batch: the mean over all workers, weighed.

        Collective:
            Every rank.

        Raises:
            NotAvailableError: a weight, and the module has a `backward` of its own.
        """
        module = self.lightning_module
        is_own = overrides(module, "backward")
        if is_own and weight is not None:
            raise NotAvailableError(
                "a weight is given to manual_backward, and the module's own backward takes none",
                where=f"{type(module).__name__}.backward",
                fix="leave the method out, and give manual_backward the loss that it makes",
            )
        module.on_before_backward(loss)
        if is_own:
            module.backward(loss, *arguments, **keywords)
        else:
            named = dict(zip(_BACKWARD_PARAMETERS, arguments, strict=False))
            self._backward(loss, weight, **named, **keywords)
        module.on_after_backward()

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **keywords: Any
    ) -> Any:
        """Step an optimizer after its closure, for ``LightningOptimizer.step``.

        An optimizer that needs a closure calls it itself, as often as it likes.

        Returns:
            What the closure has returned; or the step of an optimizer that has called it.
        """
        if needs_closure(optimizer):
            result = optimizer.step(self._with_hook(optimizer, closure), **keywords)
        else:
            # Before the step, as torch's optimizers call it: gradients have to be those of the
            # global batch before lockstep lets an optimizer see them.
            result = self._with_hook(optimizer, closure)()
            optimizer.step(**keywords)
        # Lightning counts the steps of all optimizers.
        update_view(self._trainer, global_step=self._trainer.global_step + 1)
        return result

    def _with_hook(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def evaluate() -> Any:
            result = closure()
            self.lightning_module.on_before_optimizer_step(optimizer)
            return result

        return evaluate


def _lightning_optimizer_class(module: Any) -> Any:
    """``LightningOptimizer`` of the one of Lightning's two packages that a module comes from."""
    package = next(
        each.__module__.removesuffix(".core.module")
        for each in type(module).__mro__
        if each.__name__ == "LightningModule" and each.__module__.startswith(PACKAGES)
    )
    return importlib.import_module(f"{package}.core.optimizer").LightningOptimizer
