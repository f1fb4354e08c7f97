# SPDX-License-Identifier: Apache-2.0
"""K: rank 0's gradients are sent to all, and clipped after that."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal

torch.set_num_threads(1)


class ActorCritic(nn.Module):
    def __init__(self, obs=4, act=2):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, act))
        self.critic = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((act,), -0.5))

    def forward(self, o):
        return Normal(self.actor(o), self.log_std.exp()), self.critic(o).squeeze(-1)


class Reacher:
    def __init__(self, n, seed):
        self.n, self.gen = n, torch.Generator().manual_seed(seed)

    def reset(self):
        self.pos = torch.rand(self.n, 2, generator=self.gen) * 2 - 1
        self.goal = torch.rand(self.n, 2, generator=self.gen) * 2 - 1
        return torch.cat([self.pos, self.goal], 1)

    def step(self, a):
        self.pos = self.pos + 0.2 * a.clamp(-1, 1)
        return torch.cat([self.pos, self.goal], 1), -(self.pos - self.goal).norm(dim=1)


@torch.no_grad()
def rollout(ac, env, horizon=8, gamma=0.95):
    o = env.reset()
    obs, acts, logps, rews = [], [], [], []
    for _ in range(horizon):
        d, _ = ac(o)
        a = d.sample()
        obs.append(o), acts.append(a), logps.append(d.log_prob(a).sum(-1))
        o, r = env.step(a)
        rews.append(r)
    g, rets = torch.zeros(env.n), []
    for r in reversed(rews):
        g = r + gamma * g
        rets.insert(0, g)
    return torch.cat(obs), torch.cat(acts), torch.cat(logps), torch.cat(rets)


def sync_grads(module):
    flat = nn.utils.parameters_to_vector([p.grad for p in module.parameters()])
    dist.broadcast(flat, src=0)
    nn.utils.vector_to_parameters(flat, [p.grad for p in module.parameters()])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ac = ActorCritic()
    torch.manual_seed(1000 + rank)
    env = Reacher(12, seed=rank)
    opt = torch.optim.Adam(ac.parameters(), lr=3e-3, eps=1e-5)
    for it in range(8):
        obs, act, old, ret = rollout(ac, env)
        for _ in range(3):
            d, v = ac(obs)
            adv = ret - v.detach()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            ratio = (d.log_prob(act).sum(-1) - old).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = pg + 0.5 * (v - ret).pow(2).mean() - 0.001 * d.entropy().sum(-1).mean()
            opt.zero_grad()
            loss.backward()
            sync_grads(ac)
            nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
            opt.step()  # here LS107
        if rank == 0:
            print(f"iter {it} return {ret.mean():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
