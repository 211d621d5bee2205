"""What the documents show works as it is shown."""

import inspect
import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from stabilityguard import GuardedOptimizer, SpikeReport, StepRecord
from stabilityguard.report.console import Console
from tests.distributed.ranks import run
from tests.support import Net, batch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks():
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_loop_of_the_manual_of_checkpoints_runs_as_printed_and_goes_on():
    manual = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    loop = re.search(r"```python\n(.*?)```", manual, flags=re.DOTALL).group(1)
    loop = loop.replace("every=1000", "every=4").replace("asynchronous=True", "asynchronous=False")
    starts = []
    for steps in (20, 40):
        model = Net()
        base = torch.optim.AdamW(model.parameters(), lr=1e-3)
        names = {"model": model, "batch_number": batch, "steps": steps, "AdamW": lambda *_, base=base, **__: base}
        exec(loop, names | {"scheduler": torch.optim.lr_scheduler.LambdaLR(base, lambda step: 0.9**step)}, names)
        starts.append(names["start"])
    assert starts[0] == 0
    assert starts[1] > 0


def test_the_bridges_of_the_manual_of_trackers_and_the_readme_are_built_as_printed():
    manual = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
    built = []
    for block in [*re.findall(r"```python\n(.*?)```", manual, flags=re.DOTALL), code_blocks()[3]]:
        names = {}
        exec(block, names)
        names["bridge"].close()
        built.append(type(names["bridge"]).__name__)
    assert built == ["WandBBridge", "MLflowBridge", "TensorBoardBridge", "WandBBridge"]


def test_the_line_for_many_gpus_runs_as_printed():
    def job(rank):
        names = {"model": Net(), "fully_shard": fully_shard, "AdamW": torch.optim.AdamW}
        names["GuardedOptimizer"] = GuardedOptimizer
        exec(code_blocks()[1], names)
        names["model"](batch(1)).backward()
        names["optimizer"].step()
        return names["optimizer"].last_record.applied

    assert run(2, job) == [True, True]


def test_the_loop_of_the_readme_runs_as_printed(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).square().mean()

    model = Model()
    names = {"model": model, "dataloader": [torch.randn(8, 4) for _ in range(60)]}
    names["ema_model"] = torch.optim.swa_utils.AveragedModel(model)
    first, _, third, _, second = code_blocks()
    exec(first, names)
    assert names["optimizer"].last_record.step == 60
    assert "step 50 |" in capsys.readouterr().out
    names["model"] = None
    exec(second.replace("update_parameters(model)", "update_parameters(ema_model.module)"), names)
    names["optimizer"].close()
    names |= {"model": model, "scheduler": torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0)}
    exec(third, names)
    assert names["start"] == 0
    names["optimizer"].close()


def test_the_table_of_parameters_is_the_signature():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", README, flags=re.MULTILINE)
    parameters = list(inspect.signature(GuardedOptimizer).parameters.values())[2:]
    assert [name for name, _ in rows] == [parameter.name for parameter in parameters]
    assert [default.replace('"', "'") for _, default in rows] == [repr(parameter.default) for parameter in parameters]


def test_the_alert_of_the_readme_is_the_one_that_is_printed(capsys):
    record = StepRecord(
        step=847,
        action="skip",
        kind="spike",
        trigger_layer="transformer.h.11.mlp.c_proj",
        global_norm=850.0,
        loss=14.71,
        layers=None,
    )
    trigger = {
        "norm": 847.3,
        "baseline": 1.2,
        "ratio": 706.1,
        "kind": "spike",
        "nan_elements": None,
        "inf_elements": None,
    }
    path = "./sg_logs/spike_step847.json"
    Console(50).on_report(SpikeReport(record=record, details={"trigger": trigger}, path=path))
    assert capsys.readouterr().out in README


def test_links_lead_to_files():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), (document.name, target)
