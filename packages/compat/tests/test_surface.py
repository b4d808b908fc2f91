"""Every row of the table is true, every module is there, and what is missing says so in every way Python can ask."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed._errors import UnsupportedImportError, UnsupportedNameError
from deepspeed._stubs import stub, write
from deepspeed._surface import MISSING_ATTRIBUTES, SURFACE, ConstantRow, Missing
from deepspeed._surface.upstream_names import reason_of, refused_name, upstream_modules

from ds_config.errors import UnsupportedError
from ds_testing.effects import import_effects

HERE = [
    (module, name) for module, rows in SURFACE.items() for name, row in rows.items() if not isinstance(row, Missing)
]
GONE = [(module, name) for module, rows in SURFACE.items() for name, row in rows.items() if isinstance(row, Missing)]
ALL_MISSING = [
    module
    for module, rows in SURFACE.items()
    if rows and not any(home == module or home.startswith(f"{module}.") for home, _ in HERE)
]


@pytest.mark.parametrize("module", sorted({module for module, _ in HERE}))
def test_what_the_table_says_is_there(module):
    found = importlib.import_module(module)
    for home, name in HERE:
        if home == module:
            row = SURFACE[home][name]
            value = getattr(found, name)
            live = isinstance(row, str) and name in getattr(sys.modules[row.partition(":")[0]], "LIVE", ())
            assert live or (value is not None) == (name != "mpu" and row != ConstantRow(None)), name
    public = [name for home, name in HERE if home == module]
    assert found.__all__ == sorted(public)
    assert set(public) <= set(dir(found))


def test_the_modules_are_no_files_and_their_stubs_are_the_table(tmp_path):
    root = Path(deepspeed.__path__[0])
    assert {path.name for path in root.glob("*.py")} == {
        "__init__.py", "_errors.py", "_finder.py", "_stubs.py",
    }  # fmt: skip
    paths = write(tmp_path)
    assert len(paths) == len(set(paths)) == len(SURFACE)
    for home, name in HERE:
        assert re.search(rf"^(from [\w.]+ import \w+ as )?{name}(: \w+)?$", stub(home), re.MULTILINE)
    for home, name in GONE:
        assert not re.search(rf" as {name}$", stub(home), re.MULTILINE)
    for path in paths:
        ast.parse((tmp_path / path).read_text())
    assert Path("runtime/zero/__init__.pyi") in paths
    assert Path("ops/aio.pyi") in paths


def test_modules_are_found_as_modules_of_files_are():
    import deepspeed.runtime.zero.partition_parameters as found

    spec = importlib.util.find_spec("deepspeed.runtime.lr_schedules")
    assert spec.loader is not None
    assert sys.modules["deepspeed.runtime.zero"].partition_parameters is found
    assert pickle.loads(pickle.dumps(found.ZeroParamStatus.AVAILABLE)) is found.ZeroParamStatus.AVAILABLE
    assert importlib.reload(found).Init is deepspeed.zero.Init
    assert importlib.util.find_spec("deepspeed.flux") is None
    finders = list(sys.meta_path)
    importlib.reload(deepspeed)
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    "module", ["launcher.runner", "launcher.launch", "utils.zero_to_fp32", "checkpoint.ds_to_universal"]
)
def test_a_module_with_main_is_a_program(module):
    source = str(Path(deepspeed.__path__[0]).parent)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"deepspeed.{module}", "--help"]
    found = subprocess.run(command, env=environ, text=True, capture_output=True)
    assert found.returncode == 0
    assert found.stdout.startswith("usage: ")


@pytest.mark.parametrize("module", ALL_MISSING)
def test_a_module_of_which_nothing_is_here_cannot_be_imported(module):
    with pytest.raises(ImportError) as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, UnsupportedError)
    assert caught.value.code == "compat-missing"
    assert caught.value.fix.startswith("Use ")


UNDECIDED = [
    (module, name)
    for module, names in upstream_modules().items()
    if module in SURFACE
    for name in names.split()
    if name not in SURFACE[module] and f"{module}.{name}" not in SURFACE
]


def test_every_module_of_upstream_is_here_or_says_what_to_use():
    assert len(upstream_modules()) > 700
    for module in upstream_modules():
        if module in SURFACE:
            continue
        with pytest.raises(UnsupportedImportError) as caught:
            importlib.import_module(module)
        assert caught.value.code == "compat-missing"
        named = caught.value.message.split(" is not here: ")[0]
        assert f"{module}.".startswith(f"{named}.")  # itself, or the first folder on the way that is not here
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("deepspeed.runtime.no_such_module")


def test_every_name_of_upstream_is_here_or_says_what_to_use():
    assert len(UNDECIDED) > 500
    for module, name in UNDECIDED:
        if module in ALL_MISSING:
            continue
        found = importlib.import_module(module)
        assert not hasattr(found, name)
        with pytest.raises(UnsupportedNameError) as caught:
            getattr(found, name)
        assert caught.value.code == "compat-missing"
        with pytest.raises(UnsupportedImportError, match="is not here"):
            importlib.import_module(f"{module}.{name}")  # what `from module import name` comes to


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("deepspeed.DualPipeVModule", "PipelineModule"),
        ("deepspeed.runtime.pipe.dualpipev", "PipelineModule"),
        ("deepspeed.sequence.vocab_parallel_ops", "ds_parallel.sequence"),
        ("deepspeed.runtime.constants.BFLOAT16_FORMAT", "the text of the key"),
    ],
)
def test_the_reason_is_that_of_the_nearest_part(path, use):
    assert use in reason_of(path).instead


def test_a_missing_name_answers_hasattr_getattr_and_import():
    assert not hasattr(deepspeed, "replace_transformer_layer")
    assert getattr(deepspeed, "replace_transformer_layer", None) is None
    with pytest.raises(UnsupportedNameError, match=r"deepspeed\.replace_transformer_layer is not here"):
        _ = deepspeed.replace_transformer_layer
    with pytest.raises(UnsupportedImportError, match=r"deepspeed\.zero\.DeepSpeedZeRoOffload is not here"):
        from deepspeed.zero import DeepSpeedZeRoOffload  # noqa: F401
    with pytest.raises(UnsupportedImportError, match=r"deepspeed\.moe\.layer\.TopKGate is not here"):
        from deepspeed.moe.layer import TopKGate  # noqa: F401


@pytest.mark.parametrize(("module", "name"), GONE)
def test_each_missing_name_says_what_to_use(module, name):
    row = SURFACE[module][name]
    assert isinstance(row, Missing)
    assert row.why
    assert row.instead
    if module not in ALL_MISSING and not any(module.startswith(f"{other}.") for other in ALL_MISSING):
        assert not hasattr(importlib.import_module(module), name)


INSTEADS = sorted(
    {
        row.instead
        for rows in (*SURFACE.values(), MISSING_ATTRIBUTES)
        for row in rows.values()
        if isinstance(row, Missing)
    }
    | {reason_of(module).instead for module in upstream_modules()}
)


@pytest.mark.parametrize("instead", INSTEADS)
def test_what_to_use_instead_exists(instead):
    """Names of packages, of torch and of the facade resolve; commands of `ds` are installed."""
    commands = {entry.name for entry in importlib.metadata.entry_points(group="ds.commands")}
    for command in re.findall(r"`ds (\w+)", instead):
        assert command in commands
    for path in re.findall(r"\b(?:ds_\w+|deepspeed|torch)(?:\.\w+)+", instead):
        if path == "ds_accel.devices":  # an entry point group
            continue
        module, *names = path.split(".")
        found = importlib.import_module(module)
        for name in names:
            module += f".{name}"
            found = getattr(found, name, None) or importlib.import_module(module)


def test_every_name_that_clients_use_has_a_row():
    lines = (Path(__file__).parent / "data" / "client_names.txt").read_text().splitlines()
    unknown = []
    for path in (line for line in lines if not line.startswith("#")):
        parts = path.split(".")
        # The longest prefix that is a module; what follows the next name is an attribute of a class.
        length = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in {*SURFACE, *upstream_modules()})
        home, rest = ".".join(parts[:length]), parts[length:]
        if home in SURFACE and rest and rest[0] not in SURFACE[home] and refused_name(home, rest[0]) is None:
            unknown.append(path)
    assert len(lines) > 200
    assert unknown == []


def test_importing_it_does_nothing_else(monkeypatch):
    """No torch, no file, thread, process or setting: what it costs is its table of names."""
    monkeypatch.setenv("PYTHONPATH", str(Path(deepspeed.__path__[0]).parent))
    found = import_effects("deepspeed")
    assert found.effects == ()
    assert "torch" not in found.modules
    ours = {name for name in found.modules if name.startswith(("deepspeed", "ds_")) and "ds_testing" not in name}
    assert ours <= {
        "deepspeed", "deepspeed._errors", "deepspeed._finder", "deepspeed._surface", "ds_config",
        "ds_config.errors",
    }  # fmt: skip


def test_a_name_without_a_decision_needs_no_row_of_its_own():
    assert "EngineTimers" not in SURFACE["deepspeed.runtime.engine"]
    assert refused_name("deepspeed.runtime.engine", "EngineTimers") is not None
    assert refused_name("deepspeed.runtime.engine", "flux_capacitor") is None


def test_an_unknown_name_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flux_capacitor'") as caught:
        _ = deepspeed.flux_capacitor
    assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(ImportError):
        from deepspeed import flux_capacitor  # noqa: F401


def test_names_can_be_replaced_and_put_back(monkeypatch):
    original = deepspeed.initialize
    monkeypatch.setattr(deepspeed, "initialize", lambda **options: "mine")
    assert deepspeed.initialize() == "mine"
    monkeypatch.undo()
    assert deepspeed.initialize is original
    from unittest import mock

    with mock.patch("deepspeed.init_distributed", autospec=True) as patched:
        deepspeed.init_distributed()
        patched.assert_called_once()
    with mock.patch("deepspeed.DeepSpeedEngine", autospec=True), mock.patch("deepspeed.zero.Init", autospec=True):
        pass


def test_reached_by_attribute_after_a_bare_import():
    text = """
