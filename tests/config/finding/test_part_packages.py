"""Part packages from outside of mpt: folders of `--parts` and `MPT_PARTS`, and installed distributions."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpt.cli import main
from mpt.config.finding import part_packages
from mpt.config.finding.part_packages import PartPackage, outside_packages, use_parts
from mpt.config.finding.registry import INSTALLED, Registry
from mpt.config.load import load_config
from mpt.errors import ConfigError, PartError
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.lighter_modes import is_lossy, is_scaled
from mpt.planner.recipes.patches import precision_patches

MODEL = '''"""A model of one layer."""
from torch import nn
from mpt.config.options import Options
from ..losses.shared import WIDTH

TASK = "classify"

class Settings(Options):
    image_size: int = 8
    """Side of the images."""

def build(settings, data):
    return {"net": nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * settings.image_size**2, len(data.classes)))}
'''


@pytest.fixture(autouse=True)
def no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPT_PARTS", "")
    # of another test's folder
    for name in [name for name in sys.modules if name.startswith("mpt.parts.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = tmp_path / "my-parts"
    for subpackage in ("nn", "losses"):
        (parts / subpackage).mkdir(parents=True)
    (parts / "nn" / "one_layer.py").write_text(MODEL)
    (parts / "losses" / "shared.py").write_text("WIDTH = 1\n")
    return parts


def test_a_loss_with_other_arguments_is_refused_with_those_it_must_take(folder: Path) -> None:
    (folder / "losses" / "mine.py").write_text("def loss(logits):\n    return logits.mean()\n")
    use_parts([folder])
    with pytest.raises(
        ConfigError,
        match=r"declares `loss\(logits, labels\)`, which .*mine.py does not; found 'mine'",
    ):
        load_config({"model": "one_layer"}, ["task.loss=mine"])


@pytest.mark.parametrize(
    ("file", "setting"),
    [("losses/mine.py", "task.loss=mine"), ("metrics/mine.py", "task.metrics=[mine]")],
)
def test_a_loss_or_metric_that_python_cannot_read_is_named_with_its_line_and_stops_only_its_use(
    folder: Path, file: str, setting: str
) -> None:
    (folder / "metrics").mkdir()
    (folder / file).write_text("def loss(logits, labels): ...\ndef measure(logits labels): ...\n")
    use_parts([folder])
    assert {"focal"} <= set(INSTALLED.functions("losses"))
    assert load_config({"model": "one_layer"}, ["task.loss=focal", "task.metrics=[top_five]"])
    with pytest.raises(ConfigError, match=r"mine\.py:2: invalid syntax.*found 'mine'"):
        load_config({"model": "one_layer"}, [setting])


def test_a_loss_that_is_named_as_torch_s_own_is_refused(folder: Path) -> None:
    (folder / "losses" / "cross_entropy.py").write_text(
        "def loss(logits, labels):\n    return 2 * logits.mean()\n"
    )
    use_parts([folder])
    with pytest.raises(PartError, match=r"cross_entropy\.py: there is a loss named cross_entropy"):
        load_config({"model": "one_layer"}, ["task.loss=cross_entropy"])


def test_a_folder_s_parts_are_found_and_imported_without_being_on_the_path(folder: Path) -> None:
    before = list(sys.path)
    assert INSTALLED.find("nn", "one_layer") is None
    use_parts([folder])
    plugin = INSTALLED.find("nn", "one_layer")
    assert plugin
    assert plugin.module_name == "mpt.parts.my_parts.nn.one_layer"
    assert "one_layer" in INSTALLED.names("nn")
    assert load_config({"model": "one_layer"}).model.settings.image_size == 8
    assert plugin.load().WIDTH == 1  # through a relative import
    assert sys.path == before


def test_a_process_that_is_started_knows_the_parts_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    use_parts(["my-parts"])
    # as when a data set is unpickled
    code = "import mpt.parts.my_parts.nn.one_layer as part; print(part.WIDTH)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout == "1\n"


def test_a_yaml_file_alone_brings_no_parts(folder: Path) -> None:
    assert "one_layer" not in INSTALLED.names("nn")
    for key in ("parts", "allow"):
        with pytest.raises(Exception, match="unknown key"):
            load_config({"model": "dcgan", key: [str(folder)]})
    assert not any(name.startswith("mpt.parts.my_parts") for name in outside_names())


def outside_names() -> list[str]:
    return [package.module_name for package in outside_packages()]


def test_folders_of_one_name_are_told_apart_and_one_given_twice_counts_once(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "parts", tmp_path / "b" / "parts", tmp_path / "c" / "2 of mine"]
    for one in folders:
        (one / "nn").mkdir(parents=True)
    use_parts([*folders, folders[0]])
    assert outside_names() == ["mpt.parts.parts", "mpt.parts.parts_2", "mpt.parts._2_of_mine"]


@pytest.mark.parametrize(
    ("made", "named", "message"),
    [
        ("x/nn", "y", "there is no folder"),
        ("x/src", "x", "none of the folders nn, tasks"),
        ("x/nn", "x/nn", "did you mean .*/x?"),
    ],
)
def test_a_folder_that_is_none_is_refused(
    tmp_path: Path, made: str, named: str, message: str
) -> None:
    (tmp_path / made).mkdir(parents=True)
    with pytest.raises(PartError, match=message):
        use_parts([tmp_path / named])
    os.environ["MPT_PARTS"] = str(tmp_path / named)
    with pytest.raises(PartError, match=f"MPT_PARTS: .*{message}"):
        INSTALLED.names("nn")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Settings(Options)\n", r"bad\.py:1: expected ':'"),
        ("class Settings:\n    pass\n", r"bad\.py: Settings does not derive from Options"),
        (
            "from mpt.config.options import Options\nclass Settings(Options):\n    x: int = nothing\n",
            r"bad\.py:3: name 'nothing' is not defined",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    folder: Path, source: str, message: str
) -> None:
    (folder / "nn" / "bad.py").write_text(source)
    use_parts([folder])
    with pytest.raises(PartError, match=message):
        INSTALLED.check("nn")
    with pytest.raises(PartError, match=message):
        INSTALLED.find("nn", "bad")


@pytest.mark.parametrize(
    ("kind", "family"), [("data", "DatasetOptions"), ("optim", "OptimizerOptions")]
)
def test_settings_without_those_that_the_engine_reads_are_refused_with_the_class_that_has_them(
    folder: Path, kind: str, family: str
) -> None:
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / "bare.py").write_text(
        "from mpt.config.options import Options\nclass Settings(Options):\n    size: int = 1\n"
    )
    use_parts([folder])
    with pytest.raises(PartError, match=rf"bare\.py: Settings does not derive from {family}, "):
        INSTALLED.find(kind, "bare")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "size: int = Field(3, le=2)",
            r"the default of Settings\.size, 3, is not allowed: .* to 2",
        ),
        ("size: int = 'big'", r"the default of Settings\.size, 'big', is not allowed"),
        ("size: Tensor = None", "Settings has an annotation with Tensor, which is not known there"),
    ],
)
def test_a_setting_whose_default_or_type_is_wrong_is_named(
    folder: Path, setting: str, said: str
) -> None:
    (folder / "nn" / "odd.py").write_text(
        "from pydantic import Field\nfrom torch import Tensor\nfrom mpt.config.options import ModelOptions\n"
        f"class Settings(ModelOptions):\n    {setting}\n"
    )
    use_parts([folder])
    with pytest.raises(PartError, match=rf"odd\.py: {said}"):
        load_config({"model": "odd"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('NAMES = ["mine"]', r"NAMES is \['mine'\]; expected a dict"),
        (
            'NAMES = {"mine": {"sise": 3}}',
            "NAMES gives 'mine' 'sise', which is none of its settings",
        ),
        ('NAMES = {"mine": None}', "NAMES gives 'mine' None, which is none of its settings"),
        ('CONFLICTS = ("recompute",)', r"CONFLICTS is \('recompute',\); expected a dict"),
        ("PROPOSALS = True", "PROPOSALS is True; expected a tuple"),
        ('DIALS = {"leaky": 3}', "DIALS is .* expected a tuple"),
        ('RANK = "first"', "RANK is 'first'; expected a number"),
        (
            'CONFLICTS = {k: "x" for k in "ab"}',
            "CONFLICTS in line 2 must be written out: the file is",
        ),
    ],
)
def test_a_declaration_of_another_form_is_named_with_the_one_it_has(
    folder: Path, line: str, said: str
) -> None:
    (folder / "memory").mkdir()
    (folder / "memory" / "mine.py").write_text(
        f"from mpt.config.options import Options\n{line}\nclass Settings(Options):\n    size: int = 1\n"
    )
    use_parts([folder])
    with pytest.raises(PartError, match=rf"mine\.py: {said}"):
        INSTALLED.check("memory")


def test_a_setting_without_a_default_is_asked_of_the_configuration(folder: Path) -> None:
    (folder / "nn" / "sized.py").write_text(MODEL.replace("image_size: int = 8", "image_size: int"))
    use_parts([folder])
    with pytest.raises(ConfigError, match=r"model\.image_size: missing; it has no default"):
        load_config({"model": "sized"})
    assert load_config({"model": {"name": "sized", "image_size": 4}}).model.settings


def test_a_file_that_cannot_be_read_stops_only_what_uses_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for subpackage in ("nn", "memory", "data", "commands"):
        (folder / subpackage).mkdir(exist_ok=True)
        kind = "Command" if subpackage == "commands" else "Settings"
        (folder / subpackage / "bad.py").write_text(f"class {kind}(Options)\n")
    use_parts([folder])
    assert (
        load_config({"model": "one_layer", "dataset": "digits", "train": {"steps": 1}}).model.name
        == "one_layer"
    )
    with pytest.raises(PartError, match=r"nn/bad\.py:1: expected ':'"):
        load_config({"model": "no_such", "dataset": "digits", "train": {"steps": 1}})
    for words, code, said in (
        (["list", "metrics"], 0, "top_five"),
        (["my_parts", "bad"], 2, "commands/bad.py:1: expected"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        shown = capsys.readouterr()
        assert caught.value.code == code, shown
        assert said in shown.out + shown.err


def test_a_part_whose_import_fails_is_named_with_its_line(folder: Path) -> None:
    path = folder / "nn" / "one_layer.py"
    path.write_text(MODEL.replace("from torch", "import no_such_package\nfrom torch"))
    use_parts([folder])
    plugin = INSTALLED.find("nn", "one_layer")
    assert plugin
    sys.modules.pop(plugin.module_name, None)
    with pytest.raises(
        PartError,
        match=r"one_layer\.py:2: this model cannot be imported: ModuleNotFoundError: No mod",
    ):
        plugin.load()
    path.write_text(MODEL.replace("from torch", "raise SystemExit(0)\nfrom torch"))
    with pytest.raises(PartError, match=r"one_layer\.py:2: .* cannot be imported: SystemExit: 0"):
        plugin.load()
    path.write_text(MODEL.partition("def build")[0])
    with pytest.raises(PartError, match="it has no build, which a model needs"):
        plugin.member("build")


def test_a_name_that_is_taken_is_refused(folder: Path) -> None:
    (folder / "nn" / "one_layer.py").rename(folder / "nn" / "dcgan.py")
    use_parts([folder])
    with pytest.raises(
        PartError, match=r"my-parts/nn/dcgan.py: there is a model named dcgan already, in .*mpt/nn"
    ):
        INSTALLED.find("nn", "dcgan")
    (folder / "metrics").mkdir()
    (folder / "metrics" / "top_five.py").write_text(
        "def measure(logits, labels):\n    return 0.0\n"
    )
    with pytest.raises(PartError, match="there is a metric named top_five already"):
        INSTALLED.functions("metrics")


def test_an_installed_distribution_announces_its_package(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    package = site / "acme" / "mixed"
    package.parent.mkdir(parents=True)
    folder.rename(package)
    (site / "acme" / "__init__.py").write_text("raise AssertionError('imported to be found')\n")
    information = site / "acme_parts-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(
        "[mpt.parts]\nacme = acme.mixed\ngone = acme.nowhere\n"
    )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    part_packages._installed_packages.cache_clear()
    part_packages._outside_packages.cache_clear()
    try:
        (found,) = [one for one in outside_packages() if one.distribution == "acme-parts 1.2"]
        assert found == PartPackage(
            package, "acme.mixed", outside=True, distribution="acme-parts 1.2"
        )
        assert INSTALLED.find("nn", "one_layer")
        use_parts([package])  # the same folder again
        assert [one.folder for one in outside_packages()].count(package) == 1
    finally:
        part_packages._installed_packages.cache_clear()
        part_packages._outside_packages.cache_clear()


def test_a_command_of_a_folder_is_declared_by_its_source(folder: Path) -> None:
    (folder / "commands").mkdir()
    (folder / "commands" / "say_hello.py").write_text(
        '"""Say hello."""\nimport no_such_package\nfrom dataclasses import dataclass\n'
        '@dataclass(frozen=True)\nclass Command:\n    """Say hello."""\n    name: str = "you"\n    """To whom."""\n'
    )
    use_parts([folder])
    (part,) = [part for part in INSTALLED.commands() if part.package.outside]
    assert part.source.declared(name="me").name == "me"
    assert part.source.notes == {"name": "To whom."}
    assert not any(part.package.outside for part in Registry().commands())


def test_a_precision_mode_from_outside_is_proposed_as_its_file_says(folder: Path) -> None:
    (folder / "precision").mkdir()
    path = folder / "precision" / "posit.py"
    path.write_text(
        "from mpt.config.options import PrecisionOptions\n"
        'NAMES = {"posit8": {}, "posit16": {}}\nPROPOSALS = ("posit8", "posit16")\nNEEDS_BFLOAT16 = ("posit8",)\n'
        "RANK = 1\nclass Settings(PrecisionOptions):\n    pass\n"
    )
    use_parts([folder])
    config = load_config({"model": "lsgan", "precision": "fp32"})
    for gpu, proposed in (("rtx3060", ["posit8", "bf16"]), ("rtx2060", ["posit16", "amp"])):
        patches = list(precision_patches(config, find_gpu(gpu), allow_lossy=False))
        assert [patch["precision"]["mode"] for patch in patches if patch] == proposed
    assert [is_scaled(mode) for mode in ("posit8", "amp", "O1", "bf16", "fp32")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert [is_lossy(mode) for mode in (None, "bf16-sr", "posit8")] == [False, True, False]
