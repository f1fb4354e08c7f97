# SPDX-License-Identifier: Apache-2.0
"""Every touch of torch that its documentation does not promise: private names, special versions.

When a new torch breaks lockstep, this is the file to mend, and `fully_shard` beside it. The audit
has such touches of its own, because it looks at other people's programs from within torch; no
other module has any, and ``tests/test_house.py`` holds it. Each entry says for which torch versions
it was run, and which public interface would replace it; where it names none, there is none. "2.6 to
2.13" means: ``tests/unit/test_torch_compat.py`` has passed on torch 2.6.0 and on 2.13.0.

What runs for every gradient of a step (`version_of`, `use_count`, `is_view`) is a C function under
a new name: a Python function around each would be felt.
"""

from __future__ import annotations

import inspect
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import _compile, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import _DatasetKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta
    from types import CodeType

    from torch.autograd.graph import Node
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    DDPClass = TypeVar("DDPClass", bound=type[DistributedDataParallel])

# ------------------------------------------------------------------------------------- tensors

version_of: Final = cast("Callable[[torch.Tensor], int]", attrgetter("_version"))
"""Autograd's count of in-place writes to a tensor's memory.

Torch 2.6 to 2.13. `torch.autograd.graph.increment_version` is public, reading the counter is not.
"""

use_count: Final[Callable[[Any], int]] = getattr(torch.Tensor, "_use_count")  # noqa: B009
"""References to a tensor from C++: a ``grad``, graphs, one for its Python object.

Torch 2.6 to 2.13.
"""

is_view: Final[Callable[[Any], bool]] = torch.Tensor._is_view
"""Whether a tensor is a view of another one. Torch 2.6 to 2.13; ``_base`` is as private."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share whose memory is one storage, as long as one of them lives.

    Torch 2.6 to 2.13. ``tensor.untyped_storage().data_ptr()`` is public, but zero for each storage
    without elements.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors and other objects refer to the storage of `tensor`. Torch 2.6 to 2.13."""
    return int(torch._C._storage_Use_Count(storage_key(tensor)))


def sparse_indices_and_values(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values, which ``indices()`` has of coalesced tensors only. Torch 2.6 to 2.13."""
    return tensor._indices(), tensor._values()


copy_each: Final = torch._foreach_copy_
"""Copy each of a list of tensors into its counterpart of another, in one launch.

Torch 2.6 to 2.13. Publicly: ``copy_`` for each, a launch per tensor.
"""

zero_each: Final = torch._foreach_zero_
"""Fill each of a list of tensors with zeros. Torch 2.6 to 2.13; publicly: ``zero_`` for each."""

lerp_each: Final = torch._foreach_lerp_
"""``lerp_`` for each of a list of tensors, in one launch. Torch 2.6 to 2.13; publicly as above."""

# ------------------------------------------------------------------------------------ autograd

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""The innermost backward that runs on this thread, as a number; -1: none. Torch 2.6 to 2.13."""

PYTHON_NODE: Final[CodeType] = torch.autograd.function.BackwardCFunction.apply.__code__
"""The code of the frame from which autograd runs a `torch.autograd.Function`'s backward.

Torch 2.6 to 2.13. A backward inside a backward is always started below such a frame. No public
interface tells how many graph tasks enclose the current one.
"""


def call_at_end_of_task(function: Callable[[], None]) -> None:
    """Call `function` when the innermost backward that runs on this thread ends.

    Torch 2.6 to 2.13; torch's own FSDP and DDP use this one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def will_execute_node(node: Node) -> bool:
    """Inside a backward: whether it will execute `node`.

    Torch 2.6 to 2.13. It answers for a leaf whose gradient is only returned
    (``torch.autograd.grad``) by raising a RuntimeError.
    """
    return bool(torch._C._will_engine_execute_node(node))


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The table of hooks that ``tensor.register_hook`` fills; None before the first one.

    Torch 2.6 to 2.13. No public interface reads, replaces or orders the hooks of a tensor.
    """
    found: dict[int, Any] | None = tensor._backward_hooks
    return found


def set_tensor_hooks(tensor: torch.Tensor, table: dict[int, Any]) -> None:
    """Let `table` be what `tensor_hooks` returns. Autograd reads the table from now on."""
    tensor._backward_hooks = table


def post_accumulate_grad_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The table of hooks that ``register_post_accumulate_grad_hook`` fills; None before the first.

    Torch 2.6 to 2.13, as for `tensor_hooks`.
    """
    found: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return found


def set_post_accumulate_grad_hooks(tensor: torch.Tensor, table: dict[int, Any]) -> None:
    """Let `table` be what `post_accumulate_grad_hooks` returns; see `set_tensor_hooks`."""
    tensor._post_accumulate_grad_hooks = table


def arguments_of(operator: Any) -> list[str]:
    """The names of an operator's arguments, which `TorchDispatchMode` was handed, in order.

    Torch 2.6 to 2.13. The mode itself is documented, and has no public home either.
    """
    return [argument.name for argument in operator._schema.arguments]


# ------------------------------------------------------------------------------------- modules

BatchNorm: Final = _BatchNorm
"""The base class of batch normalisation in all dimensions, `torch.nn.SyncBatchNorm` included.

Torch 2.6 to 2.13. Publicly: the five classes one by one, without the lazy ones.
"""

Norm: Final = _NormBase
"""The base class of `BatchNorm` and of the instance normalisations. Torch 2.6 to 2.13."""

Dropout: Final = _DropoutNd
"""The base class of torch's dropout layers. Torch 2.6 to 2.13; publicly: the six classes."""

Loss: Final = _Loss
"""The base class of torch's loss modules. Torch 2.6 to 2.13; publicly: each of the classes."""

MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})
"""The attributes in which a module keeps what is registered with it. Torch 2.6 to 2.13."""


