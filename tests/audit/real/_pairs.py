# SPDX-License-Identifier: Apache-2.0
"""Pairs of sentences, a tiny BERT, and a metric, as Accelerate's examples load from a hub."""

import datasets
import evaluate
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

WORDS = 40


class Accuracy(evaluate.Metric):
    """As `evaluate.load("accuracy")`, which is not in the package."""

    def _info(self):
        numbers = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(
            description="accuracy", citation="", features=datasets.Features(numbers)
        )

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.array(predictions) == np.array(references)))}


def pairs(rows=48):
    """A dataset with columns of different lengths, as a tokenizer makes them."""
    numbers = np.random.default_rng(3)
    tokens = [numbers.integers(4, WORDS, numbers.integers(5, 12)).tolist() for _ in range(rows)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": [[1] * len(one) for one in tokens],
            "labels": [int(sum(one) % 2) for one in tokens],
        }
    )


def collate(rows):
    """Padded to the longest of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {
        key: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows])
        for key in ("input_ids", "attention_mask")
    }
    return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


def loaders(batch_size=8):
    """For training and for evaluation."""
    split = pairs().train_test_split(test_size=16, seed=1)
    return (
        DataLoader(split["train"], shuffle=True, collate_fn=collate, batch_size=batch_size),
        DataLoader(split["test"], collate_fn=collate, batch_size=batch_size),
    )


def model():
    """Random weights, dropout as shipped."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=2,
        )
    )
