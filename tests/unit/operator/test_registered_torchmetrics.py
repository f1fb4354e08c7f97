# SPDX-License-Identifier: Apache-2.0
"""torchmetrics objects of an operator, held to the same objects over the whole data at once."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.metrics.torchmetrics_merge import compute_merged
from lockstep.operator.registered_torchmetrics import RegisteredMetrics

CLASSES, SAMPLES = 3, 37
GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(SAMPLES, 5, generator=GENERATOR)
TARGETS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)
DATA = TensorDataset(FEATURES, TARGETS)


def some_of_each_kind():
    """Sums, lists of rows, no reduction at all, a wrapper, and a collection that shares states."""
    return {
        "auroc": MulticlassAUROC(CLASSES),
        "by": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
        "all": MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]),
    }


class Classifier(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        self.model = nn.Linear(5, CLASSES)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.register(models=self.model, optimizers=optimizer, criterion=nn.CrossEntropyLoss())
        loader = DataLoader(DATA, 4)
        self.register_data(train_loader=loader, validation_loader=loader)
        self.register_metrics(**config["metrics"]())


def start(metrics, operator=Classifier, **arguments):
    return TorchTrainer(
        training_operator_cls=operator, config={"metrics": metrics}, num_shards=3, **arguments
    )


def expected(model):
    """Over the whole data at once, by the names that results have."""
    with torch.no_grad():
        output = model(FEATURES)
    values = {}
    for name, metric in some_of_each_kind().items():
        metric.update(output, TARGETS)
        value = metric.compute()
        parts = value if isinstance(value, dict) else {"": value}
        values |= {
            f"val_{name}_{key}" if key else f"val_{name}": part.item()
            for key, part in parts.items()
        }
    return values


def test_default_loops_count_every_sample_once():
    def metrics():
        return {"train": MulticlassAccuracy(CLASSES), "validation": some_of_each_kind()}

    with start(metrics) as trainer:
        result = trainer.validate()
        found = {key: value for key, value in result.items() if key in expected(nn.Linear(5, 3))}
        assert found == pytest.approx(expected(trainer.get_model()), rel=1e-6)
        assert len(found) == 6
        trained = trainer.train()
        assert 0 < trained["train_MulticlassAccuracy"] <= 1
        assert "val_auroc" not in trained
        # From nothing at every call.
        twice = trainer.validate(), trainer.validate()
        assert twice[0] == twice[1]


class OwnLoss(Classifier):
    def compute_loss(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        if self.config.get("counts", True):
            self.correlation.update(output[:, 0], output[:, 1])
        return nn.functional.cross_entropy(output, target)

    def setup(self, config):
        super().setup(config)
        self.correlation = PearsonCorrCoef()
        # One object for both: a call starts it anew.
        named = {"correlation": self.correlation}
        self.register_metrics(train=named, validation=named)


def test_a_loss_of_ones_own_updates_its_metrics():
    with start(dict, OwnLoss) as trainer:
        result = trainer.validate()
        with torch.no_grad():
            output = trainer.get_model()(FEATURES)
    truth = torch.corrcoef(output[:, :2].T)[0, 1].item()
    assert result["val_correlation"] == pytest.approx(truth, rel=1e-5)


class ValidatesWithin(Classifier):
    """A loop of one's own with a validation behind it. Metrics of sums, and of kept rows."""

    def setup(self, config):
        super().setup(config)
        self.correlation, self.auroc = PearsonCorrCoef(), MulticlassAUROC(CLASSES)
        self.held_out = MulticlassAUROC(CLASSES)
        both = {"correlation": self.correlation, "auroc": self.auroc}
        self.register_metrics(train=both, validation=both | {"held_out": self.held_out})

    def compute_loss(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        self.correlation.update(output[:, 0].detach(), output[:, 1].detach())
        self.auroc.update(output.detach(), target)
        if not self.model.training:
            if self.config["resets"]:
                self.auroc.reset(), self.correlation.reset()  # a number for each batch
            self.held_out.update(output.detach(), target)
        return nn.functional.cross_entropy(output, target)

    def train_epoch(self, iterator, info):
        result = super().train_epoch(iterator, info)
        if self.config["validates"]:
            self.validate(DataLoader(TensorDataset(FEATURES[:8], TARGETS[:8]), 4), {})
            assert self.held_out.update_count == 2
        return result


@pytest.mark.parametrize("resets", [False, True])
def test_a_validation_within_a_training_loop_does_not_count_for_the_training(resets):
    found = []
    for validates in (False, True):
        config = {"metrics": dict, "validates": validates, "resets": resets}
        with TorchTrainer(training_operator_cls=ValidatesWithin, config=config) as trainer:
            found.append(trainer.train())
    assert {"train_correlation", "train_auroc"} <= found[0].keys()
    assert found[0] == found[1]


def test_what_is_wrong_is_said():
    with pytest.raises(WrongTypeError, match="call it first"):
        start(lambda: {"validation": {"f1": MulticlassF1Score}})
    with pytest.raises(WrongTypeError, match="a dict of them"):
        start(lambda: {"train": nn.Linear(1, 1)})

    class Forgetful(OwnLoss):
        def compute_loss(self, batch, batch_info):
            return self.model(batch[0]).mean()

    with (
        start(dict, Forgetful) as trainer,
        pytest.raises(ConfigurationError, match="never updated"),
    ):
        trainer.validate()


def test_ranks_without_samples_do_not_count():
    ranks = [PearsonCorrCoef() for _ in range(3)]
    ranks[0].update(FEATURES[:20, 0], FEATURES[:20, 1])
    ranks[2].update(FEATURES[20:, 0], FEATURES[20:, 1])
    whole = torch.corrcoef(FEATURES[:, :2].T)[0, 1].item()
    before = ranks[0].mean_x.clone()
    assert compute_merged([{"r": rank} for rank in ranks])["r"] == pytest.approx(whole, rel=1e-5)
    assert torch.equal(ranks[0].mean_x, before)
    assert compute_merged([{"r": PearsonCorrCoef()}]) == {}
    weighted = [MeanMetric(), MeanMetric()]
    weighted[0].update(1.0, weight=3)
    weighted[1].update(5.0, weight=1)
    assert compute_merged([{"m": each} for each in weighted]) == {"m": 2.0}


def test_a_step_can_be_taken_back():
    output, target = FEATURES[:, :CLASSES].softmax(dim=1), TARGETS
    once, twice = RegisteredMetrics(), RegisteredMetrics()
    for measures in (once, twice):
        given = some_of_each_kind()
        measures.register("validation", given, torch.device("cpu"), lambda: False)
    once.observe("validation", output, target)
    empty = twice.mark()
    twice.observe("validation", output[:9], target[:9])
    twice.restore(empty)
    twice.observe("validation", output[:20], target[:20])
    mark = twice.mark()
    for _ in range(2):
        twice.observe("validation", output[20:], target[20:])
        twice.restore(mark)
    twice.observe("validation", output[20:], target[20:])
    values = [compute_merged([each.copy_to_cpu("validation")]) for each in (once, twice)]
    assert values[1] == pytest.approx(values[0], rel=1e-6)


def collection():
    """Metrics with states of one shape, which are equal only while they have counted nothing."""
    return MetricCollection({f"top{k}": MulticlassAccuracy(CLASSES, top_k=k) for k in (1, 2)})


@pytest.mark.parametrize("purposes", [("train",), ("train", "validation")])
def test_a_batch_that_does_not_count_never_reaches_a_collection(purposes):
    """Not its choice of metrics that share states either, which it makes by its first update."""
    output, target = FEATURES[:, :CLASSES].softmax(dim=1), TARGETS
    registered, ours, plain = RegisteredMetrics(), collection(), collection()
    counts_nothing = True
    for purpose in purposes:
        registered.register(purpose, ours, torch.device("cpu"), lambda: counts_nothing)
    registered.observe("train", output, target)
    ours.update(output, target)
    assert compute_merged([registered.copy_to_cpu("train")]) == {}
    counts_nothing = False
    plain.update(output, target)
    registered.observe("train", output, target)
    counts_nothing = True
    registered.observe("train", output, target)
    assert compute_merged([registered.copy_to_cpu("train")]) == {
        f"train_{name}": value.item() for name, value in plain.compute().items()
    }
    assert ours.compute_groups == plain.compute_groups == {0: ["top1"], 1: ["top2"]}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_registered_collection_counts_for_itself(copied):
    output, target = FEATURES[:, :CLASSES].softmax(dim=1), TARGETS
    ours = collection()
    RegisteredMetrics().register("train", ours, torch.device("cpu"), lambda: True)
    other = copied(ours)
    other.update(output, target)
    assert [each.update_count for each in other.values()] == [1, 1]
    assert [each.update_count for each in ours.values()] == [0, 0]
