"""Each rank holds some of the blocks: a stage of a pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import BYTES, GPT, mean_cross_entropy, split, stage_of
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """As many stages as ranks."""
    return PipelineTrainer(model, ranks.rank(), ranks.count())


class Stage(nn.Module):
    """Some of a GPT's blocks under the names they have there; the first stage embeds, too, and the last predicts."""

    def __init__(self, whole: GPT, index: int, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.token, self.position = whole.token, whole.position
        depth = len(whole.blocks)
        mine = [i for i in range(depth) if stage_of(i, depth, count) == index]
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in mine})
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (B, T) or what the stage before returned, (B, T, D), to that of this stage, or logits (B, T, 256)."""
        if self.is_first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class Criterion(nn.Module):
    """What the last stage is followed by."""

    def forward(self, logits: Tensor, following: Tensor) -> Tensor:
        """The loss, a scalar."""
        return mean_cross_entropy(logits, following)


class PipelineTrainer(Trainer):
    """Runs one stage; every rank draws the same batches."""

    micro_batches = 2
    criterion = Criterion()

    def __init__(self, whole: GPT, index: int, count: int) -> None:
        self.stage = Stage(whole, index, count)
        super().__init__(self.stage)
        self._index, self._count, self._width = index, count, whole.token.embedding_dim
        self._schedule: ScheduleGPipe | None = None

    def backward(self, text: Tensor) -> Tensor | None:
        """As for any trainer; the last stage knows the loss."""
        seen, following = split(text)
        seen, losses = seen.contiguous(), list[Tensor]()
        self._schedule = self._schedule or self._make_schedule(seen[: len(seen) // self.micro_batches])
        inputs = (seen,) if self.stage.is_first else ()
        self._schedule.step(*inputs, target=following, losses=losses)
        return torch.stack(losses).mean().detach() if losses else None

    def _make_schedule(self, seen: Tensor) -> ScheduleGPipe:
        """For micro-batches like ``seen``. Shapes are told, since inferring them takes one more training forward."""
        hidden = torch.empty(*seen.shape, self._width, device=seen.device, requires_grad=True)
        logits = torch.empty(*seen.shape, BYTES, device=seen.device, requires_grad=True)
        takes, returns = (seen if self.stage.is_first else hidden), (logits if self.stage.is_last else hidden)
        stage = PipelineStage(
            self.stage, self._index, self._count, seen.device, input_args=(takes,), output_args=(returns,)
        )
        return ScheduleGPipe(stage, self.micro_batches, loss_fn=self.criterion)

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> float:
        """As for any trainer: the text passes through all stages, and the loss comes back."""
        self.stage.eval()
        x, following = split(text)
        if not self.stage.is_first:
            x = torch.empty(*x.shape, self._width, device=x.device)
            dist.recv(x, self._index - 1)
        x = self.stage(x)
        if not self.stage.is_last:
            dist.send(x, self._index + 1)
            return ranks.total(0.0)[0]
        return ranks.total(float(self.criterion(x, following)))[0]
