# SPDX-License-Identifier: Apache-2.0
"""RaySGD's surface on several workers, held to one worker in this process."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from tests.ray import surface_operators as operators
from tests.ray.operators import DefaultLoop, Net, farthest, net, one_process, problem, sgd
from tests.ray.test_failures import Misbehaving, raise_own
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray
from lockstep import Callback, TorchTrainer, TrainingOperator
from lockstep.errors import (
    ConfigurationError,
    NotEnoughResourcesError,
    WeightError,
)
from lockstep.keys import BATCH_SIZE

CONFIG = {BATCH_SIZE: 12}
STEPS = 15


def start(operator, num_workers=2, **arguments):
    arguments = {"config": CONFIG, **arguments}
    return TorchTrainer(training_operator_cls=operator, num_workers=num_workers, **arguments)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """One worker here, three shards: metrics, and the model after each of nine steps."""
    with start(
        operators.Everything, num_workers=1, num_shards=3, scheduler_step_freq="epoch", seed=7
    ) as one:
        first = one.train(num_steps=5), one.validate()
        one.train(num_steps=4)
        return first, one.get_model(), one.state_dict()


def criterion_scale(one):
    return one.apply_all_operators(lambda operator: operator.criterion.scale.detach())


@pytest.mark.slow
def test_a_saved_run_goes_on_with_any_number_of_workers(undisturbed, tmp_path):
    (train, validation), model, state = undisturbed
    arguments = {"scheduler_step_freq": "epoch"}
    with start(
        operators.Everything,
        num_shards=3,
        seed=7,
        initialization_hook=operators.leave_a_trace,
        **arguments,
    ) as two:
        # E29: the metrics are those of one process, though the shards are uneven.
        assert two.train(num_steps=5) == pytest.approx(train, rel=1e-12)
        assert two.validate() == pytest.approx(validation, rel=1e-12)
        path = two.save(tmp_path / "run.pt")
        assert two.apply_all_workers(operators.trace) == ["called", "called"]
        check_results_by_rank(two)
        check_operator_state(two)
        two.load(path)
        check_a_failed_load_changes_nothing(two)
        two.train(num_steps=4)
        assert farthest(two.get_model(), model) < 1e-12
        scales = criterion_scale(two)
        assert torch.equal(scales[0], scales[1])
        assert torch.allclose(scales[0], state["criterion"]["scale"], rtol=1e-12)
        rates = two.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([0.05 * 0.8**2] * 2)
    for num_workers in (1, 3):
        with start(operators.Everything, num_workers=num_workers, **arguments) as other:
            other.load(path)
            other.train(num_steps=4)
            assert farthest(other.get_model(), model) < 1e-12
            assert other.state_dict()["position"] == state["position"] | {
                "validation": state["position"]["validation"] | {"epoch": 1, "step": 0}
            }


def check_results_by_rank(two):
    results = two.validate(reduce_results=False, profile=True)
    assert len(results) == 2
    assert sum(result["num_samples"] for result in results) == 37
    assert all(result["batch_count"] == 4 for result in results)
    assert all(result["profile"]["mean_eval_fwd_s"] > 0 for result in results)
    whole = two.validate(profile=True)
    mean = sum(result["mae"] * result["num_samples"] for result in results) / 37
    assert whole["mae"] == pytest.approx(mean, rel=1e-12)
    assert set(whole["profile"]) == {"mean_eval_fwd_s", "mean_validation_s"}


def count_states_of_the_model(operator):
    # The hook goes with the model to wherever the model is sent, and the operator cannot.
    operator.states_of_the_model = states = []
    operator.model.register_state_dict_pre_hook(lambda *_: states.append(1))


def check_operator_state(two):
    """Each rank's own state is saved and comes back; no state is pulled for a step (C17)."""
    two.apply_all_operators(count_states_of_the_model)
    before = two.apply_all_operators(lambda operator: operator.own["asked"])
    two.train(num_steps=1)
    pulled = two.apply_all_operators(lambda operator: len(operator.states_of_the_model))
    asked = two.apply_all_operators(lambda operator: operator.own["asked"])
    assert pulled == [0, 0]
    # A worker copies what only the operator knows, because the step may have to be undone.
    assert asked == [count + 1 for count in before]
    state = two.state_dict()
    pulled = two.apply_all_operators(lambda operator: len(operator.states_of_the_model))
    assert sum(pulled) > 0
    two.apply_all_operators(lambda operator: operator.own.update(rank=None))
    two.load_state_dict(state)
    assert two.apply_all_operators(lambda operator: operator.own["rank"]) == [0, 1]


