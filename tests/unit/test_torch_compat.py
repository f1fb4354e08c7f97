# SPDX-License-Identifier: Apache-2.0
"""What `lockstep._torch_compat` says of torch is so, on the torch that is installed.

Needs torch and pytest alone, so that it can be run on every version that is claimed there.
"""

import ast
import inspect
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import _utils as data_utils

from lockstep import _torch_compat as compat
from lockstep._torch_compat import loader_iterators
from lockstep._torch_compat.device_mesh import forget_groups, make_mesh


def leaf(*shape):
    return torch.ones(*shape, requires_grad=True)


class Calls(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, value, function):
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


def test_each_entry_says_for_which_versions_it_is_and_is_tested_here():
    tree = ast.parse(Path(compat.__file__).read_text())
    here = Path(__file__).read_text()
    for entry, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(entry, ast.FunctionDef):
            name, words = entry.name, ast.get_docstring(entry)
        elif isinstance(entry, ast.AnnAssign) and not entry.target.id.startswith("_"):
            assert isinstance(following, ast.Expr) or entry.target.id == "REDUCE_SCATTER_ONE"
            name, words = entry.target.id, ast.unparse(following)
        else:
            continue
        assert words
        assert f"compat.{name}" in here, f"{name} has no test"


# ------------------------------------------------------------------------------------- tensors


def test_a_write_in_place_raises_the_version_of_every_view():
    tensor = torch.zeros(4)
    view, before = tensor[:2], compat.version_of(tensor)
    view.add_(1)
    assert compat.version_of(tensor) == compat.version_of(view) == before + 1
    torch.autograd.graph.increment_version(tensor)
    assert compat.version_of(tensor) == before + 2


def test_a_graph_that_has_saved_a_tensor_is_a_reference_to_it():
    tensor = torch.ones(3)
    alone = compat.use_count(tensor)
    product = leaf(3) * tensor
    assert compat.use_count(tensor) == alone + 1
    del product
    assert compat.use_count(tensor) == alone


def test_views_are_told_from_tensors_of_their_own():
    tensor = torch.ones(3)
    assert compat.is_view(tensor[1:])
    assert not compat.is_view(tensor)
    with pytest.raises(TypeError):
        compat.is_view(None)


def test_tensors_in_one_storage_share_its_key_and_count():
    tensor, other = torch.zeros(4), torch.zeros(4)
    assert compat.storage_key(tensor) == compat.storage_key(tensor[1:])
    assert compat.storage_key(tensor) != compat.storage_key(other)
    alone, view = compat.storage_use_count(tensor), tensor.detach()
    assert compat.storage_use_count(view) == alone + 1


def test_a_sparse_tensor_has_parts_before_it_is_coalesced():
    tensor = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False)
    indices, values = compat.sparse_indices_and_values(tensor)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1.0, 2.0])


def test_lists_of_tensors_at_once():
    first, second = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 4.0)]
    compat.copy_each(first, second)
    assert all(map(torch.equal, first, second))
    compat.zero_each(first)
    assert not any(tensor.any() for tensor in first)
    compat.lerp_each(first, second, 0.25)
    assert first[1].tolist() == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------------------------ autograd


def test_each_backward_is_a_task_and_ends_what_is_queued_in_it():
    assert compat.current_graph_task() == -1
    tasks, order = [], []

    def inner():
        tasks.append(compat.current_graph_task())
        compat.call_at_end_of_task(lambda: order.append("inner ended"))

    def outer():
        tasks.append(compat.current_graph_task())
        compat.call_at_end_of_task(lambda: order.append("outer ended"))
        with torch.enable_grad():
            Calls.apply(leaf(1), inner).sum().backward()
        tasks.append(compat.current_graph_task())
        order.append("node of outer")

    Calls.apply(leaf(1), outer).sum().backward()
    assert order == ["inner ended", "node of outer", "outer ended"]
    assert tasks[0] == tasks[2] != tasks[1]
    assert min(tasks) >= 0


def test_a_node_in_python_runs_below_the_known_frame():
    found = []

    def look():
        frame = sys._getframe()
        while frame is not None:
            found.append(frame.f_code)
            frame = frame.f_back

    Calls.apply(leaf(1), look).sum().backward()
    assert found.count(compat.PYTHON_NODE) == 1


