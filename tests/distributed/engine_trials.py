"""What an engine in any configuration has to stand: faults, and ways back."""

import torch

from stabilityguard import CheckpointPolicy, SnapshotPolicy
from tests.distributed import wrapped
from tests.distributed.engines import RANKS, Noisy, Trainer, adamw, fragments
from tests.distributed.ranks import run


def through_faults(configuration, optimizer=adamw, ranks=RANKS, run=run):
    """What was told of a spike and of a NaN on rank 1, and of the steps after them; and the largest error of a norm.

    Looks on the way whether healthy steps are those of a bare engine, and bad ones leave everything as it was.
    """
    times = configuration["gradient_accumulation_steps"]
    first, *others = run(ranks, _train_through_faults, configuration, optimizer, patience=240)
    assert others == [first] * (ranks - 1)
    told, norms, layer, _ = first
    assert layer == "head"
    true = {layer: norm / times for layer, norm in wrapped.true_norms(1000, ranks, micro_batches=times).items()}
    assert norms.keys() == true.keys()
    return told, max(abs(norms[layer] / true[layer] - 1) for layer in true)


def _train_through_faults(rank, configuration, optimizer):
    bare, guarded = (Trainer(rank, configuration, optimizer, guards=guards) for guards in (False, True))
    assert (bare.step(1), bare.digest()) == (guarded.step(1), guarded.digest())
    norms = dict(guarded.guard.last_record.layer_norms)  # before clipping
    for number in (2, 3, 4):
        assert (bare.step(number), bare.digest()) == (guarded.step(number), guarded.digest())
    records = []
    for number, bad in ((5, 1000.0), (6, None), (7, float("nan")), (8, None)):
        before, lr = guarded.digest(), guarded.engine.get_lr()
        guarded.step(number, factor=bad if rank == 1 else None)
        records.append(guarded.guard.last_record)
        assert (guarded.digest() == before, guarded.engine.get_lr() == lr) == (bad is not None,) * 2
        assert guarded.engine.was_step_applied() == (bad is None)
        assert all(p.grad is None or not p.grad.any() for p in guarded.model.parameters()) or bad is None
    assert (guarded.engine.global_steps, guarded.engine.skipped_steps) == (8, 2)
    assert guarded.scheduler.last_epoch == 6
    told = [(record.action, record.kind, record.bad_ranks) for record in records]
    return told, norms, records[2].trigger_layer, [wrapped.in_full(record) for record in records]


def corrupt_a_shard(rank, configuration, optimizer=adamw):
    """What was told of an Inf in rank 1's part of a gradient, its layer, and whether the engine left all as it was."""
    trainer = Trainer(rank, configuration, optimizer)
    for number in (1, 2, 3):
        trainer.step(number)
    spoiled = []

    def corrupt():
        if rank == 1:
            gradients = fragments(trainer.guard)
            parameter = max(gradients, key=lambda p: gradients[p].numel())
            gradients[parameter].view(-1)[0] = torch.inf
            spoiled.append(trainer.engine.param_names[parameter].rpartition(".")[0])

    before = trainer.digest()
    trainer.step(4, before=corrupt)
    record, same = trainer.guard.last_record, trainer.digest() == before and not trainer.engine.was_step_applied()
    trainer.close()
    return (record.action, record.kind, record.trigger_layer, record.bad_ranks), spoiled, same


BATCHES, CALM = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 7, 8]
"""A run whose step 6 is bad, and goes back to the end of step 4; and one that passes over that from the beginning."""


def go(rank, configuration, batches, bad=(), **options):
    """What a rank holds and counts after every step."""
    options = {"snapshots": SnapshotPolicy(every=2, keep=2, quarantine=1), "nan_action": "rollback", **options}
    trainer = Trainer(rank, configuration, model=Noisy, **options)
    states = []
    for number in batches:
        losses = trainer.step(number, factor=torch.nan if number in bad and rank == 1 else None)
        counts = trainer.engine.global_steps, trainer.engine.global_samples, trainer.engine.skipped_steps
        states.append((trainer.digest(), losses, counts, trainer.engine.get_lr(), trainer.scheduler.last_epoch))
    trainer.close()
    return states


def replay(rank, configuration, directory, places, optimizer=adamw):
    """Of every place to go back to, whether what follows a rollback is what it would have been."""
    on_disk = CheckpointPolicy(directory=str(directory), every=2, keep=2, quarantine=1)
    options = {"ram": {}, "disk": {"snapshots": False, "checkpoints": on_disk}}
    calm, same = go(rank, configuration, CALM, optimizer=optimizer), {}
    for place in places:
        disturbed = go(rank, configuration, BATCHES, bad={6}, optimizer=optimizer, **options[place])
        same[place] = [a == b for a, b in zip(disturbed[6:], calm[4:], strict=True)]
    return same