def check_a_failed_load_changes_nothing(two):
    state = two.state_dict()
    other = {**state, "models": [{k: v + 1 for k, v in state["models"][0].items()}]}
    poisoned = [{"poison": 1, "asked": 0}] * 2
    with pytest.raises(LookupError, match="poison on rank 1") as caught:
        two.load_state_dict({**other, "operator_by_rank": poisoned})
    assert "rank 1" in caught.value.__notes__[-1]
    assert two.apply_all_operators(lambda operator: operator.own["rank"]) == [0, 1]


@pytest.mark.slow
def test_workers_may_have_a_part_of_a_cpu_each():
    with start(DefaultLoop, num_cpus_per_worker=0.5) as two:
        assert two.apply_all_workers(torch.get_num_threads) == [1, 1]


# ------------------------------------------------------------------------------- use_local


@pytest.mark.other_workers
def test_rank_0_in_the_driver():
    threads, environment = torch.get_num_threads(), dict(os.environ)
    with start(DefaultLoop, use_local=True, num_cpus_per_worker=1) as two:
        pids = two.apply_all_workers(os.getpid)
        assert pids[0] == os.getpid() != pids[1]
        operator = two.get_local_operator()
        assert (operator.world_rank, operator.local_rank) == (0, 0)
        assert two.apply_all_operators(lambda operator: operator.local_rank) == [0, 1]
        # What a breakpoint would see: live objects, on this thread.
        seen = []
        original = operator.compute_loss

        def looked_into(batch, batch_info):
            seen.append((threading.current_thread(), os.environ.get("PYTHONBREAKPOINT")))
            return original(batch, batch_info)

        operator.compute_loss = looked_into
        two.train(num_steps=STEPS)
        # Ray's hook for breakpoint() waits for an editor.
        assert set(seen) == {(threading.current_thread(), None)}
        assert "ray" in os.environ["PYTHONBREAKPOINT"]
        assert farthest(operator.model, one_process()) < 1e-12
        assert farthest(two.get_model(), one_process()) < 1e-12
        state = two.state_dict()
        two.train(num_steps=2)
        two.load_state_dict(state)
        assert farthest(operator.model, one_process()) < 1e-12
    assert torch.get_num_threads() == threads
    # Torch sets it when an optimizer first imports its compiler.
    changed = dict(os.environ.items() ^ environment.items())
    assert changed.keys() <= {"TORCHINDUCTOR_CACHE_DIR"}
    assert not dist.is_initialized()


@pytest.mark.other_workers
@pytest.mark.parametrize("on", [0, 1])
def test_both_go_on_after_a_failure_beside_rank_0_in_the_driver(on):
    two = start(
        operators.FailsInValidation,
        use_local=True,
        config={**CONFIG, "on": on},
        scheduler_step_freq="manual",
    )
    two.train(num_steps=2)
    with pytest.raises(LookupError, match=f"on rank {on}") as caught:
        two.validate()
    assert f"rank {on}" in "\n".join(caught.value.__notes__)
    two.train(num_steps=2)
    assert two.status()["step"] == 4
    two.shutdown()
    assert not dist.is_initialized()


@pytest.mark.other_workers
def test_a_failing_step_beside_rank_0_in_the_driver():
    two = start(Misbehaving, use_local=True, config={**CONFIG, "what": raise_own})
    with pytest.raises(Exception, match="code 7") as caught:
        two.train()
    assert type(caught.value).__name__ == "OwnError"
    two.shutdown()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_no_local_operator_on_remote_workers_says_what_to_write():
    with (
        start(DefaultLoop, timeout_s=77) as two,
        pytest.raises(ConfigurationError, match="use_local=True"),
    ):
        assert two.apply_all_workers(group_timeout_s) == [77, 77]
        two.get_local_operator()


def group_timeout_s():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


# ---------------------------------------------------------------------- users' own loops


def test_two_models_with_two_optimizers_and_own_batches():
    """Also E29: a borrowed batch counts in no metric of the user's own batch methods."""
    with start(operators.Adversaries, num_workers=1) as one:
        expected = one.train(num_steps=STEPS), one.validate()
        models = one.get_model()
    with start(operators.Adversaries) as two:
        assert two.train(num_steps=STEPS) == pytest.approx(expected[0], rel=1e-11)
        assert two.validate() == pytest.approx(expected[1], rel=1e-11)
        for mine, theirs in zip(two.get_model(), models, strict=True):
            assert farthest(mine, theirs) < 1e-12


def test_a_loss_that_is_a_sum():
    with start(operators.Summed, num_workers=1) as one:
        one.train(num_steps=STEPS)
        expected = one.get_model()
    with start(operators.Summed) as two:
        two.train(num_steps=STEPS)
        assert farthest(two.get_model(), expected) < 1e-12
    assert farthest(expected, net()) > 1e-3