def test_what_a_backward_will_run():
    first, second, answers = leaf(2), leaf(2), []
    nodes = [param.view_as(param).grad_fn.next_functions[0][0] for param in (first, second)]

    def ask():
        answers.append([compat.will_execute_node(node) for node in nodes])

    Calls.apply(first * second, ask).sum().backward(inputs=[first])
    assert answers == [[True, False]]

    def ask_of_grad():
        with pytest.raises(RuntimeError):
            compat.will_execute_node(nodes[0])

    torch.autograd.grad(Calls.apply(first * second, ask_of_grad).sum(), first)


def test_a_table_of_hooks_that_was_put_in_is_looked_into():
    param, seen = leaf(2), []
    assert compat.tensor_hooks(param) is None
    assert compat.post_accumulate_grad_hooks(param) is None
    compat.set_tensor_hooks(param, {0: lambda gradient: seen.append("before")})
    compat.set_post_accumulate_grad_hooks(param, {0: lambda tensor: seen.append("after")})
    assert list(compat.tensor_hooks(param)) == list(compat.post_accumulate_grad_hooks(param)) == [0]
    param.sum().backward()
    assert seen == ["before", "after"]
    other = leaf(2)
    other.register_hook(lambda gradient: None)
    other.register_post_accumulate_grad_hook(lambda tensor: None)
    assert len(compat.tensor_hooks(other)) == len(compat.post_accumulate_grad_hooks(other)) == 1


def test_operators_of_a_dispatch_mode_name_their_arguments():
    found = []

    class Look(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(compat.arguments_of(func))
            return func(*args, **(kwargs or {}))

    with Look():
        torch.nn.functional.dropout(torch.ones(2), 0.5, training=True)
    assert any("p" in names for names in found)


# ------------------------------------------------------------------------------------- modules


def test_what_kind_of_layer_it_is():
    for layer in (nn.BatchNorm1d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)):
        assert isinstance(layer, compat.BatchNorm)
        assert isinstance(layer, compat.Norm)
    assert isinstance(nn.InstanceNorm2d(1), compat.Norm)
    assert not isinstance(nn.InstanceNorm2d(1), compat.BatchNorm)
    assert isinstance(nn.AlphaDropout(), compat.Dropout)
    assert issubclass(nn.CrossEntropyLoss, compat.Loss)
    assert not isinstance(nn.Linear(1, 1), compat.Norm | compat.Dropout | compat.Loss)


def test_a_module_is_kept_in_its_tables():
    module = nn.BatchNorm1d(2)
    module.register_buffer("gone", None)
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    assert vars(module).keys() >= compat.MODULE_TABLES
    assert list(compat.parameters_of(module)) == ["weight", "bias"]
    assert compat.buffers_of(module)["gone"] is None
    twice = compat.children_by_key(nn.Sequential(module, module))
    assert twice == {"0": module, "1": module}
    compat.buffers_of(module)["passing"] = torch.ones(1)
    assert module.passing.item() == 1.0
    assert not compat.is_persistent(module, "passing")
    assert compat.is_persistent(module, "running_mean")


@pytest.mark.timeout(240)
def test_a_compiled_module_is_made_from_another():
    program = (
        "import torch; from lockstep import _torch_compat as compat; plain = torch.nn.Linear(1, 1);"
        "compiled = torch.compile(plain, backend='eager'); assert compiled is not plain;"
        "assert compat.compiled_from(compiled) is plain is compat.compiled_from(plain)"
    )  # in a process of its own: it imports the compiler
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_a_state_dict_knows_the_versions_of_its_layouts():
    state = nn.BatchNorm1d(2).state_dict()
    versions = compat.layout_versions(state)
    assert versions[""]["version"] == 2
    assert compat.layout_versions({}) is None
    copied = type(state)(state)
    compat.set_layout_versions(copied, versions)
    assert compat.layout_versions(copied) is versions


# ------------------------------------------------------------------- optimizers and schedulers


def test_marks_on_an_optimizer():
    optimizer = torch.optim.SGD([leaf(1)], lr=0.1, fused=True)
    assert vars(optimizer)[compat.AMP_SCALING_ATTR]
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    vars(optimizer)[compat.WAS_STEPPED_ATTR] = True
    lr_scheduler.StepLR(optimizer, 1).step()


def test_a_step_with_hooks_around_it():
    optimizer, seen = torch.optim.SGD([leaf(1)], lr=0.1), []

    def step(self, closure=None):
        seen.append("step")

    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    bound = compat.with_step_hooks(step).__get__(optimizer)
    optimizer.step = bound
    lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step is bound
    optimizer.step()
    assert seen == ["before", "step", "after"]


