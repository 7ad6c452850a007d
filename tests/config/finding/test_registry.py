"""Plugins are found from their source, and the source is not run."""

import ast
import subprocess
import sys
import time

import pytest

from mpt.config.checking.precision_names import ALIASES, resolve_precision_name
from mpt.config.finding.registry import INSTALLED, SUBPACKAGES, Registry

pytestmark = pytest.mark.tier("fast")


def test_a_plugin_whose_imports_do_not_exist_is_found_and_its_settings_work(registry):
    plugin = registry.find("nn", "net")
    assert plugin.settings_class(width=3).kind == "round"
    assert (plugin.task, plugin.description, plugin.notes["width"]) == (
        "sort",
        "A small network.",
        "How wide it is.",
    )


def test_nothing_but_settings_is_executed(tmp_path):
    (tmp_path / "nn").mkdir()
    canary = tmp_path / "canary"
    (tmp_path / "nn" / "bad.py").write_text(
        f'''"""Bad."""
from mpt.config.options import Options
open({str(canary)!r}, "w").close()
CANARY = open({str(canary)!r}, "w")
@open({str(canary)!r}, "w").write
class Other:
    open({str(canary)!r}, "w").close()
if True:
    open({str(canary)!r}, "w").close()
class Settings(Options):
    width: int = 1
'''
    )
    assert Registry(tmp_path).find("nn", "bad").settings_class().width == 1
    assert not canary.exists()


def test_a_file_without_settings_is_no_plugin(registry):
    assert registry.find("nn", "shared_parts") is None
    assert registry.names("nn") == ["net"]


def test_one_file_may_have_several_names_each_with_its_defaults(registry):
    assert registry.names("precision") == ["O1", "amp", "bf16", "fp32"]
    assert registry.find("precision", "bf16").defaults == {"dtype": "bfloat16"}
    assert registry.find("precision", "modes") is None


@pytest.mark.parametrize(
    "name", ["../nn/net", "net.py", "", "/etc/passwd", "__init__", "net\0", "x" * 10_000]
)
def test_a_name_is_compared_and_never_used_as_a_path(registry, name):
    assert registry.find("nn", name) is None


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "tasks" / "one.py"
    source = (
        "from mpt.config.options import Options\nclass Settings(Options):\n    width: int = {}\n"
    )
    path.write_text(source.format(1))
    registry = Registry(tmp_path)
    first = registry.find("tasks", "one").settings_class
    assert registry.find("tasks", "one").settings_class is first
    path.write_text(source.format(25))
    assert registry.find("tasks", "one").settings_class().width == 25


def test_a_settings_class_of_another_family_is_a_programmers_error(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.py").write_text("class Settings:\n    pass\n")
    with pytest.raises(TypeError, match="does not derive from Options"):
        Registry(tmp_path).find("tasks", "one")


def test_every_installed_plugin_is_read_and_its_defaults_are_valid():
    found = [
        INSTALLED.find(subpackage, name)
        for subpackage in SUBPACKAGES
        for name in INSTALLED.names(subpackage)
    ]
    assert {"dcgan", "small_cnn", "digits", "amp", "adam"} <= {plugin.name for plugin in found}
    for plugin in found:
        assert plugin.description
        for name, field in plugin.settings_class.model_fields.items():
            assert name != {"precision": "mode", "memory": None}.get(plugin.subpackage, "name"), (
                f"{plugin.path}: {name} is taken"
            )
            # only a data set may insist on being told where its files are
            assert not field.is_required() or plugin.subpackage == "data", (
                f"{plugin.path}: {name} has no default"
            )
        if plugin.subpackage != "data":
            plugin.settings_class.model_validate(plugin.defaults)
        tree = ast.parse(plugin.path.read_text("utf-8"))
        assert any(
            isinstance(node, ast.FunctionDef) and node.name == "build" for node in tree.body
        ), plugin.path


def test_all_subpackages_are_read_quickly_and_without_torch():
    code = """
import sys, time
from mpt.config.finding.registry import INSTALLED as registry, SUBPACKAGES
started = time.process_time()
plugins = [registry.find(subpackage, name) for subpackage in SUBPACKAGES for name in registry.names(subpackage)]
first = time.process_time() - started
for subpackage in SUBPACKAGES:
    registry.names(subpackage)
print(len(plugins), first, time.process_time() - started - first, "torch" in sys.modules)
"""
    words = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(words[0]) > 4
    assert float(words[1]) < 2.0  # a bound that a busy machine keeps; about 0.1 s on a quiet one
    assert float(words[2]) < 0.1
    assert words[3] == "False"


def test_one_name_is_found_at_once():
    registry = Registry()
    started = time.process_time()
    assert registry.find("nn", "dcgan")
    assert time.process_time() - started < 0.5


def test_names_of_other_frameworks_mean_ours():
    known = ["fp32", "amp", "bf16", "O1", "fp16-pure", "bf16-pure"]
    assert resolve_precision_name("16-mixed", known) == ("amp", {"dtype": "float16"})
    assert resolve_precision_name("o1", known) == ("O1", {})
    assert resolve_precision_name("AMP", known) == ("amp", {})
    assert resolve_precision_name("fp33", known) == ("fp33", {})
    assert {mode for mode, _ in ALIASES.values()} <= set(known)
    assert {mode for mode, _ in ALIASES.values()} <= set(INSTALLED.names("precision"))


def test_the_imported_module_takes_the_settings_over():
    plugin = INSTALLED.find("optim", "adam")
    settings = plugin.settings_class(betas=(0.5, 0.9))
    native = plugin.native_settings(settings)
    assert type(native) is plugin.load().Settings
    assert native.model_dump() == settings.model_dump()
