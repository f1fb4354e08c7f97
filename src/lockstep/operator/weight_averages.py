# SPDX-License-Identifier: Apache-2.0
"""Averages of models' weights (EMA), for ``register(ema=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep._torch_compat import buffers_of, lerp_each
from lockstep.errors import ConfigurationError
from lockstep.operator.model_copies import copy_models
from lockstep.sync.optimizer_inspection import optimizer_parameters
from lockstep.tensor_copies import fits, write_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.operator.training_parts import TrainingParts

_DEFAULT_DECAY: Final = 0.999

_RUNNING_STATISTICS: Final = frozenset({"running_mean", "running_var"})
"""Torch's names for the buffers of its norm layers, which layers of other packages use as well."""


def make_weight_averages(
    given: Any, models: Sequence[nn.Module], device: torch.device
) -> list[AveragedModel]:
    """Make the averages of ``register(ema=...)``: one for each model, in eval mode.

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
        averages = [_ExponentialAverage(model, _decay(given)) for model in models]
    if not all(isinstance(each, AveragedModel) for each in averages):
        raise _ema_error(given, "a decay as in ema=0.999, or a torch AveragedModel")
    if [_shapes(each) for each in averages] != [_shapes(each) for each in models]:
        raise _ema_error(given, "one AveragedModel(model, ...) for each registered model")
    for average in averages:
        average.module.to(device)
        average.eval()
    return averages


def _decay(given: Any) -> float:
    decay = _DEFAULT_DECAY if given is True else given
    if not isinstance(decay, float) or not 0 < decay < 1:
        raise _ema_error(given, "a decay between 0 and 1, as in ema=0.999, or an AveragedModel")
    return decay


def _shapes(model: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in model.parameters()]


def _ema_error(given: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(
        "register(ema=...) was given something else", expected=expected, got=f"ema={given!r:.80}"
    )


class _ExponentialAverage(AveragedModel):
    """An average of weights and of running statistics; other buffers are the model's own.

    Torch's update pairs tensors by their order, so that a buffer that is set later shifts all
    behind it, and with ``use_buffers=True`` averages every buffer: an infinity of an attention
    mask becomes NaN, positions of tokens, which are integers, become other positions, and the
    singular vectors of spectral norm become shorter than 1, so that its weights come out too large.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)  # torch's cannot copy a model that holds tensors of a graph
        self.module = _copy_model(model)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long))
        self.avg_fn, self.multi_avg_fn, self.use_buffers = None, None, False
        self._weight = 1 - decay

    def update_parameters(self, model: nn.Module) -> None:
        """Mix the weights of `model` into the average; the first call copies them."""
        weight = self._weight if self.n_averaged else 1.0
        with torch.no_grad():
            pairs = self._pairs(model)
            mixed = [(m, t) for m, t in pairs if m.is_floating_point() or m.is_complex()]
            if mixed:
                lerp_each([m for m, _ in mixed], [t for _, t in mixed], weight)
            for mine, theirs in pairs:
                if not mine.is_floating_point() and not mine.is_complex():
                    mine.copy_(theirs)
            self._take_buffers(model, weight)
        self.n_averaged += 1

    def _pairs(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = dict(self.module.named_parameters(remove_duplicate=False))
        pairs = []
        for name, theirs in model.named_parameters():
            if name not in own:
                raise ConfigurationError(
                    f"`{name}` was added to a model after its average had been made",
                    where=type(model).__name__,
                    fix="make all parameters before self.register(..., ema=...)",
                )
            pairs.append((own[name].detach(), theirs.detach()))
        return pairs

    def _take_buffers(self, model: nn.Module, weight: float) -> None:
        own_modules = dict(self.module.named_modules())
        taken: dict[int, torch.Tensor] = {}
        for path, part in model.named_modules():
            own = buffers_of(own_modules[path]) if path in own_modules else {}
            for key, theirs in buffers_of(part).items():
                if theirs is not None and id(theirs) not in taken:
                    share = weight if key in _RUNNING_STATISTICS else 1.0
                    taken[id(theirs)] = _mix_buffer(own.get(key), theirs.detach(), share)
                own[key] = None if theirs is None else taken[id(theirs)]


def _mix_buffer(mine: torch.Tensor | None, theirs: torch.Tensor, weight: float) -> torch.Tensor:
    """Mix `theirs` into `mine` in place; a copy of `theirs` if its shape or dtype has changed.

    Args:
        weight: of `theirs`; 1 writes `theirs` as it is.
    """
    if mine is None or not fits(theirs, mine):
        return theirs.clone()
    if mine.is_floating_point() and weight != 1:
        mixed = mine.lerp(theirs, weight)
        theirs = torch.where(mixed.isfinite(), mixed, theirs)
    write_into(mine, theirs)
    return mine


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy_models([model], next(iter(_devices_of(model)), torch.device("cpu")))[0]
    except TypeError as error:
        raise ConfigurationError(
            "register(ema=...) cannot copy the model",
            where=type(model).__name__,
            cause=str(error),
            fix="give the model a __deepcopy__, or pass an AveragedModel of your own as ema",
        ) from error


def _devices_of(model: nn.Module) -> list[torch.device]:
    return [each.device for each in (*model.parameters(), *model.buffers())]


def update_averages(run: TrainingParts, stepped: Sequence[torch.optim.Optimizer]) -> None:
    """After a global batch: update the average of each model that an optimizer has changed."""
    if not stepped or not run.averages:
        return
    for model, average in zip(run.plain_models(), run.averages, strict=True):
        if _holds_any(stepped, model):
            average.update_parameters(model)


def _holds_any(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> bool:
    own = set(map(id, model.parameters()))
    return any(id(held) in own for each in optimizers for held in optimizer_parameters(each))
