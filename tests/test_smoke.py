import torch

from tests.support import Net, guard, train


def test_a_nan_gradient_is_skipped_and_training_goes_on():
    model = Net()
    optimizer = guard(model)

    def spoil(step, model):
        if step == 5:
            model.head.weight.grad[0, 0] = torch.nan

    train(model, optimizer, range(1, 9), spoil=spoil)
    assert [report.record.step for report in optimizer.reports] == [5]
    assert all(p.isfinite().all() for p in model.parameters())