def test_torchs_wrappers_around_a_step_are_known():
    optimizer = torch.optim.SGD([leaf(1)], lr=0.1)
    assert compat.is_step_wrapper(type(optimizer).step)
    lr_scheduler.StepLR(optimizer, 1)
    assert compat.is_step_wrapper(getattr(optimizer.step, "__func__", optimizer.step))
    assert not compat.is_step_wrapper(lambda self: None)


def test_schedulers_in_others_and_their_rates():
    optimizer = torch.optim.SGD([leaf(1)], lr=0.1)
    parts = [lr_scheduler.StepLR(optimizer, 1), lr_scheduler.ConstantLR(optimizer)]
    assert list(compat.schedulers_within(lr_scheduler.ChainedScheduler(parts))) == parts
    assert list(compat.schedulers_within(parts[0])) == []
    compat.set_last_lr(parts[0], [0.7])
    assert parts[0].get_last_lr() == [0.7]


# ---------------------------------------------------------------------------------------- data


class Loader(DataLoader):
    """With a field of its own."""


def test_a_loader_like_another():
    loader = Loader(TensorDataset(torch.arange(6)), batch_size=2, timeout=0.0)
    loader.mark = "kept"
    copied = compat.copy_loader(
        loader, dataset=list(range(6)), batch_sampler=[[5], [1, 2]], collate_fn=list
    )
    assert type(copied) is Loader
    assert copied.mark == "kept"
    assert list(copied) == [[5], [1, 2]]
    assert len(list(loader)) == 3


def test_processes_of_a_loader_end_when_they_are_told_to():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    iter(loader)
    iterator = loader_iterators.forget_iterator(loader)
    assert loader_iterators.forget_iterator(loader) is None
    process = iterator._workers[0]
    loader._iterator = iterator
    assert not loader_iterators.has_lost_process(loader)
    loader_iterators.shut_down(iterator)
    process.join(20)
    assert not process.is_alive()
    assert loader_iterators.has_lost_process(loader)
    loader_iterators.shut_down(None)


def test_collating_that_a_program_has_changed(monkeypatch):
    assert compat.has_default_tensor_collate()
    table = data_utils.collate.default_collate_fn_map
    monkeypatch.setitem(table, torch.Tensor, lambda batch, collate_fn_map: batch)
    assert not compat.has_default_tensor_collate()


def test_cuda_is_not_seeded_where_there_is_none():
    assert compat.may_seed_cuda() == (torch.version.cuda is not None)


# ------------------------------------------------------------------------------ process groups


@pytest.fixture
def gloo():
    store = dist.HashStore()
    return dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=7))


def test_a_raw_backend_says_its_timeout(gloo):
    assert compat.devices_of(gloo) is None
    assert compat.backend_of(gloo, "cpu") is gloo
    assert compat.backend_timeout_s(gloo) == 7.0
    assert compat.backend_timeout_s(object()) == math.inf


def test_the_timeout_of_a_backend_can_be_set():
    options = dist.ProcessGroupGloo._Options()
    compat.set_backend_timeout(options, timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)


def test_one_tensor_of_each_rank(gloo):
    gathered, scattered = torch.zeros(2), torch.zeros(2)
    getattr(gloo, compat.ALL_GATHER_ONE)(gathered, torch.ones(2)).wait()
    assert gathered.tolist() == [1.0, 1.0]
    options = dist.ReduceScatterOptions()
    getattr(gloo, compat.REDUCE_SCATTER_ONE)(scattered, torch.ones(2), options).wait()
    assert scattered.tolist() == [1.0, 1.0]


def test_a_backend_counts_what_it_starts(gloo):
    started = compat.start_counter(gloo)
    before = started()
    gloo.allreduce([torch.ones(2)]).wait()
    getattr(gloo, compat.ALL_GATHER_ONE)(torch.zeros(2), torch.ones(2)).wait()
    assert started() == before + 2
    assert compat.start_counter(compat.backend_of(compat.group_of_one({"cpu"}), "cpu")) is None
    assert compat.start_counter(object()) is None


def test_a_group_of_one_sends_nothing():
    alone = compat.group_of_one({"cpu"})
    assert compat.devices_of(alone) == [torch.device("cpu")]
    assert compat.backend_of(alone, "cpu") is not alone
    tensor = torch.ones(2)
    alone.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]