def test_a_wrapper_of_the_users_own():
    with start(operators.OwnWrapper, wrap_ddp=False) as two:
        two.train(num_steps=9)
        model = two.get_model()
        (saved,) = two.state_dict()["models"]
    assert type(model).__name__ == "Net"
    assert saved.keys() == net().state_dict().keys()
    with start(operators.OwnWrapper, num_workers=1) as one:
        one.train(num_steps=9)
        assert farthest(model, one.get_model()) < 1e-12


def test_metrics_that_a_loop_changes_on_some_ranks_are_means_over_all_ranks():
    with start(operators.InPercent) as trainer:
        result = trainer.validate()
    assert result["val_accuracy"] == pytest.approx(25, rel=1e-12)
    assert result["val_loss"] == pytest.approx((2 + 5) / 2, rel=1e-12)


def test_each_rank_reads_its_own_loader():
    with start(operators.OwnPart, add_dist_sampler=False, config={}) as two:
        results = [two.train() for _ in range(3)]
        assert farthest(two.get_model(), operators.own_parts_in_one_process(3)) < 1e-12
    assert [result["num_samples"] for result in results] == [37] * 3
    assert [result["batch_count"] for result in results] == [5] * 3


# ------------------------------------------------------------------------ other front doors


def test_a_model_of_ones_own_holds_the_trained_state():
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(*problem()), 6)
    operator = TrainingOperator.from_model(
        model, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader
    )
    with start(operator) as two:
        two.train(num_steps=STEPS)
        assert farthest(model, one_process()) < 1e-12
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        theirs = two.apply_all_operators(
            lambda op: [state["momentum_buffer"] for state in op.optimizer.state.values()]
        )
        for rank in theirs:
            assert all(torch.equal(a, b) for a, b in zip(momentum, rank, strict=True))


