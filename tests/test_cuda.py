# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show. These alone may be skipped, where there is none."""

import copy
import datetime
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.serialization import dumps
from lockstep.sync import DataParallelModel, replicate
from lockstep.sync.sharded_sync import ShardedSync

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnGpu(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        # Without a bias, whose gradient is zero under a norm: Adam would scale up its rounding.
        self.model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        data = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
        self.register_data(train_loader=DataLoader(data, 6), validation_loader=DataLoader(data, 6))


def trainer(**arguments):
    return TorchTrainer(training_operator_cls=OnGpu, **arguments)


def test_F36_device_ids_of_one_gpu_worker():
    with trainer() as one:
        operator = one.get_local_operator()
        assert operator.use_gpu
        assert operator.device == torch.device("cuda", 0)
        assert operator.device_ids == [0]
        assert next(operator.model.parameters()).device == operator.device
        assert one.train()["num_samples"] == 22


def test_a_tensor_arrives_on_the_cpu_of_a_driver_without_a_gpu():
    parameter = nn.Parameter(torch.ones(2, device="cuda"), requires_grad=False)
    sent = {"loss": torch.ones((), device="cuda"), "weights": [parameter], "count": torch.ones(1)}
    arrived = pickle.loads(dumps(sent))
    (weights,) = arrived["weights"]
    assert {each.device.type for each in (arrived["loss"], weights, arrived["count"])} == {"cpu"}
    assert isinstance(weights, nn.Parameter)
    assert not weights.requires_grad


def test_F40_the_model_comes_back_on_the_cpu(tmp_path):
    with trainer() as one:
        one.train()
        model = one.get_model()
        state = one.state_dict()
        path = one.save(tmp_path / "run.pt")
        one.train()
        one.load(path)
        after = one.get_model()
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())
    assert all(tensor.device.type == "cpu" for tensor in state["models"][0].values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])
    with trainer(use_gpu=False) as elsewhere:
        elsewhere.load(path)
        assert elsewhere.validate()["num_samples"] == 22


def test_mixed_precision_trains():
    for precision in ("bf16", "fp16"):
        with trainer(precision=precision) as one:
            losses = [one.train()["train_loss"] for _ in range(5)]
        assert losses[-1] < losses[0]


@pytest.fixture
def group_of_a_worker():
    """As a worker forms it, of one rank."""
    from lockstep.worker.process_group import Rendezvous, form_group, leave_group

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = Rendezvous("127.0.0.1", store.port, 0, "nccl", True, 77.0)
    group = form_group(rendezvous, 0, 1, torch.device("cuda", 0))
    yield group
    leave_group([group]).join()


def test_C21_timeout_reaches_nccl(group_of_a_worker):
    for device in ("cuda", "cpu"):
        options = group_of_a_worker._get_backend(torch.device(device)).options
        assert options._timeout == datetime.timedelta(seconds=77)


def test_gradients_travel_by_nccl_and_metadata_on_the_cpu(group_of_a_worker):
    group = Group(group_of_a_worker)
    assert group.device == torch.device("cpu")
    assert group.exchange("here") == ["here"]
    assert group.monitored_all_gather([2.0]) == [[2.0]]
    model = nn.Linear(3, 2).to("cuda")
    sync = replicate(model, group=group)
    sync.backward(model(torch.ones(4, 3, device="cuda")).square().mean(), weight=4)
    group.confirm()
    assert model.weight.grad.abs().sum() > 0
    sync.detach()
    group.give_up()
    with pytest.raises(PeerLostError, match="given up"):
        group.all_reduce(torch.ones(1, device="cuda"))


@pytest.mark.parametrize("sync", ["parameter_server", "data_parallel"])
def test_another_sync_trains_as_replicate_does(sync, tmp_path):
    models = []
    for way in ("replicate", sync):
        with trainer(sync=way) as one:
            one.train()
            path = one.save(tmp_path / way)
            one.train()
            one.load(path)
            one.train()
            models.append(one.get_model())
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_replicas_on_one_gpu_and_on_the_cpu():
    layer = nn.Linear(3, 2, dtype=torch.float64, device="cuda")
    features = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.autograd.grad(layer(features.cuda()).square().mean(), layer.parameters())
    devices = [torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 0)]
    DataParallelModel(layer, devices)(features).square().mean().backward()
    for param, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient)


def _normalised_over_ranks(rank: int, port: int) -> None:
    """Uneven rows on two ranks that share a GPU, over gloo: NCCL wants a device for each."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 3, generator=generator, dtype=torch.float64).to(device)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device).double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    mine = rows[:5] if rank == 0 else rows[5:]
    sync = replicate(model)
    sync.backward(model(mine).square().sum(1).mean(), weight=len(mine))
    plain(rows).square().sum(1).mean().backward()
    for found, true in zip(model.parameters(), plain.parameters(), strict=True):
        # Its kernels keep statistics in lower precision than float64.
        assert (found.grad - true.grad).norm() <= 1e-5 * max(true.grad.norm(), 1e-3)
    sync.detach()
    dist.destroy_process_group()


def test_sync_batch_norm_over_uneven_ranks_is_one_batch():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_normalised_over_ranks, (store.port,), nprocs=2)


def test_units_over_nccl_train_as_the_plain_model(group_of_a_worker):
    device = torch.device("cuda", 0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device).double()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    first = model[0]
    group = Group(group_of_a_worker)
    sync = ShardedSync([model], group, optimizers[:1], shard=lambda module: module is first)
    rows = torch.randn(5, 3, dtype=torch.float64, device=device)
    for _ in range(3):
        sync.backward(model(rows).square().mean())
        plain(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(rows), plain(rows), rtol=0, atol=1e-13)
    sync.detach()
