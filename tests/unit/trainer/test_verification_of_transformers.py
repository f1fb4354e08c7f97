# SPDX-License-Identifier: Apache-2.0
"""verify on models as people have them: attention's dropout is no layer, losses are of tokens."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import TrainingOperator
from lockstep.keys import WEIGHT
from unit.trainer.test_verification import four_shards

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, ROWS = 50, 7, 8
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}
ENCODER = {**SMALL, **HEADS, "pad_token_id": 0}
DECODER = {**SMALL, **HEADS, "num_key_value_heads": 2, "pad_token_id": 0}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1,
      "num_heads": 2, "decoder_start_token_id": 0}  # fmt: skip
BART = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "max_position_embeddings": 32}  # fmt: skip

MODELS = {
    "Bert": ("MaskedLM", ENCODER),
    "Roberta": ("MaskedLM", ENCODER),
    "Albert": ("MaskedLM", {**ENCODER, "embedding_size": 8}),
    "Electra": ("MaskedLM", {**ENCODER, "embedding_size": 16}),
    "DistilBert": (
        "MaskedLM",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    ),
    "GPT2": ("LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}),
    "Llama": ("ForCausalLM", {**DECODER, "attention_dropout": 0.1}),
    "Mistral": ("ForCausalLM", {**DECODER, "attention_dropout": 0.1}),
    "Qwen2": ("ForCausalLM", {**DECODER, "attention_dropout": 0.1}),
    "OPT": (
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
        },
    ),
    "T5": ("ForConditionalGeneration", T5),
    "Bart": ("ForConditionalGeneration", BART),
}


class Sentences(Dataset):
    """Of different lengths: what a shard's tokens weigh differs."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.manual_seed(row))
        labels = tokens.clone()
        labels[2 + row % (LENGTH - 2) :] = -100
        return {"input_ids": tokens, "labels": labels}


def made(name, attention):
    """A tiny model of the family `name` with random weights; dropout as shipped."""
    head, given = MODELS[name]
    head = head if head.startswith(("For", "LM")) else f"For{head}"
    config = getattr(transformers, f"{name}Config")(**given)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{head}")(config)


def operator(name, attention, *, is_weighted):
    class Tokens(TrainingOperator):
        def setup(self, config):
            self.model = made(name, attention)
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.register(models=self.model, optimizers=optimizer)
            self.register_data(train_loader=DataLoader(Sentences(), batch_size=ROWS))

        def compute_loss(self, batch, batch_info):
            loss = self.model(**batch).loss
            counted = batch["labels"]
            if name in ("GPT2", "Llama", "Mistral", "Qwen2", "OPT"):
                counted = counted[:, 1:]  # the next token is what is predicted
            return (loss, {WEIGHT: int((counted != -100).sum())}) if is_weighted else loss

    return Tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_right_ones_are_ok_and_those_without_their_weight_are_not(name, attention):
    with four_shards(operator(name, attention, is_weighted=True)) as run:
        report = run.verify()
    assert report.ok is True, f"{report.inconclusive}\n{[r for r in report.rows if not r.ok]}"
    with four_shards(operator(name, attention, is_weighted=False)) as run:
        report = run.verify()
    assert report.ok is False, str(report)
    assert "without its WEIGHT" in str(report)