class Registers(Net):
    """Its first forward registers a buffer, and each one enlarges another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.ones(0))

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((1,), 2.0, dtype=x.dtype))
        self.sizes = torch.ones(max(len(x), len(self.sizes)))
        return super().forward(x / self.scale)


def test_a_model_of_ones_own_gets_the_buffers_that_the_forwards_of_its_copies_have_made():
    model = Registers()
    operator = TrainingOperator.from_model(
        model,
        optimizer=sgd(model),
        criterion=nn.MSELoss(),
        train_loader=DataLoader(TensorDataset(*problem()), 6),
    )
    with start(operator) as two:
        two.train(num_steps=1)
        two.train(num_steps=1)
        trained = two.get_model()
    assert (model.scale.item(), len(model.sizes)) == (2.0, len(trained.sizes))
    assert farthest(model, trained) == 0


def test_settings_that_the_copies_of_ones_own_optimizer_do_not_hear_of_are_refused():
    model = net()
    optimizer = sgd(model)
    (group,) = optimizer.param_groups
    rate, group["lr"] = group["lr"], 1.0
    operator = TrainingOperator.from_model(
        model,
        optimizer=optimizer,
        criterion=nn.MSELoss(),
        train_loader=DataLoader(TensorDataset(*problem()), 6),
    )
    group["lr"] = rate  # nobody has a copy yet
    with start(operator) as two:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            two.train(num_steps=STEPS // 3)
        assert farthest(model, one_process()) < 1e-12
        trained, step = [each.detach().clone() for each in model.parameters()], two.status()["step"]
        with pytest.warns(UserWarning, match="optimizer.step"):  # which the workers call
            scheduler.step()
        with pytest.raises(ConfigurationError, match=rf"lr {rate} -> {rate / 2}"):
            two.train(num_steps=1)
        assert two.status()["step"] == step
        assert all(map(torch.equal, model.parameters(), trained))
        theirs = two.get_model().parameters()
        assert all(map(torch.equal, theirs, trained))

        def halve(own):
            own.optimizer.param_groups[0]["lr"] = rate / 2

        two.apply_all_operators(halve)
        two.train(num_steps=1)
        assert optimizer.param_groups[0]["lr"] == rate / 2


@pytest.mark.slow
def test_a_model_of_ones_own_holds_the_steps_of_a_call_in_which_a_callback_failed():
    class Fails(Callback):
        every = 1

        def on_step(self, trainer, step, metrics):
            raise KeyError(step)

    model = net()
    operator = TrainingOperator.from_model(
        model,
        optimizer=sgd(model),
        criterion=nn.MSELoss(),
        train_loader=DataLoader(TensorDataset(*problem()), 6),
    )
    with start(operator, callbacks=[Fails()]) as two:
        with pytest.raises(KeyError):
            two.train(num_steps=STEPS)
        assert two.status()["step"] == STEPS
        assert farthest(model, one_process()) < 1e-12


@pytest.mark.slow
def test_functions_as_creators():
    operator = TrainingOperator.from_creators(
        operators.model_creator, operators.optimizer_creator, operators.data_creator, nn.MSELoss
    )
    with start(operator, resources_per_worker={"lane": 1}) as two:
        assert ray.available_resources().get("lane", 0) == 0
        two.train(num_steps=STEPS)
        assert two.validate()["num_samples"] == 37
        assert farthest(two.get_model(), one_process()) < 1e-12


def test_resources_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_START_TIMEOUT_S", "5")  # those of an earlier trainer come back
    with pytest.raises(NotEnoughResourcesError, match="3 lane") as caught:
        start(DefaultLoop, num_workers=1, resources_per_worker={"lane": 3})
    assert "2 of 2 lane" in str(caught.value)


@pytest.mark.slow
def test_a_loop_that_reads_ahead_is_exact_or_refused():
    """Which batch a plain backward belongs to is not known; it matters in the short last one."""
    whole, uneven = {BATCH_SIZE: 11, "rows": 33}, {**CONFIG, "rows": 37}
    expected = {}
    for config in (whole, uneven):
        with start(operators.ReadsAhead, num_workers=1, config=config) as one:
            one.train()
            expected[config["rows"]] = one.get_model()
    with start(operators.ReadsAhead, config=whole) as two:
        state = two.state_dict()
        for info in ({}, {"ours": True}):
            two.load_state_dict(state)
            two.train(info=info)
            assert farthest(two.get_model(), expected[33]) < 1e-12
    with start(operators.ReadsAhead, config=uneven) as two:
        state = two.state_dict()
        for info in ({"weight": True}, {"weight": True, "all": True}, {"rows": True}):
            two.load_state_dict(state)
            two.train(info=info)
            assert farthest(two.get_model(), expected[37]) < 1e-12
        with pytest.raises(WeightError, match="reads ahead") as caught:
            two.train(info={"ours": True})
        assert "self.backward(loss, weight=" in str(caught.value)
    for info, words in (({"all": True}, "reads ahead"), ({"all": True, "rows": True}, "another")):
        with (
            start(operators.ReadsAhead, config=uneven) as two,
            pytest.raises(WeightError, match=words),
        ):
            two.train(info=info)


@pytest.mark.slow
def test_batches_that_are_read_ahead_for_the_default_loop_are_exact_or_refused():
    """33 rows end in a batch of nine, 37 in one of a single row, of which rank 1 has none."""
    operator = operators.ReadsAheadForTheDefaultLoop
    configs = {rows: {**CONFIG, "rows": rows} for rows in (33, 37)}
    expected = {}
    for rows, calls in ((33, [None]), (37, [3, None])):
        with start(operator, num_workers=1, config=configs[rows]) as one:
            results = [one.train(num_steps=steps) for steps in calls]
            expected[rows] = results, one.get_model()
        with start(operator, config=configs[rows]) as two:
            for steps, result in zip(calls, expected[rows][0], strict=True):
                assert two.train(num_steps=steps) == pytest.approx(result, rel=1e-11)
            assert farthest(two.get_model(), expected[rows][1]) < 1e-12
    with (
        start(operator, config=configs[37]) as two,
        pytest.raises(WeightError, match="reads ahead"),
    ):
        two.train()


@pytest.mark.slow
def test_loaders_of_ones_own_go_on_in_the_middle_of_an_epoch(tmp_path):
    """Also behind the end of one that is shorter than its peer's, of which no state tells."""
    arguments = {"add_dist_sampler": False, "config": {}, "timeout_s": 30}
    with start(operators.OwnPart, **arguments) as two:
        paths = []
        for number in range(2):
            two.train(num_steps=number + 1)
            paths.append(two.save(tmp_path / str(number)))
    for path in paths:
        with start(operators.OwnPart, **arguments) as two:
            two.load(path)
            two.train()
            assert farthest(two.get_model(), operators.own_parts_in_one_process(1)) < 1e-12


@pytest.mark.slow
def test_a_rank_without_any_sample_steps_with_a_scaled_loss():
    with start(operators.OneRow, num_workers=1, precision="fp16") as one:
        one.train(num_steps=3)
        expected = one.get_model()
    with start(operators.OneRow, precision="fp16") as two:
        two.train(num_steps=3)
        assert farthest(two.get_model(), expected) < 1e-12
    assert farthest(expected, net()) > 1e-3
