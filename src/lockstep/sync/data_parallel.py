# SPDX-License-Identifier: Apache-2.0
"""`DataParallelModel`: device replicas of a model in one process, like torch.nn.DataParallel.

A call cuts its batch along dim 0, runs every part on a device of its own with copies of the one
model's parameters, and joins the outputs. The copies belong to the graph, so backward adds the
gradients of all of them into the one model, and the loss, computed on the whole output, weighs
them rightly however the batch was cut.

Each replica is the same module with other tensors put in for the time of its call. So they run
one after the other; on accelerators, which work on while Python goes on, they still overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.func import functional_call

from lockstep._torch_compat import Norm, buffers_of
from lockstep.data.batch_join import concatenate
from lockstep.errors import ConfigurationError, LostUpdateError, NotEnoughResourcesError
from lockstep.sync.left_tensors import LeftTensors
from lockstep.sync.tensor_bits import same_bits
from lockstep.tensor_copies import fits
from lockstep.tensor_tree import KeyPath, keystr, tensors_in, tree_map_with_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_JOINABLE_LAYOUTS: Final = (torch.strided, torch.sparse_coo)

Tensors = dict[str, torch.Tensor]


class DataParallelModel(nn.Module):
    """A model that cuts the batch of each call and runs one part on each device.

    Its ``module`` is the one model, which holds the weights, the gradients and the buffers.
    Every other attribute and method of this object is the one model's.

    Args:
        module: the model; its parameters are on ``devices[0]``.
        devices: one for each replica.

    Raises:
        ConfigurationError: a layer that would have to communicate between the replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        _refuse_synced_statistics(module, len(devices))
        self.module = module
        self.devices = list(devices)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all rows, in their order, on the first device.

        Args:
            args: tensors whose dim 0 is the batch, or structures of them; numbers and strings
                go to every replica as they are, a list of as many as there are rows is cut.
            kwargs: the same.

        Returns:
            The module's output, with the rows of all replicas. There are never more
            replicas than rows.

        Gradient:
            Of every replica, added into the one model.

        Raises:
            ConfigurationError: an input, or an output, has not got the batch in dim 0.
            LostUpdateError: the replicas left different values in the model.
        """
        rows = _num_rows((args, kwargs))
        count = max(1, min(len(self.devices), rows or 1))
        if count == 1:
            return self.module(*args, **kwargs)
        assert rows is not None
        bounds = [rows * number // count for number in range(count + 1)]
        run = _ReplicaCalls(self.module, self.devices[:count])
        outputs: list[Any] = []
        for number, device in enumerate(run.devices):
            part = slice(bounds[number], bounds[number + 1])
            inputs = _scatter((args, kwargs), part, rows, device)
            output = run.call(number, *inputs)
            outputs.append(_require_output_rows(output, part.stop - part.start, self.devices[0]))
        run.end()
        return concatenate(outputs)


def replica_devices(first: torch.device, count: int) -> list[torch.device]:
    """A device for each of `count` replicas: accelerators from `first` on, or one CPU for all.

    Raises:
        NotEnoughResourcesError: there are fewer accelerators.
    """
    if first.type == "cpu":
        return [first] * count
    there = torch.get_device_module(first).device_count()
    if there < count:
        raise NotEnoughResourcesError(
            "there are fewer devices than replicas",
            expected=f"{count} {first.type} devices in one process",
            got=f"{there}",
            fix=f"num_workers={there}, or use_gpu=False",
        )
    return [torch.device(first.type, index) for index in range(count)]


class _ReplicaCalls:
    """The calls of all replicas for one batch, and the changes that each makes to the model."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._module = module
        self.devices = devices
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        # Replica 0 is the model itself. Copy the others before replica 0 changes the model.
        self._copies: list[Tensors] = [{**parameters, **buffers}]
        for device in devices[1:]:
            copies = {name: _copy_to(param, device) for name, param in parameters.items()}
            with torch.no_grad():
                copies |= {name: item.to(device, copy=True) for name, item in buffers.items()}
            self._copies.append(copies)
        self._left = LeftTensors(module)

    def call(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run replica `number` on its part of the batch."""
        with self._left.noting_computed():
            output = self._call(number, args, kwargs)
        # Without a graph a tensor is of no use to the loop.
        lost = self._left.find_lost() if torch.is_grad_enabled() else None
        if lost is not None:
            raise _lost_update_error(number, f"`{lost}`, a tensor that forward left on the module")
        return output

    def _call(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if number == 0:
            output = self._module(*args, **kwargs)
            # A forward may have put other buffers in the place of its own.
            self._copies[0] |= dict(self._module.named_buffers())
        else:
            output = functional_call(self._module, self._copies[number], tuple(args), dict(kwargs))
            self._update_lists_of_weights()
        return output

    def _update_lists_of_weights(self) -> None:
        """Let an RNN's own list of its weights hold the model's, and not a replica's copies."""
        for part in self._module.modules():
            if isinstance(part, nn.RNNBase):
                part._update_flat_weights()

    def end(self) -> None:
        """Leave the model as replica 0 left it, if no replica wrote anything else to it.

        Replica 0's writes stay, the others' vanish with their copies: nothing is lost where
        they wrote the same. Running statistics of normalisation layers are replica 0's, as
        they are rank 0's where the replicas are workers.
        """
        own = self._copies[0]
        statistics = _running_statistics(self._module)
        for number, copies in enumerate(self._copies[1:], start=1):
            for name, value in copies.items():
                if name not in statistics and not _has_same_values(
                    value.detach(), own[name].detach()
                ):
                    raise _lost_update_error(
                        number, f"`{name}`, which replica 0 left with other values"
                    )
        self._left.put_back()
        self._update_lists_of_weights()


class _Copy(torch.autograd.Function):
    """A copy on another device, or on the same one.

    Not ``.to``: torch makes its gradient dense, and fails to where it is sparse.
    """

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.home = param.device
        return param.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.home), None


