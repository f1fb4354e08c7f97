# SPDX-License-Identifier: Apache-2.0
"""Layers whose output for one sample depends on the rest of the batch, or on random numbers.

A comparison of a split batch with the whole one freezes them: dropout draws other numbers on every
rank, and batch statistics are those of the rank's own rows. Neither is an error, and the
differences that they make would hide one.
"""

from __future__ import annotations

from types import MethodType

from torch import nn

from lockstep._torch_compat import BatchNorm, Dropout


def freeze_batch_dependent_layers(model: nn.Module) -> list[str]:
    """Turn dropout off, and let batch normalisation use its running statistics, for good.

    A later ``model.train()``, which every training loop calls, leaves these layers as they are.

    Returns:
        One sentence for each layer that was changed.
    """
    notes: list[str] = []
    for name, module in model.named_modules():
        place = f"layer `{name}`" if name else "the model"
        if isinstance(module, Dropout):
            _keep_in_eval_mode(module)
            notes.append(f"dropout is off in {place}")
        elif is_local_batch_norm(module) and module.running_mean is not None:
            _keep_in_eval_mode(module)
            notes.append(f"{place} uses its running statistics, not the batch's")
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout:
            # Not `eval`: cuDNN refuses to run the backward of an RNN that is not training.
            module.dropout = 0.0
            notes.append(f"dropout is off in {place}")
    return notes


def is_local_batch_norm(module: nn.Module) -> bool:
    """Whether a layer takes its statistics from the rows of this rank alone."""
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _keep_in_eval_mode(module: nn.Module) -> None:
    module.eval()
    module.train = MethodType(lambda self, mode=True: self, module)  # type: ignore[method-assign]