def is_set_by_fully_shard(name: str) -> bool:
    """Whether ``fully_shard`` sets an attribute of this name on each module. Torch 2.13."""
    return name.startswith("__composable_api_") or name in (
        "_is_fsdp_managed_module",
        "_fsdp_use_orig_params",
    )


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own table of buffers. Torch 2.6 to 2.13.

    ``named_buffers(recurse=False)`` leaves out those that are None, or a second time there.
    """
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own table of parameters. Torch 2.6 to 2.13; see `buffers_of`."""
    return module._parameters


def children_by_key(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own table of submodules. Torch 2.6 to 2.13; see `buffers_of`."""
    return module._modules


def is_persistent(module: nn.Module, key: str) -> bool:
    """Whether ``state_dict()`` holds the module's own buffer `key`.

    Torch 2.6 to 2.13. Publicly: look for it in a ``state_dict()``, which runs every hook on it.
    """
    return key not in module._non_persistent_buffers_set


def compiled_from(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, or `module` itself. Torch 2.6 to 2.13."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


def layout_versions(state_dict: Mapping[str, Any]) -> Any | None:
    """The layout versions that ``Module.state_dict()`` adds to its result; None for other mappings.

    Torch 2.6 to 2.13. ``load_state_dict`` recognises old layouts by it.
    """
    return getattr(state_dict, "_metadata", None)


def set_layout_versions(state_dict: Any, versions: Any) -> None:
    """Let `layout_versions` of an ordered dict be `versions`."""
    vars(state_dict)["_metadata"] = versions


# ------------------------------------------------------------------- optimizers and schedulers

AMP_SCALING_ATTR: Final = "_step_supports_amp_scaling"
"""The attribute with which a fused optimizer asks ``torch.amp.GradScaler`` not to unscale.

Torch 2.6 to 2.13.
"""

WAS_STEPPED_ATTR: Final = "_opt_called"
"""The attribute by which schedulers see whether their optimizer has stepped.

Torch 2.6 to 2.13. Torch sets it in the ``step`` that a scheduler has wrapped.
"""

_OPTIMIZERS_WRAPPER: Final = Optimizer.profile_hook_step(lambda: None).__code__
_SCHEDULERS: Final = "torch.optim.lr_scheduler"


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` within an optimizer's hooks; schedulers do not wrap it again. Torch 2.6 to 2.13."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True
    wrapped: Callable[..., Any] = hooked
    return wrapped


def is_step_wrapper(step: Any) -> bool:
    """Whether torch (an optimizer or a scheduler) made this function around an optimizer's step.

    Such wrappers are told from others by where they were made, and not by the marks on them,
    which a wrapper of the user's own takes over (`functools.wraps`). Torch 2.6 to 2.13.
    """
    is_schedulers = getattr(step, "__globals__", {}).get("__name__") == _SCHEDULERS
    return is_schedulers or getattr(step, "__code__", None) is _OPTIMIZERS_WRAPPER


def schedulers_within(scheduler: Any) -> Sequence[Any]:
    """The schedulers that a ``ChainedScheduler`` or ``SequentialLR`` steps. Torch 2.6 to 2.13."""
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


def set_last_lr(scheduler: Any, rates: list[Any]) -> None:
    """Let ``scheduler.get_last_lr()`` return `rates`. Torch 2.6 to 2.13."""
    scheduler._last_lr = rates


# ---------------------------------------------------------------------------------------- data


def copy_loader(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader of the same class, with the fields of `loader` but those that are given.

    It reads a map-style dataset in order, and starts worker processes of its own.

    Torch 2.6 to 2.13 (``in_order`` came in 2.7). ``DataLoader`` forbids assigning ``dataset`` and
    ``batch_sampler``, and cannot be asked for the arguments that it was made with.
    """
    copied: DataLoader[Any] = object.__new__(type(loader))
    fields = vars(copied)
    fields.update(vars(loader))
    fields.update(changed)
    fields["_dataset_kind"] = _DatasetKind.Map
    fields["_iterator"] = None  # persistent worker processes belong to the loader that started them
    if "in_order" in fields:
        fields["in_order"] = True
    return copied


def has_default_tensor_collate() -> bool:
    """Whether ``default_collate`` stacks tensors, which a program may change.

    Torch 2.6 to 2.13. The table is documented, its home and the function in it are private.
    """
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn and not any(
        isinstance((), kind) for kind in default_collate_fn_map
    )


def may_seed_cuda() -> bool:
    """Whether this process may touch CUDA: a loader's forked worker must not. Torch 2.6 to 2.13."""
    return torch.version.cuda is not None and not torch.cuda._is_in_bad_fork()


# ------------------------------------------------------------------------------ process groups

ALL_GATHER_ONE: Final = "_allgather_base"
"""The method of a process group for ``all_gather_into_tensor``, which needs a default group.

Torch 2.6 to 2.13; so `REDUCE_SCATTER_ONE` for ``reduce_scatter_tensor``.
"""

REDUCE_SCATTER_ONE: Final = "_reduce_scatter_base"


def devices_of(process_group: Any) -> list[torch.device] | None:
    """The device types a `dist.ProcessGroup` has backends for; None for a bare backend.

    Torch 2.6 to 2.13.
    """
    found: list[torch.device] | None = getattr(process_group, "_device_types", None)
    return found


def backend_of(process_group: Any, device: str) -> Any:
    """The backend of a process group for tensors on `device`; a bare backend is returned itself.

    Torch 2.6 to 2.13.
    """
    if isinstance(process_group, dist.ProcessGroup) and hasattr(process_group, "_get_backend"):
        return process_group._get_backend(torch.device(device))
    return process_group


def backend_timeout_s(backend: Any) -> float:
    """The timeout of a backend's collectives, in seconds; infinite if the backend has no options.

    Torch 2.6 to 2.13.
    """
    options = getattr(backend, "options", None)
    return math.inf if options is None else float(options._timeout.total_seconds())


def start_counter(backend: Any) -> Callable[[], int] | None:
    """Reads how many collectives and messages a backend has started; None if it counts none.

    Torch 2.13. gloo counts messages between two ranks as well, NCCL does not.
    """
    count: Callable[[], int] | None = getattr(backend, "_get_sequence_number_for_group", None)
    try:
        return None if count is None or count() < 0 else count
    except RuntimeError:
        return None


def set_backend_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout of collectives in the `options` of a new backend. Torch 2.6 to 2.13."""
    options._timeout = timeout


def group_of_one(devices: Iterable[str]) -> dist.ProcessGroup:
    """A process group of this rank alone, which sends nothing, for tensors on `devices`.

    Torch 2.6 to 2.13 (``FakeProcessGroup`` had a constructor until 2.8). ``dist.new_group`` needs
    a default group, and threads of one process would share it.
    """
    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for device in devices:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        alone._register_backend(torch.device(device), kind, make(0, 1))
    return alone


# ----------------------------------------------------------------------------- torch's own DDP


def with_parameters_reversed(ddp_class: DDPClass) -> DDPClass:
    """A decorator of subclasses of DDP: the reducer gets the model's parameters in reverse order.

    Torch 2.6 to 2.13. DDP orders its buckets by the first backward; no public interface tells it
    an order.
    """
    forward_order = ddp_class._build_params_for_reducer

    def backward_order(self: DistributedDataParallel) -> tuple[list[Any], list[bool]]:
        parameters, is_sparse = forward_order(self)  # type: ignore[no-untyped-call]
        return parameters[::-1], is_sparse[::-1]

    ddp_class._build_params_for_reducer = backward_order  # type: ignore[method-assign]
    return ddp_class


def ignore_in_ddp(
    ddp_class: type[DistributedDataParallel], module: nn.Module, names: Iterable[str]
) -> None:
    """Make DDP around `module` ignore the parameters and buffers that are called `names`.

    Torch 2.6 to 2.13. Torch looks for a name at the root with and without
    the dot before it.
    """
    both = [*names, *(f".{name}" for name in names)]
    ddp_class._set_params_and_buffers_to_ignore_for_model(module, both)


def ddp_kwargs_without_sync(ddp_class: type[DistributedDataParallel]) -> dict[str, Any]:
    """The arguments of DDP's constructor with which it sends no parameters and no buffers.

    Torch 2.6 to 2.13: ``init_sync`` came in 2.7 and ``forward_sync_buffers`` after 2.9. Until then
    ``broadcast_buffers`` stood for forwards, and a group of one had nothing to send at the start.
    """
    known = inspect.signature(ddp_class.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return dict.fromkeys({buffers, "init_sync"} & known.keys(), False)


def make_reducer(ddp: DistributedDataParallel) -> None:
    """Give `ddp` a new reducer, for the parameters that require a gradient now, without a hook.

    Torch 2.6 to 2.13: what DDP does when it is unpickled.
    """
    parameters, is_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, is_sparse, names, static_graph=False)
    forget_comm_hooks(ddp)


def forget_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Drop DDP's references to the hooks of its last reducer. Torch 2.6 to 2.13."""
    ddp._comm_hooks = []


def freeze_ddp_buckets(ddp: DistributedDataParallel) -> None:
    """Let a new reducer's buckets follow the order of its parameters, and stay as they are.

    Torch 2.6 to 2.13. DDP would rebuild them in the order of the first backward.
    """
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()


def zero_buckets(ddp: DistributedDataParallel) -> Sequence[Any]:
    """Zeros like every bucket of the reducer, as communication hooks are handed buckets.

    Torch 2.6 to 2.13; DDP's join uses it.
    """
    found: Sequence[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return found


# ------------------------------------------------- torch's compiler: torch 2.6 to 2.13, all of it

COMPILER: Final = "torch._dynamo"
"""The package that compiles; the public ``torch.compiler`` exists without importing it."""

COMPILERS_SETTINGS: Final = "torch._inductor.config"
"""The module that the public ``torch.use_deterministic_algorithms`` imports, to set it."""

DISABLE_DYNAMO_WRAPPER: Final = "_disable_dynamo.<locals>.inner"
"""The qualified name of the wrapper that `torch._compile._disable_dynamo` puts on a function."""

DYNAMO_DISABLE_CACHE_ATTR: Final = "__dynamo_disable"
"""The attribute in which `torch._compile._disable_dynamo` caches `torch._dynamo.disable(fn)`."""

USE_GRAD_WRAPPER: Final = "_use_grad_for_differentiable.<locals>._use_grad"
"""The qualified name of the wrapper around ``step`` in torch/optim/optimizer.py."""

NAMES_IN_USE_GRAD_WRAPPER: Final = frozenset(
    {"torch", COMPILER, "_dynamo", "graph_break", "cast", "Optimizer"}
    | {"is_grad_enabled", "set_grad_enabled", "defaults"}
)
"""The `co_names` of that wrapper; a wrapper that uses any other name is not replaced."""


def disable_dynamo_at_first_call(function: Callable[..., Any]) -> Any:
    """`function` with dynamo disabled; the wrapper imports the compiler at the first call.

    Publicly: ``torch.compiler.disable``, which imports the compiler at once.
    """
    return _compile._disable_dynamo(function)
