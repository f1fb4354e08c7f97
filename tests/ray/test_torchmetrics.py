# SPDX-License-Identifier: Apache-2.0
"""torchmetrics objects on two workers with uneven shards: the values of the whole data."""

import pytest
from tests.unit.operator.test_registered_torchmetrics import (
    CLASSES,
    DATA,
    Classifier,
    expected,
    some_of_each_kind,
)
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


class OwnBatches(Classifier):
    """A worker that has no samples in a step borrows some, which must not be counted."""

    def setup(self, config):
        super().setup({"metrics": dict})
        self.seen, metrics = MulticlassAccuracy(CLASSES), some_of_each_kind()
        self.register_metrics(train={"seen": self.seen}, validation=metrics)
        loader = DataLoader(DATA, config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    def train_batch(self, batch, batch_info):
        self.seen.update(self.model(batch[0]), batch[1])
        self.backward(self.model(batch[0]).mean())
        return {}

    def state_dict(self):
        return {"counted": int(self.seen.tp.sum() + self.seen.fn.sum())}


@pytest.mark.slow
def test_two_workers_count_as_one_process_does():
    with TorchTrainer(
        training_operator_cls=OwnBatches, num_workers=2, config={BATCH_SIZE: 12}
    ) as two:
        result = two.validate()
        truth = expected(two.get_model())
        assert {key: result[key] for key in truth} == pytest.approx(truth, rel=1e-6)
        trained = two.train(reduce_results=False)
        assert all(0 <= each["train_seen"] <= 1 for each in trained)
        # 37 samples in twelves: in the last step there is one, for rank 0, which rank 1 borrows.
        counted = two.apply_all_operators(lambda operator: operator.state_dict()["counted"])
        assert counted == [19, 18]
