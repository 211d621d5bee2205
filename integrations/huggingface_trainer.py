"""A Transformers Trainer whose optimizer is guarded: ``python integrations/huggingface_trainer.py``."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from stabilityguard.integrations.huggingface import StabilityGuardCallback
from stabilityguard.testing import Faults


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Trains a tiny Llama; the gradient of the tenth step is broken."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))
    guarding = StabilityGuardCallback(spike_threshold=10.0, nan_action="skip")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trainer_output", max_steps=16, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        ),
        train_dataset=Text(),
        callbacks=[guarding],
    )
    with Faults().nan("model.layers.1.mlp.down_proj", step=10).inject(model):
        trainer.train()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    assert guarding.guard is not None
    print(f"{len(guarding.guard.reports)} step skipped; weights finite: {finite}")


if __name__ == "__main__":
    main()