def test_a_mesh_without_groups_by_name():
    class Mesh:
        def __init__(self):
            self._pg_registry = {"group": object()}

    mesh = Mesh()
    forget_groups(mesh)
    assert mesh._pg_registry == {}


def test_a_result_is_on_the_mesh_of_this_time():
    """A process that was rank 2 of 3, and is rank 1 of 3 now."""
    for rank in (2, 1):
        dist.init_process_group("fake", rank=rank, world_size=3, store=dist.HashStore())
        try:
            mesh = make_mesh(dist.group.WORLD, "cpu")
            rows = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            assert torch.zeros_like(rows).device_mesh.get_coordinate() == (rank,)
        finally:
            dist.destroy_process_group()


# ----------------------------------------------------------------------------- torch's own DDP


@compat.with_parameters_reversed
class Replica(DistributedDataParallel):
    """With the last parameter first."""


def test_what_fully_shard_sets_on_a_module():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        module = nn.Linear(4, 2)
        before = set(vars(module))
        mesh = make_mesh(dist.group.WORLD, "cpu")
        fully_shard(module, mesh=mesh)
        forget_groups(mesh)
    finally:
        dist.destroy_process_group()
    found = set(vars(module)) - before
    assert len(found) > 2
    assert all(map(compat.is_set_by_fully_shard, found))
    assert not any(map(compat.is_set_by_fully_shard, before))


def test_ddp_of_one_rank_whose_buckets_do_not_move():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)).double()
    compat.ignore_in_ddp(Replica, module, ["1.weight", "1.bias"])
    quiet = compat.ddp_kwargs_without_sync(Replica)
    assert quiet.keys() <= inspect.signature(DistributedDataParallel.__init__).parameters.keys()
    assert not any(quiet.values())
    ddp = Replica(module, process_group=compat.group_of_one({"cpu"}), **quiet)
    orders = []

    def carry(state, bucket):
        orders.append([id(param) for param in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def take_hold():
        compat.freeze_ddp_buckets(ddp)
        ddp.register_comm_hook(None, carry)
        buckets = compat.zero_buckets(ddp)
        assert not any(bucket.buffer().any() for bucket in buckets)
        return [id(param) for bucket in buckets for param in bucket.parameters()]

    def after_backward():
        orders.clear()
        ddp(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
        return [each for bucket in orders for each in bucket]

    kept = [module[2].bias, module[2].weight, module[0].bias, module[0].weight]
    first = take_hold()
    assert first == [id(param) for param in kept]
    assert after_backward() == after_backward() == first
    module[0].bias.requires_grad_(False)
    compat.make_reducer(ddp)
    second = take_hold()
    assert second == [id(param) for param in kept if param.requires_grad]
    assert after_backward() == second
    compat.forget_comm_hooks(ddp)
    assert ddp._comm_hooks == []


# ---------------------------------------------------------------------------- torch's compiler

_BEFORE_THE_COMPILER = """
import sys, torch
from lockstep import _torch_compat as compat
name = lambda method: method.__code__.co_qualname
assert compat.COMPILER not in sys.modules and compat.COMPILERS_SETTINGS not in sys.modules
assert any(hasattr(m, "__wrapped__") and name(m) == compat.DISABLE_DYNAMO_WRAPPER
           for m in vars(torch.optim.Optimizer).values() if hasattr(m, "__code__"))
assert name(torch.optim.SGD.step) == compat.USE_GRAD_WRAPPER
assert compat.NAMES_IN_USE_GRAD_WRAPPER.issuperset(torch.optim.SGD.step.__code__.co_names)
plain = lambda value: value + 1
kept_out = compat.disable_dynamo_at_first_call(plain)
assert name(kept_out) == compat.DISABLE_DYNAMO_WRAPPER and compat.COMPILER not in sys.modules
assert kept_out(1) == 2 and compat.COMPILER in sys.modules
assert compat.DYNAMO_DISABLE_CACHE_ATTR in vars(plain)
torch.use_deterministic_algorithms(True)
assert compat.COMPILERS_SETTINGS in sys.modules
"""


@pytest.mark.timeout(240)
def test_the_compiler_is_asked_when_it_is_needed():
    subprocess.run([sys.executable, "-c", _BEFORE_THE_COMPILER], check=True, timeout=200)
