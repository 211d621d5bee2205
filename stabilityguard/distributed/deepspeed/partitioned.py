"""Stages 1 to 3 of ZeRO: every rank updates a part of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.distributed.deepspeed.fragments import Fragment
from stabilityguard.distributed.deepspeed.overrides import overridden
from stabilityguard.distributed.deepspeed.partition import Partition, nothing


class Bf16Optimizer(Partition):
    """Stage 1 in bfloat16 with gradients accumulated in float32."""

    needs = (
        "bf16_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_gradients",
        "fp32_groups_has_gradients",
        "clear_hp_grads",
        "clear_lp_grads",
        "overflow",
    )

    def gradients(self) -> dict[Tensor, Tensor]:
        """Parts of the accumulated float32 gradients."""
        found: dict[Tensor, Tensor] = {}
        for i, group in enumerate(self.groups):
            for j, parameter in enumerate(group):
                fragment = self.fragments.get(parameter)
                if fragment is not None and self._optimizer.fp32_groups_has_gradients[i][j]:
                    whole = self._optimizer.fp32_groups_gradients[i][j].view(-1)
                    found[parameter] = whole.narrow(0, fragment.start, fragment.numel)
        return found

    def skipping(self) -> AbstractContextManager[None]:
        """With both kinds of gradients cleared in place of the update."""
        optimizer = self._optimizer

        def skip(*_: Any, **__: Any) -> None:
            optimizer.overflow, optimizer._global_grad_norm = True, math.inf
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()

        return overridden((optimizer, "step", skip))

    def _groups(self) -> list[list[nn.Parameter]]:
        return [list(group) for group in self._optimizer.bf16_groups]

    def _fragments(self) -> Iterator[Fragment]:
        for group, master in zip(self.groups, self._optimizer.fp32_groups_flat_partition, strict=True):
            for parameter in group:
                mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield Fragment(parameter, here.start, here.numel, master, there.start)


class _Scaled(Partition):
    """With a loss scale, where the model is float16."""

    @property
    def loss_scale(self) -> float | None:
        """None but in float16."""
        return float(self._optimizer.loss_scale) if self._engine.fp16_enabled() else None

    @property
    def scaler(self) -> Any | None:
        """Its ``loss_scaler``."""
        return self._optimizer.loss_scaler

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """By an overflow of which the loss scale learns nothing."""
        with self.overflowing(), overridden((self._optimizer, "_update_scale", nothing)):
            yield


class ZeroOneTwo(_Scaled):
    """Stages 1 and 2: each rank updates a run of every group's flattened parameters."""

    needs = (
        "bit16_groups",
        "params_in_partition",
        "partition_size",
        "real_dp_process_group",
        "single_partition_of_fp32_groups",
        "averaged_gradients",
        "grad_start_offset",
        "grad_partition_insertion_offset",
        "get_param_id",
        "cpu_offload",
        "check_grad_overflow",
        "has_overflow",
        "scaled_global_norm",
        "_update_scale",
        "_wait_for_offload_copies",
        "loss_scale",
        "loss_scaler",
    )

    def gradients(self) -> dict[Tensor, Tensor]:
        """The averaged gradients, or what was copied of them to the host."""
        self._optimizer._wait_for_offload_copies()
        if self._optimizer.cpu_offload:
            return self._offloaded_gradients()
        found: dict[Tensor, Tensor] = {}
        for i, parameters in enumerate(self._optimizer.params_in_partition):
            gradients = self._optimizer.averaged_gradients.get(i) or []
            found.update(zip(parameters, (g.view(-1) for g in gradients if not _is_padding(g)), strict=False))
        return found

    def _offloaded_gradients(self) -> dict[Tensor, Tensor]:
        reached = self._optimizer.norm_for_param_grads  # of others there is but what an earlier step has left
        return {
            p: fragment.within(fragment.master.grad)
            for p, fragment in self.fragments.items()
            if fragment.master.grad is not None and self._optimizer.get_param_id(p) in reached
        }

    def overflowing(self) -> AbstractContextManager[None]:
        """By an overflow that every rank sees, whatever the precision."""
        optimizer = self._optimizer
        return overridden(
            (optimizer, "check_grad_overflow", True),
            (optimizer, "has_overflow", lambda *_, **__: True),
            (optimizer, "scaled_global_norm", lambda *_, **__: torch.tensor(math.inf)),
        )

    def _groups(self) -> list[list[nn.Parameter]]:
        return [list(group) for group in self._optimizer.bit16_groups]

    def _fragments(self) -> Iterator[Fragment]:
        optimizer = self._optimizer
        for i, master in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = torch.distributed.get_rank(optimizer.real_dp_process_group[i])
            starts, offsets = optimizer.grad_start_offset[i][rank], optimizer.grad_partition_insertion_offset[i][rank]
            for parameter in optimizer.params_in_partition[i]:
                known_as = optimizer.get_param_id(parameter)
                start, offset = int(starts[known_as]), int(offsets[known_as])
                numel = min(parameter.numel() - start, int(optimizer.partition_size[i]) - offset)
                yield Fragment(parameter, start, numel, master, offset)