def _copy_to(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    apply: Any = _Copy.apply
    copied: torch.Tensor = apply(param, device)
    return copied


def _running_statistics(module: nn.Module) -> set[str]:
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, Norm)
        for name in buffers_of(part)
    }


def _has_same_values(value: torch.Tensor, own: torch.Tensor) -> bool:
    value = value.to(own.device)
    # Under torch.compile a tensor has no bytes to look at: numbers are compared.
    if not torch.compiler.is_compiling() and same_bits(value, own):
        return True
    if not fits(value, own):
        return False
    # Beyond bits: zero has two signs, and NaN many bit patterns.
    return bool(((value == own) | ((value != value) & (own != own))).all())


def _refuse_synced_statistics(module: nn.Module, count: int) -> None:
    for path, part in module.named_modules():
        if count > 1 and isinstance(part, nn.SyncBatchNorm):
            raise ConfigurationError(
                "SyncBatchNorm cannot see the rows of the other replicas of one process",
                where=f"`{path}` under sync='data_parallel'",
                cause="the replicas run one after the other",
                fix='use sync="replicate" with joint_loss = True, or nn.BatchNorm, whose'
                " statistics are then those of each replica",
            )


def _num_rows(inputs: Any) -> int | None:
    """The leading length of the first tensor that has one."""
    return next((tensor.size(0) for tensor in tensors_in(inputs) if tensor.ndim), None)


def _scatter(inputs: Any, part: slice, rows: int, device: torch.device) -> Any:
    def cut(path: KeyPath, leaf: Any) -> Any:
        place = f"input{keystr(path)}"
        if isinstance(leaf, torch.Tensor):
            if leaf.ndim == 0:
                return leaf.to(device)
            if leaf.is_nested or leaf.layout is not torch.strided:
                raise _layout_error(place, leaf)
            if leaf.shape[0] != rows:
                raise _rows_error(place, f"shape {tuple(leaf.shape)}", rows)
            return leaf[part].to(device, non_blocking=True)
        if isinstance(leaf, list) and len(leaf) == rows:
            return leaf[part]
        if isinstance(leaf, list | tuple | str | bytes | int | float | complex | bool | None):
            return leaf
        raise _rows_error(place, f"a {type(leaf).__name__}", rows)

    return tree_map_with_path(cut, inputs)


def _require_output_rows(output: Any, rows: int, device: torch.device) -> Any:
    def look(path: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = f"output{keystr(path)}"
        if leaf.is_nested or leaf.layout not in _JOINABLE_LAYOUTS:
            raise _layout_error(place, leaf)
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise _rows_error(place, f"shape {tuple(leaf.shape)}", rows)
        return leaf.to(device)

    return tree_map_with_path(look, output)


def _rows_error(place: str, got: str, rows: int) -> ConfigurationError:
    return ConfigurationError(
        "a replica's rows cannot be told from the others'",
        where=f"{place} of a model under sync='data_parallel'",
        expected=f"tensors with {rows} rows in dim 0",
        got=got,
        cause="the batch is not in dim 0, or the model returns a mean over its own rows, which"
        " counts wrongly where replicas have unequal numbers of rows",
        fix="keep what all rows share in buffers of the model, return a value for each row, and"
        " take the mean in compute_loss",
    )


def _layout_error(place: str, leaf: torch.Tensor) -> ConfigurationError:
    return ConfigurationError(
        "torch cannot cut such a tensor into the replicas' rows, or join it again",
        where=f"{place} of a model under sync='data_parallel'",
        expected="tensors with strides",
        got="a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}",
        fix="make it dense (`.to_dense()`, `.to_padded_tensor(0.0)`); what all rows share can be"
        " a buffer of the model",
    )


def _lost_update_error(number: int, what: str) -> LostUpdateError:
    return LostUpdateError(
        "a replica's forward changed its copy of the model, and the change would be lost",
        where=f"replica {number}",
        got=what,
        cause="forward writes to parameters or buffers, or leaves an intermediate result there",
        fix="return it from forward and write in train_batch, on model.module; or leave"
        ' sync="data_parallel" out',
    )
