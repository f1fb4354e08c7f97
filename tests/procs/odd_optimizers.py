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


class WritesToParts(ByNorms):
    """A step for each part of a weight's rows, as optimizers have it that treat heads apart.

    Attributes:
        part: gives a part of a weight, a gradient or a state.
    """

    def __init__(self, params, part):
        super().__init__(params)
        self.part = part

    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                # A version alone would not tell that a part of the step is lost.
                param.data.mul_(0.99)
                self.part(param.data).add_(self.part(param.grad), alpha=-options["lr"])


class ReadsParts(ByNorms):
    """By the largest number in each half of the rows, and in the first row."""

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                parts = [*param.grad.chunk(2), param.grad[0]] if param.dim() else []
                length = 1 + sum(part.abs().max() for part in parts)
                param.add_(param.grad / length, alpha=-options["lr"])


class ChoosesByIdentity(ByNorms):
    """Decays some parameters, clips the gradient of others, and has a rate for each."""

    def __init__(self, params):
        super().__init__(list(params))
        held = self.param_groups[0]["params"]
        self.decayed = {id(param) for param in held if param.dim() == 2}
        self.clipped = {param for param in held if param.dim() < 2}
        self.rates = {"of each": {param: 0.1 / (1 + n) for n, param in enumerate(held)}}
        self.steps_of = dict.fromkeys(map(id, held), 0)

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            grad = param.grad
            if param in self.clipped:
                grad = grad.clamp(-0.01, 0.01)
            if id(param) in self.decayed:
                param.mul_(0.9)
            self.steps_of[id(param)] += 1
            rate = self.rates["of each"].get(param, 0.0) / self.steps_of[id(param)]
            param.add_(grad, alpha=-rate)


class OfColumns(ByNorms):
    """A momentum of transposed gradients, and the mean of each column's."""

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                state = self.state[param]
                if param.dim() != 2:
                    param.add_(param.grad, alpha=-options["lr"])
                    continue
                turned = state.setdefault("turned", torch.zeros_like(param.grad.t()))
                turned.mul_(0.9).add_(param.grad.t())
                mean = param.grad.mean(dim=0)
                if "mean" in state:
                    mean = mean + 0.5 * state["mean"]
                state["mean"] = mean
                param.add_(turned.t() + mean, alpha=-options["lr"])


class Draws(ByNorms):
    """Noise of several kinds; the generator stands at the same place on every rank."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.manual_seed(3)
        for param in self.param_groups[0]["params"]:
            noise = torch.randn_like(param) + torch.empty_like(param).uniform_(-1, 1)
            noise.mul_(torch.zeros_like(param).bernoulli_(0.5))
            turned = torch.rand_like(param.t() if param.dim() == 2 else param)
            noise.add_(turned.t() if param.dim() == 2 else turned)
            param.add_(param.grad + noise, alpha=-0.1)


class DrawsByValues(ByNorms):
    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.mul_(torch.bernoulli(param.sigmoid()))


class RemembersNorms(ByNorms):
    """Follows the norm of the gradient of the step before; its momenta are in a list."""

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for param in options["params"]:
                state = self.state[param]
                fast, slow = state.setdefault("momenta", [torch.zeros_like(param) for _ in "ab"])
                fast.mul_(0.5).add_(param.grad)
                slow.mul_(0.9).add_(param.grad)
                before = state.get("norms", {"last": 1.0})["last"]
                param.add_((fast + slow) / (1 + before), alpha=-options["lr"])
                state["norms"] = {"last": param.grad.norm()}


class Lookahead(torch.optim.Optimizer):
    """Every second step of the optimizer within it goes half of the way."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        for p in held:
            self.state[p].setdefault("slow", p.detach().clone())
        self.inner.step()
        for p in held:
            state = self.state[p]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] % 2 == 0:
                state["slow"].add_(p - state["slow"], alpha=0.5)
                p.copy_(state["slow"])


class OfTwoKinds(torch.optim.Optimizer):
    """Momentum for matrices and Adam for the rest, as Muon is used; the groups are theirs.

    With `own_groups` they have groups of their own, of the same parameters.
    """

    def __init__(self, params, own_groups=False):
        params = list(params)
        rest = [p for p in params if p.dim() < 2]
        self.inner = {
            "matrices": torch.optim.SGD([p for p in params if p.dim() == 2], lr=0.1, momentum=0.9),
            "rest": torch.optim.Adam(rest, lr=0.05),
        }
        super().__init__(params, {})
        if not own_groups:
            self.param_groups = [g for each in self.inner.values() for g in each.param_groups]

    def step(self, closure=None):
        for each in self.inner.values():
            each.step()


class SAM(torch.optim.Optimizer):
    """As it is widely written: the loop calls two steps, and never `step`."""

    def __init__(self, params, make):
        super().__init__(params, {"rho": 0.05})
        self.base = make(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()