import sys
before = set(sys.modules)
import deepspeed
assert "torch" not in sys.modules
for path in ["zero.Init", "zero.GatheredParameters", "comm.get_rank", "utils.logger", "utils.logging.logger",
             "utils.groups._get_sequence_parallel_group", "utils.safe_get_full_grad", "checkpointing.configure",
             "runtime.lr_schedules.VALID_LR_SCHEDULES", "runtime.zero.partition_parameters.ZeroParamStatus",
             "ops.__compatible_ops__", "accelerator.get_accelerator", "version", "__version__", "ops.adam.DeepSpeedCPUAdam"]:
    found = deepspeed
    for name in path.split("."):
        found = getattr(found, name)
"""
    source = str(Path(deepspeed.__path__[0]).parent)
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{text}"], check=True)


SIGNATURES = {
    "deepspeed.initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
    "deepspeed.init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "deepspeed.DeepSpeedEngine.backward": "self loss retain_graph scale_wrt_gas",
    "deepspeed.DeepSpeedEngine.step": "self lr_kwargs",
    "deepspeed.DeepSpeedEngine.save_checkpoint": "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.load_checkpoint": "self load_dir tag load_module_strict load_optimizer_states "
    "load_lr_scheduler_states load_module_only custom_load_fn",
    "deepspeed.DeepSpeedEngine.compile": "self backend compile_kwargs schedule compiled_autograd_enabled",
    "deepspeed.DeepSpeedEngine._consolidated_16bit_state_dict": "self exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.save_16bit_model": "self save_dir save_filename exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.offload_states": "self include device pin_memory non_blocking",
    "deepspeed.DeepSpeedEngine.reload_states": "self non_blocking",
    "deepspeed.DeepSpeedEngine.set_gradient_accumulation_boundary": "self is_boundary",
    "deepspeed.zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path "
    "config enabled dtype mpu",
    "deepspeed.zero.GatheredParameters": "params modifier_rank fwd_module enabled",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_that_clients_give_by_name_or_look_for(path):
    found = deepspeed
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    wanted = SIGNATURES[path].split()
    assert list(inspect.signature(found).parameters)[: len(wanted)] == wanted


def test_versions():
    folder = Path(__file__).resolve().parents[1]
    meta = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert deepspeed.__version__ == deepspeed.version == meta["version"]
    assert (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) == (0, 19, 8)
    assert deepspeed.version >= "0.16.4"  # as clients compare it
    from deepspeed.git_version_info import torch_info, version

    assert version == meta["version"]
    parts = {name: tuple(map(int, torch_info[f"{name}_version"].split(".")[:2])) for name in ("cuda", "nccl", "hip")}
    assert (parts["cuda"] > (0, 0)) == bool(torch.version.cuda)
    assert (parts["hip"] > (0, 0)) == bool(torch.version.hip)
    assert (parts["nccl"] > (0, 0)) == torch.distributed.is_nccl_available()


def test_a_model_with_experts_is_written_as_upstream_has_it():
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.sharded_moe import top1gating
    from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), MoE(hidden_size=4, expert=torch.nn.Linear(4, 4), num_experts=2, ep_size=1, k=1)
    )
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    assert [group["name"] for group in groups] == ["all", "ep_size_1"]
    assert has_moe_layers(model) == (True, 2)
    assert model(torch.randn(6, 4))[0].shape == (6, 4)
    assert len(top1gating(torch.randn(6, 2), 1.0, 1)) == 4
