"""A GPT-2 and the Trainer of transformers: `paceline run -n 2 examples/integrations/huggingface_trainer.py`."""

import math
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from paceline.integrations.huggingface import WorkerTrainer

VOCABULARY, LENGTH = 12, 10


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sentences that count upwards from a random word, by 1 or 2, and wrap around at the end of the vocabulary."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 3, (count, 1), generator=generator)
        self.sentences = (starts + steps * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sentences[number], "labels": self.sentences[number]}


set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=6,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=5,
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = WorkerTrainer(model=model, args=arguments, train_dataset=Counting(1200, 1), eval_dataset=Counting(200, 2))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
trainer.session.report(test_loss=loss, perplexity=math.exp(loss))
if trainer.is_world_process_zero():
    print(f"perplexity {math.exp(loss):.2f} of {VOCABULARY} words")
