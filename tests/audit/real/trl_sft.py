# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer: sequences packed into rows of one length, two micro-batches a step."""

import tempfile

import datasets
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

names = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(37))]
words = Tokenizer(WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
numbers = np.random.default_rng(7)
texts = [
    " ".join(f"w{one}" for one in numbers.integers(0, 37, numbers.integers(4, 20)))
    for _ in range(160)
]
set_seed(9)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(names),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
)
arguments = SFTConfig(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,
    bf16=False,
    max_length=32,
    packing=True,
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=2,
)
SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=datasets.Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
).train()
