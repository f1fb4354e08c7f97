# SPDX-License-Identifier: Apache-2.0
"""Train a character model on Python's own source text: sequences of unequal length.

    python examples/language_model.py
    python examples/language_model.py --precision bf16

A sequence is a paragraph of the standard library, from 2 to 160 characters long, padded to the
longest of its batch. The loss is a mean over characters, so it has to count by characters and
not by sequences: `compute_loss` says so in `metrics[WEIGHT]`, and the gradient is that of the
mean over all characters of the step, on all workers, whoever got the long paragraphs. A step
takes two batches (`accumulate=2`); where their number is odd, the last step takes one.
"""

from __future__ import annotations

import argparse
import os
from math import log
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE, WEIGHT

FILES = ("argparse.py", "ast.py", "datetime.py", "inspect.py", "tarfile.py", "typing.py")
LONGEST = 160
END, FIRST = 0, 31
"""Code 0 ends a paragraph (and begins the next), 1 is a new line, 2 and up are printable."""
VOCABULARY = 127 - FIRST + 1
PADDING = -100


def encoded(text: str) -> torch.Tensor:
    codes = [1 if each == "\n" else ord(each) - FIRST + 1 for each in text]
    return torch.tensor([END, *codes, END])


def decoded(codes: list[int]) -> str:
    return "".join("\n" if code == 1 else chr(code + FIRST - 1) for code in codes)


def paragraphs(limit: int) -> list[torch.Tensor]:
    """The first `limit` paragraphs that are plain ASCII, each shape (characters + 2,)."""
    library = Path(os.__file__).parent
    found = []
    for name in FILES:
        text = (library / name).read_text(encoding="utf-8").replace("\t", "    ")
        for paragraph in text.split("\n\n"):
            cut = paragraph.strip("\n")[:LONGEST]
            if len(cut) > 1 and cut.replace("\n", " ").isprintable() and cut.isascii():
                found.append(encoded(cut))
    return found[:limit]


def padded(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Characters (N, T) to read, and the next ones (N, T) to predict, or `PADDING`."""
    read = pad_sequence([each[:-1] for each in sequences], batch_first=True)
    following = [each[1:] for each in sequences]
    return read, pad_sequence(following, batch_first=True, padding_value=PADDING)


class CharacterModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.recurrent = nn.GRU(32, width, batch_first=True)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, codes, state=None):
        """Logits (N, T, VOCABULARY) of the characters that follow, and the state to go on with."""
        hidden, state = self.recurrent(self.embedding(codes), state)
        return self.output(hidden), state


class LanguageModel(TrainingOperator):
    def setup(self, config):
        model = CharacterModel(config["width"])
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.AdamW(model.parameters(), lr=config["lr"])
        )
        every = paragraphs(config["paragraphs"])
        train = [each for number, each in enumerate(every) if number % 10]
        self.register_data(
            train_loader=DataLoader(train, config[BATCH_SIZE], shuffle=True, collate_fn=padded),
            validation_loader=DataLoader(every[::10], config[BATCH_SIZE], collate_fn=padded),
        )

    def compute_loss(self, batch, batch_info):
        read, following = batch
        logits, _ = self.model(read)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING)
        characters = (following != PADDING).sum()
        return loss, {WEIGHT: characters, "bits": loss.detach() / log(2)}


def sample(model: CharacterModel, start: str, length: int) -> str:
    """What the model writes after `start`; deterministic."""
    generator = torch.Generator().manual_seed(0)
    codes = encoded(start)[:-1].tolist()
    with torch.no_grad():
        logits, state = model(torch.tensor([codes]))
        while len(codes) < length:
            likely = (logits[0, -1].float() / 0.6).softmax(dim=-1)
            codes.append(int(likely.multinomial(1, generator=generator)))
            if codes[-1] == END:
                break
            logits, state = model(torch.tensor([codes[-1:]]), state)
    return decoded([code for code in codes if code != END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--paragraphs", type=int, default=2000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    config = {
        "lr": 4e-3,
        "width": arguments.width,
        "paragraphs": arguments.paragraphs,
        BATCH_SIZE: 24,
    }
    with TorchTrainer(
        training_operator_cls=LanguageModel,
        num_workers=arguments.num_workers,
        config=config,
        accumulate=2,
        clip_grad_norm=1.0,
        precision=arguments.precision,
    ) as trainer:
        print("epoch  paragraphs  batches  bits a character: training  held out")
        for _ in range(arguments.epochs):
            train, held_out = trainer.train(), trainer.validate()
            print(
                f"{train['epoch']:5}  {train['num_samples']:10}  {train['batch_count']:7}"
                f"  {train['bits']:26.3f}  {held_out['bits']:8.3f}"
            )
        model = trainer.get_model()
    print("\nwhat it writes after `def `:")
    print(sample(model, "def ", 240))


if __name__ == "__main__":
    main()
