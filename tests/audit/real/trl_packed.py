# SPDX-License-Identifier: Apache-2.0
"""TRL: fine-tuning on packed sequences, with accumulation."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(11)
words = ["<pad>", "<eos>", *(f"w{n}" for n in range(30))]
plain = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
plain.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
)
source = torch.Generator().manual_seed(3)
lengths = torch.randint(5, 14, (160,), generator=source).tolist()
texts = [
    " ".join(f"w{n}" for n in torch.randint(30, (length,), generator=source).tolist())
    for length in lengths
]
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
arguments = SFTConfig(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_length=16,
    packing=True,
    packing_strategy="wrapped",
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=2,
)
SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
).train()
