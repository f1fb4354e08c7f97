# SPDX-License-Identifier: Apache-2.0
"""Optimizers as people write them, which do more in a step than torch's own do."""

import torch


class ByNorms(torch.optim.Optimizer):
    """As LAMB: the length of a step follows from norms of the whole weight and its gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                if param.grad is not None:
                    ratio = param.norm() / (param.grad.norm() + 1e-3)
                    param.add_(param.grad * ratio, alpha=-options["lr"])


class OfOldStyle(ByNorms):
    """Through ``.data``, decaying also what has no gradient, and writing to gradients."""

    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                param.data.mul_(0.99)
                if param.grad is not None:
                    param.data.add_(param.grad.data, alpha=-options["lr"])


class WritesToGradients(ByNorms):
    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                param.grad.add_(param, alpha=0.1)
                param.add_(param.grad, alpha=-options["lr"])


class EmptiesGradients(ByNorms):
    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                param.add_(param.grad, alpha=-options["lr"])
        self.zero_grad()


class AssignsData(ByNorms):
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                param.data = param.data - options["lr"] * param.grad.data