class ZeroThree(_Scaled):
    """Stage 3: each rank holds and updates a run of every parameter."""

    needs = (
        "fp16_groups",
        "sub_group_to_group_id",
        "fp32_partitioned_groups_flat",
        "averaged_gradients",
        "grad_position",
        "get_param_id",
        "offload_optimizer",
        "_get_sub_group_partition_rank",
        "_partition_all_parameters",
        "_overflow_check_and_loss_scale_update",
        "_loss_scale_update_and_overflow_cleanup",
        "_update_scale",
        "invalidate_secondary_tensor",
        "loss_scale",
        "loss_scaler",
    )
    has_whole_parameters = False

    def gradients(self) -> dict[Tensor, Tensor]:
        """The averaged gradients without padding, or what was copied of them to the host."""
        found: dict[Tensor, Tensor] = {}
        for i, group in enumerate(self._optimizer.fp16_groups):
            for j, parameter in enumerate(group):
                fragment = self.fragments.get(parameter)
                if fragment is None:
                    continue
                if not self._optimizer.offload_optimizer:
                    found[parameter] = self._optimizer.averaged_gradients[i][j].view(-1)[: fragment.numel]
                elif fragment.master.grad is not None:
                    found[parameter] = fragment.within(fragment.master.grad)
        return found

    def overflowing(self) -> AbstractContextManager[None]:
        """By an overflow that every rank sees, whatever the precision."""
        optimizer = self._optimizer

        def overflow(*_: Any, update_scale: bool = True, **__: Any) -> Any:
            optimizer.overflow = True
            return optimizer._loss_scale_update_and_overflow_cleanup() if update_scale else True

        return overridden((optimizer, "_overflow_check_and_loss_scale_update", overflow))

    def held(self, parameter: Any) -> Tensor:
        """The run of this rank, without padding."""
        fragment = self.fragments.get(parameter)
        held: Tensor = parameter.ds_tensor.detach().view(-1)[: 0 if fragment is None else fragment.numel]
        return held

    def shape(self, parameter: Any) -> torch.Size:
        """From before it was split."""
        return torch.Size(parameter.ds_shape)

    def before_writing(self) -> None:
        """Gives up whole copies, which are gathered again before their next use."""
        self._optimizer._partition_all_parameters()

    def after_writing(self) -> None:
        """Gives up the copies that hpZ keeps within a node."""
        self._optimizer.invalidate_secondary_tensor()

    def _groups(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = [[] for _ in self.base.param_groups]
        for i, parameters in enumerate(self._optimizer.fp16_groups):
            groups[self._optimizer.sub_group_to_group_id[i]] += parameters
        return groups

    def _fragments(self) -> Iterator[Fragment]:
        optimizer = self._optimizer
        for i, (group, master) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        ):
            rank = optimizer._get_sub_group_partition_rank(i)
            for parameter in group:
                size = parameter.partition_numel()  # with padding, in the last rank's
                numel = max(0, min(size, parameter.ds_numel - rank * size))
                offset = optimizer.grad_position[optimizer.get_param_id(parameter)][1]
                yield Fragment(parameter, rank * size, numel, master, offset)


def _is_padding(gradient: Tensor) -> bool:
    return bool(getattr(gradient, "_zero_padding", False))
