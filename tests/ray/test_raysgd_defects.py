# SPDX-License-Identifier: Apache-2.0
"""RaySGD's defects, by number: each has a test here, or the name of the test that holds it.

A letter and a number as in the list of RaySGD 1.3's defects: A data, B batch size and resize,
C failure, D state, E gradients and metrics, F other. `ELSEWHERE` is checked to exist.
"""

import ast
import errno
import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.ray.operators import DefaultLoop, net, sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import ray
from lockstep import TorchTrainer, TrainingOperator
from lockstep.engine.rendezvous_store import open_store
from lockstep.errors import NotEnoughResourcesError
from lockstep.keys import BATCH_SIZE

TESTS = Path(__file__).resolve().parents[1]

ELSEWHERE = {
    "A1 loader rebuilt from ten fields": "unit/data/test_loader_kept.py",
    "A2 shuffled, padded validation": "unit/data/test_sharded_loader.py",
    "A4 iterables on every rank whole": "unit/data/test_streams.py",
    "A5 position not in the checkpoint":
        "unit/trainer/test_state_transfer.py::test_a_run_goes_on_as_if_it_had_not_stopped",
    "A6 train(dataset=...) took anything":
        "unit/trainer/test_argument_checks.py::test_what_is_no_dataset_is_refused",
    "B7 the global batch rounded down, and written back":
        "unit/data/test_shard_batch_size.py",
    "B8 fewer samples than workers: the whole batch on each":
        "unit/data/test_sharded_loader.py",
    "B9 another number of workers changes the global batch":
        "ray/test_surface.py::test_a_saved_run_goes_on_with_any_number_of_workers",
    "B11 a cooldown that never acts: who comes back joins when it is ready":
        "ray/test_recovery.py::test_five_workers_die_one_after_the_other_and_no_bit_changes",
    "B12 not enough resources: waits for ever":
        "ray/test_failures.py::test_not_enough_resources_says_what_there_is",
    "C13 one death ends all workers, and the epoch":
        "ray/test_recovery.py::test_rank_0_dies_and_the_other_goes_on_alone_with_the_same_bits",
    "C14 a survivor's broken connection is taken for the failure":
        "ray/test_recovery.py::test_rank_0_dies_and_the_other_goes_on_alone_with_the_same_bits",
    "C15 a user's exception leaves its peers waiting":
        "ray/test_failures.py::test_a_users_exception_arrives_as_itself_with_rank_and_traceback",
    "C16 an exception in setup leaks actors":
        "ray/test_failures.py::test_an_exception_in_setup_arrives_and_frees_the_others",
    "C17 the whole state pulled before each call":
        "ray/test_surface.py::test_a_saved_run_goes_on_with_any_number_of_workers",
    "C18 no worker may die in validation":
        "ray/test_recovery.py::"
        "test_deaths_in_one_validation_after_the_other_accuse_no_samples",
    "C21 timeout_s ignored for NCCL": "test_cuda.py::test_C21_timeout_reaches_nccl",
    "D22 a failed load goes unnoticed":
        "ray/test_surface.py::test_a_saved_run_goes_on_with_any_number_of_workers",
    "D23 writes in place, reads by unpickling": "unit/checkpoint/test_atomic_write.py",
    "D24 state of whichever worker answers first":
        "ray/test_surface.py::test_a_saved_run_goes_on_with_any_number_of_workers",
    "D25 steps, random numbers, criterion not saved":
        "unit/trainer/test_state_transfer.py::test_a_run_goes_on_as_if_it_had_not_stopped",
    "E26 a criterion's parameters differ between workers":
        "ray/test_surface.py::test_a_saved_run_goes_on_with_any_number_of_workers",
    "E27 a custom method of the model goes around the synchronisation":
        "ray/test_one_process.py::"
        "test_plain_backward_and_custom_method_in_an_own_train_batch",
    "E28 ranks averaged equally, whatever they hold":
        "ray/test_one_process.py::test_default_loop",
    "E29 means of means":
        "ray/test_surface.py::test_two_models_with_two_optimizers_and_own_batches",
    "E30 accuracy of a regression":
        "unit/trainer/test_report_merge.py::test_no_accuracy_where_targets_are_no_classes",
    "E31 schedulers that are no attribute never step":
        "unit/operator/test_schedulers.py::test_a_list_of_schedulers_steps_as_a_whole",
    "E32 update_scheduler without a scheduler":
        "unit/operator/test_schedulers.py::"
        "test_update_scheduler_without_a_scheduler_says_what_to_register",
    "E33 a progress bar without a total":
        "unit/trainer/test_torch_trainer.py::test_the_bar_shows_total_loss_and_speed_in_a_terminal",
    "E34 epoch_idx jumps in the middle of an epoch":
        "unit/worker/test_loop_run.py::"
        "test_epoch_index_and_global_step_count_epochs_and_steps",
    "F35 initialization_hook skipped with one worker":
        "unit/trainer/test_torch_trainer.py::test_the_hook_comes_first_and_once",
    "F36 device_ids on one GPU worker": "test_cuda.py::test_F36_device_ids_of_one_gpu_worker",
    "F37 as_trainable without use_gpu, or with auto":
        "ray/test_tune.py::test_what_a_trial_asks_for",
    "F37 Tune's num_workers is not the trainer's; one config for all trials":
        "ray/test_tune.py::test_two_workers_live_in_the_room_of_their_trial",
    "F38 from_creators with several optimizers":
        "unit/operator/test_operator_factories.py::test_several_models_and_optimizers",
    "F38 from_creators with a scheduler and no loss":
        "unit/operator/test_operator_factories.py::test_a_scheduler_without_a_loss_is_a_scheduler",
    "F39 validation calls training's hooks":
        "unit/integrations/lightning/test_optimization_hooks.py::"
        "test_validation_hooks_are_called_in_lightnings_order",
    "F39 of several optimizers only the first steps":
        "unit/integrations/lightning/test_unsupported.py::test_a_module_that_is_refused",
    "F40 CUDA tensors sent to a driver without CUDA":
        "test_cuda.py::test_F40_the_model_comes_back_on_the_cpu",
    "F41 apex":
        "unit/operator/test_models.py::test_precisions_of_the_default_loop_train",
}  # fmt: skip


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_it_is_held_elsewhere(place):
    file, _, name = place.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name} <= names if name else any(each.startswith("test_") for each in names)


