# SPDX-License-Identifier: Apache-2.0
"""The models that a random program may train, as the text of a program.

Each takes four numbers a row and gives three, and no row's output depends on another row: then
the mean over the rows of all ranks is what one process computes. Where a model breaks that rule
(batch statistics) its tag says so, and the drawing gives all rows to one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        expression: makes it.
        definition: classes and functions that the expression needs.
        tags: "around" (not through one forward of the module), "unused" (rows leave parameters
            out), "joint" (rows depend on each other), "sparse", "slow", "random" (no two
            initialisations need be alike), "float32" (a layer that has no float64).
    """

    expression: str
    definition: str = ""
    tags: frozenset[str] = frozenset()


def _model(expression: str, definition: str = "", *tags: str) -> Model:
    return Model(expression, dedent(definition).strip(), frozenset(tags))


def _class(init: str, forward: str, *tags: str) -> Model:
    """A module with the statements `init` and the body `forward`."""
    head = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    body = "".join(f"        {line}\n" for line in dedent(init).strip().splitlines())
    ahead = "".join(f"        {line}\n" for line in dedent(forward).strip().splitlines())
    text = f"{head}{body}\n    def forward(self, x):\n{ahead}"
    return Model("Net()", text.rstrip(), frozenset(tags))


def _buffered(make: str, use: str, how: str = "") -> Model:
    return _class(
        f"""
        self.layer = nn.Linear(4, 3)
        self.register_buffer("constant", {make}{how})
        """,
        f"return torch.tanh(self.layer(x)) * {use}",
    )


_MLP = "nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))"
_RUNS = "x.unflatten(1, (2, 2))"

MODELS: dict[str, Model] = {
    "linear": _model("nn.Linear(4, 3)"),
    "mlp": _model(_MLP),
    "deep": _model(
        "nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3))"
    ),
    "conv": _model(
        "nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(),"
        " nn.Flatten(), nn.Linear(18, 3))"
    ),
    "channels_last": _class(
        """
        self.conv = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0))
        """,
        """
        square = x[:, :, None, None].expand(-1, -1, 2, 2)
        square = square.contiguous(memory_format=torch.channels_last)
        return self.conv(square).flatten(1) * self.scale + self.empty.sum()
        """,
    ),
    "lstm": _class(
        "self.lstm = nn.LSTM(2, 3, batch_first=True)", f"return self.lstm({_RUNS})[0][:, -1]"
    ),
    "gru": _class(
        "self.gru = nn.GRU(2, 3, batch_first=True)", f"return self.gru({_RUNS})[0][:, -1]"
    ),
    "attention": _class(
        """
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.head = nn.Linear(4, 3)
        """,
        f"""
        z = {_RUNS}
        return self.head(self.attention(z, z, z, need_weights=False)[0].flatten(1))
        """,
    ),
    "embedding": _class(
        "self.table = nn.Embedding(4, 3)\nself.layer = nn.Linear(4, 3)",
        "return self.layer(x) * self.table((x[:, 0] > 0).long())",
    ),
    "embedding_sparse": _class(
        "self.table = nn.Embedding(4, 3, sparse=True)\nself.layer = nn.Linear(4, 3)",
        "return self.layer(x) * self.table((x[:, 0] > 0).long())",
        "sparse",
    ),
    "tied": _model(
        "tied()",
        """
        def tied():
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
            model[2].weight = model[0].weight
            return model
        """,
    ),
    "complex": _class(
        "self.wave = nn.Parameter(torch.randn(4, dtype=torch.cdouble))\n"
        "self.layer = nn.Linear(4, 3)",
        "return self.layer((x * self.wave).abs())",
    ),
    "branches": _class(
        "self.left, self.right, self.never = (nn.Linear(4, 3) for _ in range(3))",
        """
        total = (x * 0).sum(dim=1, keepdim=True).expand(-1, 3)
        for layer, chosen in ((self.left, x[:, 0] > 0), (self.right, x[:, 0] < 0)):
            if chosen.any():
                total = total + layer(x) * chosen[:, None]
        return total
        """,
        "unused",
    ),
    "checkpointed": _class(
        "self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])",
        """
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False))
        return x
        """,
    ),
    "checkpointed_reentrant": _class(
        "self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])",
        """
        x = x.clone().requires_grad_(True)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False))
        return x
        """,
    ),
    "checkpointed_twice": _class(
        "self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])",
        """
        x = x.clone().requires_grad_(True)
        for layer in (self.layers[0], self.layers[0], self.layers[1]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False))
        return x
        """,
    ),
    "norm_evaluating": _model(
        "nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.Tanh(), nn.Linear(5, 3))"
    ),
    "norm_training": _model(
        "nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))",
        "",
        "joint",
    ),
    "layer_norm": _model("nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.Dropout(0.0))"),
    "weight_norm": _model(
        "nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))"
    ),
    "orthogonal": _model(
        "nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))"
    ),
    "raw_weights": _class(
        "self.inner = " + _MLP,
        "return F.linear(torch.tanh(F.linear(x, self.inner[0].weight)), self.inner[2].weight)",
        "unused",
    ),
    "compiled": _model(
        f"torch.compile({_MLP}, backend='aot_eager')",
        "",
        "slow",
    ),
    "buffer_int": _buffered("torch.tensor([1, 2, 3])", "self.constant"),
    "buffer_bool": _buffered("torch.tensor([True, False, True])", "self.constant"),
    "buffer_coo": _buffered("torch.eye(3).to_sparse()", "(1 + self.constant.to_dense().sum(0))"),
    "buffer_csr": _buffered(
        "torch.eye(3).to_sparse_csr()", "(1 + self.constant.to_dense().sum(0))"
    ),
    "buffer_quantized": _buffered(
        "torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)",
        "self.constant.dequantize()",
    ),
    "buffer_nested": _buffered(
        "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])",
        "self.constant.unbind()[1]",
        ", persistent=False",  # the trainer refuses one that no checkpoint can hold
    ),
    "buffer_conjugate": _buffered(
        "torch.tensor([1 + 2j, 3j, 2.0], dtype=torch.cdouble).conj()", "self.constant.imag"
    ),
    "buffer_expanded": _buffered("torch.full((1,), 2.0).expand(3)", "self.constant"),
    "buffer_twice": _class(
        """
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("constant", torch.full((4,), 0.5))
        """,
        "return self.head(torch.tanh(self.layer(x * self.constant)) * self.constant)",
    ),
    # As long as the rows of a rank, of which each has others.
    "buffer_of_rows": _class(
        """
        self.layer = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(1, 3))
        """,
        """
        self.last = self.layer(x).detach()
        return self.layer(x)
        """,
    ),
}
