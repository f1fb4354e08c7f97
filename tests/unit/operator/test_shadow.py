# SPDX-License-Identifier: Apache-2.0
"""Which bits are right, of those that several workers have computed."""

import pytest
import torch
from torch import nn

from harness import run_ranks
from lockstep import TorchTrainer, local
from lockstep.data import ShardAssignment
from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.operator import Options, RankContext, TrainingOperator
from lockstep.operator import shadow as module
from lockstep.operator.registration import conclude_setup, registered_parts
from lockstep.operator.shadow import Shadow, right_bits


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        (["a", "b", None], [None, None, "a"], "a"),
        (["a", "b", None], [None, None, "b"], "b"),
        (["a", "b", None], [None, None, "c"], None),
        (["a", "b"], ["b", "b"], "b"),
        (["a", "b"], ["a", "a"], "a"),
        (["a", "b"], ["a", "b"], None),  # each insists: one of the two is always wrong
        (["a", "b"], ["b", "a"], None),  # each agrees with what the other one said before
    ],
)
def test_right_is_what_two_workers_have_computed(first, second, right):
    assert right_bits(first, second) == right


class Linear(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(2, 1)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"num_workers": 2}, "reproducible=True"),
        ({"reproducible": True}, "num_workers=3"),
        ({"reproducible": True, "num_workers": 2, "add_dist_sampler": False}, "add_dist_sampler"),
        ({"reproducible": True, "num_workers": 2, "wrap_ddp": False}, "wrap_ddp=True"),
    ],
)
def test_where_there_is_nothing_to_compare_it_is_refused(arguments, fix):
    with pytest.raises(ConfigurationError, match="shadow_every") as refused:
        TorchTrainer(training_operator_cls=Linear, shadow_every=10, **arguments)
    assert fix in str(refused.value)


class HasItsOwn(TrainingOperator):
    """Each worker has a layer of the criterion, or a buffer of the model, for itself."""

    def setup(self, config):
        model, criterion = nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1))
        parameters = [*model.parameters(), *criterion.parameters()]
        local({"buffer": model.running_mean, "layer": criterion[0]}[config["local"]])
        self.register(
            models=model, optimizers=torch.optim.SGD(parameters, lr=0.1), criterion=criterion
        )


@pytest.mark.parametrize(
    ("marked", "names"), [("buffer", "`running_mean`"), ("layer", "`0.weight`, `0.bias`")]
)
def test_a_model_with_tensors_of_each_worker_s_own_is_refused_when_setup_has_ended(marked, names):
    """Each worker's bits of a shard would differ, and sound hardware would be accused."""
    for every in (0, 1):
        options = Options(reproducible=True, shadow_every=every)
        operator = HasItsOwn({"local": marked}, RankContext(options=options))
        operator.setup(operator.config)
        run = registered_parts(operator)
        run.sync.detach()
        if every == 0:
            conclude_setup(operator, run, None)
            continue
        with pytest.raises(NotAvailableError, match=r"lockstep\.local") as refused:
            conclude_setup(operator, run, None)
        assert names in str(refused.value)


@pytest.mark.parametrize("name", ["shadow_every", "shadow_limit"])
def test_numbers_that_cannot_be_right(name):
    with pytest.raises(ConfigurationError, match=name):
        TorchTrainer(training_operator_cls=Linear, **{name: -1})


def test_a_rank_on_other_hardware_has_nobody_to_compare_with(monkeypatch):
    """Two ranks alike and a third one that is not: it is named on all of them."""
    processors = ["old", "new", "old"]
    monkeypatch.setattr(module, "describe_hardware", lambda device: {"processor": device})

    def body(group):
        context = RankContext(
            world_rank=group.rank,
            world_size=3,
            group=group,
            device=processors[group.rank],
            shard_assignment=ShardAssignment(3, range(group.rank, group.rank + 1), seed=0),
            options=Options(reproducible=True),
        )
        with pytest.raises(NotAvailableError, match="rank 1"):
            Shadow(1, 3).compare_hardware(context)
        # In a group that forms later such a rank's shards are left out.
        shadow = Shadow(1, 3)
        return [shadow.begin_step(context, committed, ()) is None for committed in range(3)]

    assert run_ranks(3, body) == [[False, True, False]] * 3