def test_none_is_missing():
    here = " ".join(name for name in globals() if name.startswith("test_"))
    named = " ".join([*ELSEWHERE, here.replace("_", " ")])
    found = {int(number) for number in re.findall(r"\b[A-F](\d+)\b", named)}
    assert found == set(range(1, 43))


class Numbered(Dataset):
    """Its samples are their own indices."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Reads(TrainingOperator):
    """Notes which samples it was given; trains nothing worth mentioning."""

    def setup(self, config):
        self.model = nn.Linear(1, 1)
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer)
        weights = torch.tensor([0.0] * 9 + [1.0])
        sampler = WeightedRandomSampler(weights, 6) if config.get("weighted") else None
        self.register_data(
            train_loader=DataLoader(Numbered(), 2, sampler=sampler, shuffle=sampler is None),
            validation_loader=DataLoader(Numbered(), 2),
        )
        self.seen = []

    def compute_loss(self, batch, batch_info):
        self.seen.append(batch.flatten().int().tolist())
        return self.model(batch).square().mean()


def start(operator=DefaultLoop, num_workers=3, **arguments):
    arguments = {"config": {BATCH_SIZE: 12}, **arguments}
    return TorchTrainer(training_operator_cls=operator, num_workers=num_workers, **arguments)


def seen(trainer):
    return [
        sample
        for worker in trainer.apply_all_operators(_taken)
        for batch in worker
        for sample in batch
    ]


def _taken(operator):
    taken, operator.seen = operator.seen, []
    return taken


@pytest.mark.other_workers
def test_A2_A3_every_sample_once_validation_in_order_epochs_reshuffled():
    with start(Reads, config={}) as three:
        three.validate()
        batches = three.apply_all_operators(_taken)
        # Ten over three: the last step holds four, and nobody sees a sample twice.
        assert batches == [[[0, 1], [6, 7]], [[2, 3], [8]], [[4, 5], [9]]]
        orders = []
        three.train(num_steps=4)  # two epochs in one call
        by_worker = three.apply_all_operators(_taken)
        for epoch in (0, 1):
            orders.append([worker[2 * epoch : 2 * epoch + 2] for worker in by_worker])
        flat = [[s for worker in order for batch in worker for s in batch] for order in orders]
        assert [sorted(order) for order in flat] == [list(range(10))] * 2
        assert orders[0] != orders[1]


def test_A1_the_users_sampler_decides():
    with start(Reads, num_workers=2, config={"weighted": True}) as two:
        assert two.train()["num_samples"] == 6
        assert seen(two) == [9] * 6


@pytest.mark.slow
def test_B8_fewer_samples_than_workers_in_a_global_batch():
    config = {BATCH_SIZE: 2}
    with start(config=config) as three:
        result = three.train(num_steps=3)
        assert three.config == config
    assert (result["num_samples"], result["batch_count"]) == (6, 3)


def test_B10_what_a_worker_asks_for_counts(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_START_TIMEOUT_S", "1")
    with pytest.raises(NotEnoughResourcesError, match="6 CPU"):
        start(num_workers=2, num_cpus_per_worker=3)


@pytest.mark.slow
def test_C19_shutdown_does_not_wait_for_a_worker_that_is_stuck():
    two = start(num_workers=2)
    pids = two.apply_all_workers(os.getpid)
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    two.shutdown()
    assert time.monotonic() - begin < 20
    deadline = time.monotonic() + 20
    while _alive(pids[1]) and time.monotonic() < deadline:
        ray.cluster_resources()  # a round trip: gives Ray's raylet time to end it
    assert not _alive(pids[1])


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_C20_the_port_is_bound_before_anybody_hears_of_it():
    stores = [open_store("127.0.0.1", 5) for _ in range(5)]
    ports = [store.port for store in stores]
    assert len(set(ports)) == 5
    for port in ports:
        with pytest.raises(OSError, match="in use") as caught:
            socket.create_server(("127.0.0.1", port), reuse_port=False)
        assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.slow
def test_E30_a_regression_has_no_accuracy_and_the_loss_of_one_process():
    class Column(TrainingOperator):
        def setup(self, config):
            model = net()
            self.model = nn.Sequential(model, nn.Linear(2, 1, dtype=torch.float64))
            self.register(models=self.model, optimizers=sgd(self.model), criterion=nn.MSELoss())
            generator = torch.Generator().manual_seed(0)
            features = torch.randn(8, 5, generator=generator, dtype=torch.float64)
            self.register_data(
                validation_loader=DataLoader(TensorDataset(features, features[:, :1]), 2)
            )

    with start(Column, num_workers=1) as one:
        expected = one.validate()
    with start(Column, num_workers=2) as two:
        result = two.validate()
    assert set(result) == {"num_samples", "batch_count", "val_loss", "last_val_loss"}
    assert result["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-12)


def test_F42_nothing_is_left_in_the_folder_for_temporary_files(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    sgd(net())  # with a process's first optimizer torch makes a folder for its compiler there
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        with start(num_workers=1) as one:
            one.train(num_steps=1)
            one.load(one.save(tmp_path / "run.pt"))
    finally:
        tempfile.tempdir = before
    assert list(folder.iterdir()) == []
