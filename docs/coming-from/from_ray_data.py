# SPDX-License-Identifier: Apache-2.0
"""A Ray dataset in blocks of very different size, trained on by two workers."""

import logging
from itertools import chain

import numpy as np
import pandas
import ray.data
import torch
from problem import GLOBAL_BATCH, WORKERS, data, make_model
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


class Digits(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer = self.register(
            models=(model := make_model()),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )
        self.seen = []

    def compute_loss(self, batch, batch_info):
        self.seen += batch["row"].tolist()
        return nn.functional.cross_entropy(self.model(batch["image"]), batch["digit"])


def digits():
    images, classes = (tensor.numpy() for tensor in data().tensors)
    table = pandas.DataFrame(
        {"row": np.arange(len(images)), "image": list(images), "digit": classes}
    )
    return ray.data.from_pandas([table[:5], table[5:200], table[200:]])


def main():
    dataset = digits()
    with TorchTrainer(
        training_operator_cls=Digits, num_workers=WORKERS, config={BATCH_SIZE: GLOBAL_BATCH}
    ) as trainer:
        trainer.train(dataset=dataset, num_steps=4)
        result = trainer.train(dataset=dataset)
        rows = trainer.apply_all_operators(lambda operator: operator.seen)
    print("epochs begun:", result["epoch"])
    print("rows, each once:", sorted(chain.from_iterable(rows)) == list(range(len(data()))))


if __name__ == "__main__":
    ray.init("local", num_cpus=4, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    main()
