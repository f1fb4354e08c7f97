# SPDX-License-Identifier: Apache-2.0
"""A LightningModule gets the weights that Lightning's own trainer computes, in all its forms."""

import pytest
import torch
import torchmetrics
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    STEPS,
    Classifier,
    by_lightning,
    farthest,
    loader,
)

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.testing import Strike, struck

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def by_lockstep(module_cls, *, epochs=3, num_shards=2, config=None, operator=None, **arguments):
    """The trained module and what the last `train` and `validate` returned."""
    operator = operator or {}
    made = TrainingOperator.from_lightning(
        module_cls, loader(GLOBAL_BATCH // num_shards), loader(), **operator
    )
    with TorchTrainer(
        training_operator_cls=made, num_shards=num_shards, config=config, **arguments
    ) as trainer:
        for _ in range(epochs):
            trained, validated = trainer.train(), trainer.validate()
        return trainer.get_model(), trained, validated


class StepsEachBatch(Classifier):
    """An interval of steps, and two schedulers."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        often = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        seldom = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [
            {"scheduler": often, "interval": "step", "frequency": 2},
            {"scheduler": seldom, "frequency": 2},
        ]


class WaitsForAPlateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.9, factor=0.3
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class WarmsUp(Classifier):
    """Lightning's documented way to warm a learning rate up."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 10) * self.hparams.lr


class ClipsByItself(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        assert gradient_clip_val == 0.05
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class HoldsALocalParameter(Classifier):
    """Its local parameter has a much larger gradient than the layers."""

    def __init__(self, width=7, lr=0.3):
        super().__init__(width, lr)
        self.own = lockstep.local(torch.nn.Parameter(torch.zeros((), dtype=torch.float64)))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 100 * self.own


class KeepsALayerInEvalMode(Classifier):
    def __init__(self, width=7, lr=0.3):
        super().__init__(width, lr)
        self.layers.insert(0, torch.nn.BatchNorm1d(5).double().eval())


class KnowsItsEnd(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def test_a_module_as_it_is():
    expected, reference = by_lightning(Classifier())
    model, trained, validated = by_lockstep(Classifier)
    assert farthest(model, expected) < 1e-12
    assert type(model) is Classifier
    assert validated["val_loss"] == pytest.approx(
        reference.callback_metrics["val_loss"].item(), rel=1e-6
    )
    # Lightning computes its epoch's mean in float32.
    assert trained["train_loss"] == pytest.approx(
        reference.callback_metrics["train_loss"].item(), rel=1e-6
    )
    assert trained["train_loss"] == trained["train_loss_epoch"]
    assert trained["last_train_loss"] == trained["train_loss_step"]


class SwapsWeights(Classifier):
    """Validates with other weights, and trains its own; no hook says `no_grad`."""

    def on_validation_start(self):
        self.held = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.mul_(0.5)

    def on_validation_epoch_end(self):
        self.log("has_gradients", float(torch.is_grad_enabled()))

    def on_validation_end(self):
        for parameter, held in zip(self.parameters(), self.held, strict=True):
            parameter.copy_(held)


def test_hooks_of_a_validation_record_no_gradients():
    expected, reference = by_lightning(SwapsWeights())
    model, _, validated = by_lockstep(SwapsWeights)
    assert farthest(model, expected) < 1e-12
    for name in ("val_loss", "has_gradients"):
        logged = reference.callback_metrics[name].item()
        assert validated[name] == pytest.approx(logged, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module_cls", "lightning_arguments", "operator", "arguments"),
    [
        (StepsEachBatch, {}, {}, {}),
        (WaitsForAPlateau, {}, {}, {}),
        (WarmsUp, {}, {}, {}),
        (KeepsALayerInEvalMode, {}, {}, {}),
        (KnowsItsEnd, {}, {"max_epochs": 3}, {}),
        (Classifier, {"gradient_clip_val": 0.05}, {}, {"clip_grad_norm": 0.05}),
        (Classifier, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.05}, {}),
        (
            Classifier,
            {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
            {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
            {},
        ),
        (ClipsByItself, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.05}, {}),
    ],
)
def test_what_it_configures_is_done(module_cls, lightning_arguments, operator, arguments):
    expected, _ = by_lightning(module_cls(), **lightning_arguments)
    plain, _ = by_lightning(Classifier())
    model, _, _ = by_lockstep(module_cls, operator=operator, **arguments)
    # Lightning too clips to a norm plus 1e-6.
    assert farthest(model, expected) < 1e-12
    if module_cls is not KeepsALayerInEvalMode:
        assert farthest(expected, plain) > 1e-3, "the oracle does not see what is configured"


@pytest.mark.parametrize("arguments", [{"clip_grad_norm": 0.05}, {}])
def test_a_local_parameter_is_no_part_of_the_norm_that_is_clipped(arguments):
    operator = {} if arguments else {"gradient_clip_val": 0.05}
    expected, _ = by_lightning(Classifier(), gradient_clip_val=0.05)
    model, _, _ = by_lockstep(HoldsALocalParameter, operator=operator, **arguments)
    del model.own
    assert farthest(model, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", [False, True])
def test_accumulation(reproducible):
    """Over windows of full batches, where Lightning's equal weights are right."""

    class FullBatches(Classifier):
        def train_dataloader(self):
            dataset = torch.utils.data.Subset(loader().dataset, range(40))
            return torch.utils.data.DataLoader(dataset, batch_size=self.hparams.width)

    import lightning

    expected = FullBatches(width=8)
    lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(expected)

    class Sharded(FullBatches):
        def train_dataloader(self):
            whole = super().train_dataloader()
            return torch.utils.data.DataLoader(whole.dataset, batch_size=whole.batch_size // 2)

    with TorchTrainer(
        training_operator_cls=TrainingOperator.from_lightning(Sharded),
        config={"width": 8},
        num_shards=2,
        accumulate=5,
        reproducible=reproducible,
    ) as trainer:
        trainer.train()
        trainer.train()
        assert farthest(trainer.get_model(), expected) < 1e-12
        assert trainer.get_local_operator().module.global_step == 2


@pytest.mark.slow
def test_epochs_in_pieces_are_the_same_epochs():
    """Schedulers and hooks follow the epoch and not the calls."""
    expected, _ = by_lightning(StepsEachBatch(), validates=False)
    operator = TrainingOperator.from_lightning(StepsEachBatch, loader(GLOBAL_BATCH))
    with TorchTrainer(training_operator_cls=operator) as trainer:
        for steps in (1, 3, 5, 2, 7):
            trainer.train(num_steps=steps)
        assert farthest(trainer.get_model(), expected) < 1e-12


def test_going_on_from_a_checkpoint(tmp_path):
    expected, _, _ = by_lockstep(WaitsForAPlateau, epochs=4)
    operator = TrainingOperator.from_lightning(
        WaitsForAPlateau, loader(GLOBAL_BATCH // 2), loader()
    )
    with TorchTrainer(training_operator_cls=operator, num_shards=2) as trainer:
        for _ in range(2):
            trainer.train(), trainer.validate()
        trainer.train(num_steps=3)
        path = trainer.save(tmp_path / "middle")
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.load(path)
        trainer.train(), trainer.validate()
        trainer.train(), trainer.validate()
        assert farthest(trainer.get_model(), expected) == 0
        assert trainer.get_local_operator().module.global_step == 24


class KeepsItsBest(WaitsForAPlateau):
    best = float("inf")

    def on_validation_epoch_end(self):
        self.best = min(self.best, self.trainer.callback_metrics["val_loss"].item())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint):
        self.best = checkpoint["best"]


def test_what_a_validation_has_changed_is_in_the_checkpoint_of_its_step(tmp_path):
    """Of a run that is killed in the next epoch: the checkpoint is as old as the one before."""

    def program(folder=None):
        disk = {"checkpoint_dir": folder, "checkpoint_every": STEPS, "resume": "auto"}
        made = TrainingOperator.from_lightning(KeepsItsBest, loader(), loader())
        return TorchTrainer(training_operator_cls=made, **(disk if folder else {}))

    def epochs(trainer, last):
        while trainer.status()["epochs_finished"] < last:
            trainer.train(), trainer.validate()

    def result(trainer):
        operator = trainer.get_local_operator()
        rate = operator.optimizer.param_groups[0]["lr"]
        return rate, operator.module.best, operator.get_model()

    with program() as trainer:
        epochs(trainer, 4)
        rate, best, model = result(trainer)
    killed = program(tmp_path)
    epochs(killed, 2)
    killed.train(num_steps=1)
    killed.shutdown(force=True)
    with program(tmp_path) as trainer:
        epochs(trainer, 4)
        found = result(trainer)
    assert found[:2] == (rate, best)
    assert farthest(found[2], model) == 0


def test_a_validation_that_has_nothing_to_change_costs_no_checkpoint(tmp_path):
    newest = tmp_path / f"step-{STEPS:010d}.ckpt"
    operator = TrainingOperator.from_lightning(Classifier, loader(), loader())
    with TorchTrainer(
        training_operator_cls=operator, checkpoint_dir=tmp_path, checkpoint_every=STEPS
    ) as trainer:
        trainer.train()
        written = newest.stat().st_ino
        trainer.validate()
    assert newest.stat().st_ino == written


@pytest.mark.slow
def test_verify_finds_it_equal():
    operator = TrainingOperator.from_lightning(Classifier, loader(4), loader())
    with TorchTrainer(training_operator_cls=operator, num_shards=2) as trainer:
        trainer.train()
        assert trainer.verify(num_steps=2).ok


class LogsAllKinds(Classifier):
    """A sum, a mean and a metric object."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def on_train_epoch_start(self):
        self.log("begins", 1.0, reduce_fx="sum")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_failed_logs_once(step, phase):
    def epochs(operator_cls, *, fails):
        with TorchTrainer(training_operator_cls=operator_cls, num_shards=2) as trainer:
            if fails:
                with pytest.raises(RuntimeError, match="struck"):
                    trainer.train()
            trainer.train()
            view = trainer.apply_all_operators(_logged)[0]
            trainer.train()
            return view, trainer.apply_all_operators(_logged)[0]

    made = TrainingOperator.from_lightning(LogsAllKinds, loader(GLOBAL_BATCH // 2))
    failing = struck(made, Strike("raise", rank=0, step=step, phase=phase))
    assert epochs(failing, fails=True) == epochs(made, fails=False)


def _logged(operator):
    values = operator.module.trainer.callback_metrics
    return {name: value.item() for name, value in values.items()}, operator.module.global_step
