# SPDX-License-Identifier: Apache-2.0
"""`predict` on several workers: every sample once, in order, whatever keeps them in step."""

import os

import pytest
import torch
from tests.ray.operators import DefaultLoop, problem
from tests.ray.surface_operators import OwnWrapper
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


class Predicts(DefaultLoop):
    def predict_batch(self, batch, batch_info):
        if batch[0].isnan().any():
            raise LookupError(f"not a number on rank {self.world_rank}")
        return {"rank": [self.world_rank] * len(batch[0]), "out": super().predict_batch(batch, {})}


def start(operator=Predicts, **arguments):
    arguments = {"num_workers": 2, "config": {BATCH_SIZE: 12}, **arguments}
    return TorchTrainer(training_operator_cls=operator, **arguments)


def loader(samples=37, **arguments):
    # 37 samples in batches of 2 and 12: in the last one there is nothing for rank 1.
    return DataLoader(TensorDataset(problem()[0][:samples]), 6, **arguments)


def check(two, samples=37):
    features = problem()[0][:samples]
    outputs = two.predict(loader(samples, shuffle=True))
    with torch.no_grad():
        expected = two.get_model()(features)
    assert torch.allclose(torch.stack([each["out"] for each in outputs]), expected, rtol=1e-12)
    return outputs


def test_two_workers_share_the_samples_and_the_run_goes_on():
    with start() as two:
        two.train()
        outputs = check(two)
        assert {each["rank"] for each in outputs} == {0, 1}
        check(two, samples=1)
        broken = TensorDataset(torch.full((5, 5), torch.nan, dtype=torch.float64))
        with pytest.raises(LookupError, match="on rank"):
            two.predict(DataLoader(broken, 2))
        assert two.train()["epoch"] == 2


class Waits(DefaultLoop):
    """Rank 0 waits at the pipe that `config` names; rank 1 fails at once."""

    def predict_batch(self, batch, batch_info):
        if self.world_rank == 1:
            raise LookupError("on rank 1")
        with open(self.config["pipe"], "rb", buffering=0) as pipe:
            pipe.read(1)
        return super().predict_batch(batch, batch_info)


@pytest.mark.slow
def test_a_failure_while_another_worker_goes_on_arrives_at_once_and_the_run_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Held open for both: nobody waits for who has not come, or has gone.
    held = os.open(pipe, os.O_RDWR)
    try:
        with start(Waits, config={BATCH_SIZE: 12, "pipe": str(pipe)}) as two:
            two.train()
            with pytest.raises(LookupError, match="on rank 1") as caught:
                two.predict(loader(12))
            assert "raised on rank 1" in caught.value.__notes__[-1]
            os.write(held, b"." * 10)
            assert two.train()["epoch"] == 2
    finally:
        os.close(held)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(lambda: (problem()[0][0],), None)


class FailsOnRank1(DefaultLoop):
    def predict_batch(self, batch, batch_info):
        if self.world_rank == 1:
            raise LookupError("on rank 1")
        return super().predict_batch(batch, batch_info)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["replicate", "fsdp"])
def test_after_a_failure_the_next_call_does_not_wait_for_the_others_end(sync):
    """Under fsdp the others wait in a gather, in which rank 1 does not come."""
    with start(FailsOnRank1, sync=sync) as two:
        two.train(num_steps=3)
        with pytest.raises(LookupError, match="on rank 1"):
            two.predict(DataLoader(Endless(), 6))
        assert two.train()["batch_count"] == 1
        assert two.status()["recoveries"] == []


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ddp", "fsdp", "parameter_server", "data_parallel"])
def test_under_every_way_to_synchronise(sync):
    with start(sync=sync) as two:
        two.train()
        check(two)
        two.train()
        check(two)


@pytest.mark.slow
def test_a_wrapper_of_the_users_own():
    with start(OwnWrapper, wrap_ddp=False) as two:
        two.train()
        with torch.no_grad():
            expected = two.get_model()(problem()[0])
        labelled = DataLoader(TensorDataset(*problem()), 6)
        assert torch.allclose(torch.stack(two.predict(labelled)), expected, rtol=1e-12)


@pytest.mark.slow
def test_three_workers_and_rank_0_here():
    with start(num_workers=3, num_shards=5, use_local=True) as three:
        check(three)
