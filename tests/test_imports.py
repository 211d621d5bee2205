import ast
import graphlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stabilityguard
from stabilityguard import GuardedOptimizer

ROOT = Path(stabilityguard.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

RANKS = [
    {"stabilityguard", "stabilityguard.errors", "stabilityguard.config", "stabilityguard.report.records"},
    {"stabilityguard.detect", "stabilityguard.recover.breaker"},
    {"stabilityguard.groups", "stabilityguard.measure", "stabilityguard.distributed"},
    {"stabilityguard.recover", "stabilityguard.report"},
    {
        "stabilityguard.inquest",
        "stabilityguard.council",
        "stabilityguard.case",
        "stabilityguard.memory",
        "stabilityguard.subject",
        "stabilityguard.chronicle",
        "stabilityguard.guard",
    },
    {
        "stabilityguard.closures",
        "stabilityguard.lazy_state",
        "stabilityguard.arguments",
        "stabilityguard.scaling",
        "stabilityguard.guarded",
        "stabilityguard.prepared",
        "stabilityguard.optimizer",
        "stabilityguard.distributed.deepspeed",
    },
    {"stabilityguard.testing", "stabilityguard.demo", "stabilityguard.cli"},
    {"stabilityguard.integrations"},
]
"""Who may import whom: a module imports from its own row and the rows above. A room stands for all modules in it."""


def module_name(file):
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NEEDED = {
    "stabilityguard.integrations.huggingface": {"accelerate", "transformers"},
    "stabilityguard.integrations.lightning": {"lightning", "pytorch_lightning"},
}
"""The packages that adapters need; all other modules need none but torch."""

TREES = {module_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def rank(module):
    """The row of the module itself, or of the nearest room around it."""
    for name in (module.rsplit(".", depth)[0] for depth in range(module.count("."))):
        rows = [row for row, names in enumerate(RANKS) if name in names]
        if rows:
            return rows[0]
    return 0 if module == "stabilityguard" else None


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def at_module_level(node):
    """The nodes that run when the module is imported: not those in functions, nor those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from at_module_level(other)
            continue
        yield child
        yield from at_module_level(child)


def imported(nodes):
    """Names of the modules that the import statements among ``nodes`` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in TREES else str(node.module)


def graph():
    """For every module those of the package that it imports when it is imported."""
    return {
        module: {name for name in imported(at_module_level(tree)) if name in TREES and name != module}
        for module, tree in TREES.items()
    }


def in_fresh_interpreter(code, cwd):
    """What ``code`` prints as JSON in its last line, run by an interpreter that has imported nothing of ours."""
    # Older releases of torch leave a temporary directory to be removed at the end of the process.
    strict = ["-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning"]
    done = subprocess.run(
        [sys.executable, "-X", "utf8", *strict, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


# Importing does nothing else --------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_torch_starts_nothing_and_leaves_nothing(tmp_path):
    code = """
import builtins, json, logging, os, sys, threading, warnings, random, signal
written, really_open = [], builtins.open
def watch(event, arguments):
    if event == "open" and not str(arguments[0]).endswith((".py", ".pyc")) and isinstance(arguments[1], str):
        if set(arguments[1]) & set("wax+"):
            written.append(str(arguments[0]))
    if event in ("os.mkdir", "socket.connect", "subprocess.Popen", "os.system", "os.fork"):
        written.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(watch)
handlers, level, filters = list(logging.root.handlers), logging.root.level, list(warnings.filters)
environment, state, hook = dict(os.environ), random.getstate(), sys.excepthook
interrupt = signal.getsignal(signal.SIGINT)
import stabilityguard
logger = logging.getLogger("stabilityguard")
print(json.dumps({
    "heavy": sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "jsonschema", "wandb", "mlflow"}),
    "ours": sorted(name for name in sys.modules if name.startswith("stabilityguard")),
    "logging": [logging.root.handlers != handlers, logging.root.level != level, len(logger.handlers), logger.level],
    "threads": threading.active_count(),
    "written": written,
    "changed": [environment != os.environ, state != random.getstate(), hook is not sys.excepthook,
                filters != warnings.filters, interrupt is not signal.getsignal(signal.SIGINT)],
}))
"""
    done = in_fresh_interpreter(code, tmp_path)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout) == {
        "heavy": [],
        "ours": ["stabilityguard"],
        "logging": [False, False, 0, 0],
        "threads": 1,
        "written": [],
        "changed": [False] * 5,
    }
    assert os.listdir(tmp_path) == []


def test_settings_and_errors_need_no_torch(tmp_path):
    code = """
import sys
from stabilityguard import Budget, ConfigurationError, GradientSpikeError, SnapshotPolicy, StabilityGuardError
print("torch" in sys.modules)
"""
    assert in_fresh_interpreter(code, tmp_path).stdout == "False\n"


def test_dir_lists_the_public_names_before_they_are_used(tmp_path):
    code = "import json, sys, stabilityguard; print(json.dumps([dir(stabilityguard), 'torch' in sys.modules]))"
    listed, has_torch = json.loads(in_fresh_interpreter(code, tmp_path).stdout)
    assert set(stabilityguard.__all__) | {"__version__"} <= set(listed)
    assert not has_torch


def test_importing_every_module_prints_nothing_starts_nothing_and_leaves_nothing(tmp_path):
    code = f"""
import importlib, logging, threading
import torch
handlers, threads = list(logging.root.handlers), threading.active_count()
for name in {sorted(TREES.keys() - NEEDED.keys())!r}:
    importlib.import_module(name)
print(logging.root.handlers == handlers, logging.getLogger("stabilityguard").handlers)
print(threading.active_count() == threads)
"""
    done = in_fresh_interpreter(code, tmp_path)
    assert (done.stdout, done.stderr) == ("True []\nTrue\n", "")
    assert os.listdir(tmp_path) == []


# The public names -------------------------------------------------------------------------------------------------


def test_every_public_name_can_be_imported_and_is_the_one_of_its_home():
    for name in stabilityguard.__all__:
        value = getattr(stabilityguard, name)
        assert value.__name__ == name
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_the_list_of_public_names_is_sorted_complete_and_known_to_type_checkers():
    assert list(stabilityguard.__all__) == sorted(set(stabilityguard.__all__))
    promised = {"GuardedOptimizer", "GradientSpikeError", "SnapshotPolicy", "Budget", "StepRecord", "SpikeReport"}
    assert promised | {"StabilityGuardError", "ConfigurationError"} <= set(stabilityguard.__all__)
    (block,) = [node for node in TREES["stabilityguard"].body if is_type_checking(node)]
    assert sorted(alias.name for node in block.body for alias in node.names) == list(stabilityguard.__all__)
    assert sorted(stabilityguard._HOMES) == list(stabilityguard.__all__)


def test_dir_lists_the_public_names_after_their_use():
    assert stabilityguard.GuardedOptimizer is GuardedOptimizer
    assert set(stabilityguard.__all__) | {"__version__"} <= set(dir(stabilityguard))
    assert dir(stabilityguard) == sorted(set(dir(stabilityguard)))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'stabilityguard' has no attribute 'Magic'"):
        stabilityguard.Magic  # noqa: B018
    with pytest.raises(ImportError):
        exec("from stabilityguard import Magic")
    assert not hasattr(stabilityguard, "__wrapped__")


def test_a_star_import_gives_the_public_names():
    names = {}
    exec("from stabilityguard import *", names)
    assert names.keys() - {"__builtins__"} == set(stabilityguard.__all__)


def test_the_version_is_the_one_that_is_installed():
    assert importlib.import_module("importlib.metadata").version("stabilityguard") == stabilityguard.__version__


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "py.typed").is_file()


# Who imports whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", TREES)
def test_a_module_needs_nothing_but_torch_and_the_standard_library(module):
    allowed = {*sys.stdlib_module_names, "torch", "stabilityguard", *NEEDED.get(module, ())}
    names = {name.split(".")[0] for name in imported(ast.walk(TREES[module]))}
    assert names <= allowed


@pytest.mark.parametrize("module", TREES)
def test_a_module_imports_only_from_its_own_row_and_the_rows_above(module):
    own = rank(module)
    assert own is not None, f"{module} has no row yet: give it one"
    assert {name: rank(name) for name in graph()[module] if rank(name) is None or rank(name) > own} == {}


def test_no_modules_import_each_other_in_a_circle():
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def everything_imported_by(room):
    """All that the modules of a room import from the package, inside functions and for type checkers too."""
    return {
        name
        for module, tree in TREES.items()
        if module == room or module.startswith(room + ".")
        for name in imported(ast.walk(tree))
        if name in TREES and not (name == room or name.startswith(room + "."))
    }


def test_judging_knows_no_measuring_recovering_or_printing():
    forbidden = ("measure", "recover", "report.console", "report.journal", "report.sinks", "guard", "optimizer")
    for name in everything_imported_by("stabilityguard.detect"):
        assert not name.removeprefix("stabilityguard.").startswith(forbidden), name


def test_measuring_knows_no_recovering_reporting_or_guard():
    for name in everything_imported_by("stabilityguard.measure"):
        assert not name.removeprefix("stabilityguard.").startswith(("recover", "report", "guard", "optimizer")), name


def test_recovering_and_reporting_do_not_know_each_other_but_for_records():
    recovering = everything_imported_by("stabilityguard.recover")
    reporting = everything_imported_by("stabilityguard.report")
    assert {name for name in recovering if name.startswith("stabilityguard.report")} <= {
        "stabilityguard.report.records"
    }
    assert {name for name in reporting if name.startswith("stabilityguard.recover")} == set()


def test_the_guard_does_not_know_who_calls_it():
    callers = {"stabilityguard.optimizer", "stabilityguard.closures", "stabilityguard.scaling"}
    assert everything_imported_by("stabilityguard.guard") & callers == set()


@pytest.mark.parametrize(("module", "package"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_an_adapter_without_its_package_names_the_command_that_installs_it(module, package, tmp_path):
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["accelerate", "transformers", "lightning", "pytorch_lightning"]))
try:
    import stabilityguard.integrations.{module}
except ImportError as error:
    print(error)
"""
    shown = in_fresh_interpreter(code, tmp_path).stdout
    assert f"needs {package}" in shown
    assert shown.endswith(f': pip install "stabilityguard[{module}]"\n')


def test_nothing_but_adapters_imports_an_adapter():
    for module, tree in TREES.items():
        if not module.startswith("stabilityguard.integrations"):
            assert not any(name.startswith("stabilityguard.integrations") for name in imported(ast.walk(tree))), module


def test_nothing_imports_the_command_line():
    for module, tree in TREES.items():
        assert module == "stabilityguard.cli" or "stabilityguard.cli" not in set(imported(ast.walk(tree)))


# How it is written ------------------------------------------------------------------------------------------------


def public_definitions(node, path=""):
    """Public classes and functions at module level and in public classes; setters share their getter's words."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            if any(ast.unparse(decorator).endswith((".setter", ".deleter")) for decorator in child.decorator_list):
                continue
            yield path + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{path}{child.name}.")


@pytest.mark.parametrize("module", TREES)
def test_every_public_class_and_function_says_what_it_is_for(module):
    tree = TREES[module]
    assert ast.get_docstring(tree), "the module"
    assert [name for name, node in public_definitions(tree) if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_file_is_short_enough_to_be_read_at_once(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 350
