"""Packages (docs/explanation/architecture.md) import downwards only; what must answer at once never imports torch."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpt.cli import COMMANDS
from mpt.config.finding.part_packages import PART_FOLDERS, packages_below
from mpt.config.finding.part_source import declares_function
from mpt.config.finding.registry import FUNCTIONS

pytestmark = pytest.mark.tier("fast")


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpt"
LIGHT = ("errors", "foreign", "config", "parts", "importers", "report", "cli", "__main__")
"""Packages that never import torch, not even inside a function."""
HEAVY_PACKAGES = {"torch", "torchvision", "timm", "torchmetrics", "safetensors"}


def read_packages(document: str) -> list[str]:
    """Return the packages that the document's table lists, lowest first."""
    table = document.split("## Packages, lowest first")[1].split("\n## ")[0]
    return [
        cell.removesuffix(".py").rstrip("/")
        for cell in re.findall(r"^\| `([a-z_/.]+)` \|", table, re.M)
    ]


PACKAGES = read_packages((ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8"))


def package_of(path: Path) -> str:
    """Return the package that a file of the package lies in."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


parse = functools.cache(ast.parse)
"""Several tests look at every file."""


@pytest.fixture(scope="module", autouse=True)
def _no_trees_left() -> Iterator[None]:
    """Forget the trees at the end: a million objects, which each later collection of garbage would look through."""
    yield
    parse.cache_clear()


@functools.lru_cache(
    2000
)  # the pairs alone: the trees of all files would be looked at in every search for garbage
def imports_of(source: str) -> list[tuple[int, str]]:
    """Return line and dotted name of every import in a source, wherever it stands, relative ones marked by a dot.

    `from mpt import a` counts as `mpt.a`, and a call of `import_module` with a constant as that constant.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"mpt.{alias.name}" for alias in node.names] if module == "mpt" else [module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called == "import_module":
                found.append((node.lineno, str(node.args[0].value)))
    return found


def upward_imports(package: str, source: str, packages: list[str]) -> list[str]:
    """Return the imports of a source in `package` that do not lead to that package or one listed before it."""
    allowed = {*packages[: packages.index(package) + 1]}
    return [
        f"line {line} imports {name}"
        for line, name in imports_of(source)
        if name.startswith(".") or (name.startswith("mpt.") and name.split(".")[1] not in allowed)
    ]


SHARED_BY_KINDS = re.compile(
    r"torch\.cuda\.(Stream|Event|stream|current_stream|synchronize|empty_cache|mem_get_info|memory_\w+|max_memory_\w+"
    r"|reset_peak\w+|\w+_rng_state|set_device|\w+_per_process_memory_fraction|get_device_name)\("
)
"""What torch has for every kind of accelerator under one name."""


def package_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_package_is_in_the_list() -> None:
    there = {package_of(path) for path in package_files()} - {"__main__"}
    assert there == set(PACKAGES)
    assert len(PACKAGES) == len(set(PACKAGES))


def test_packages_import_downwards_only() -> None:
    packages = [*PACKAGES, "__main__"]
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in package_files()
        if (found := upward_imports(package_of(path), path.read_text("utf-8"), packages))
    }
    assert not wrong


def test_the_python_api_and_the_work_below_it_know_no_commands() -> None:
    """The command line is a layer over what Python callers use, not the other way round."""
    files = [PACKAGE / "api.py", *sorted((PACKAGE / "workflows").rglob("*.py"))]
    assert len(files) > 5
    wrong = {
        f"{path.name}:{line} imports {name}"
        for path in files
        for line, name in imports_of(path.read_text("utf-8"))
        if name.startswith(("mpt.commands", "mpt.cli", "mpt.systems"))
    }
    assert not wrong


def import_graph() -> dict[str, set[str]]:
    """Return which files of the package each imports, inside functions and for types alone too.

    Packages' own files are left out.
    """
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in package_files()
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        tree = parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = (found & set(files)) - {name}
    return graph


def test_a_training_s_batches_are_supplied_in_one_place() -> None:
    """Whoever takes them gets the same ones: a loader of one's own forgets how samples are drawn, or how many steps."""
    allowed = {"engine/loop/assembly.py", "engine/state/evaluation.py", "data/loading/loader.py"}
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "Loader(" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Loader"
    }
    assert found == allowed


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    assert len(graph) > 300
    while leaves := [name for name, needed in graph.items() if not needed & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in a circle, or above one: {sorted(graph)}"


def test_every_file_of_a_part_folder_is_a_part() -> None:
    """Parts are found by file name; what they share lies in a subfolder, a room that says what it holds."""
    packages = packages_below(PACKAGE, "mpt")
    wrong = []
    for package in packages:
        for folder in PART_FOLDERS:
            parts = {path.stem for path in package.paths(folder) if is_part(path, folder)}
            if package.folder == PACKAGE and folder == "commands":
                assert parts == set(COMMANDS.values())
            wrong += [
                str(path.relative_to(ROOT))
                for path in package.paths(folder)
                if path.stem not in parts
            ]
    assert len(packages) == 1 + len(list(PACKAGE.glob("systems/*/__init__.py")))
    assert not wrong, f"neither a part nor in a room of its folder: {wrong}"


def is_part(path: Path, folder: str) -> bool:
    """Return whether a file of a part folder declares a part of the folder's kind."""
    source = path.read_text("utf-8")
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    if folder in FUNCTIONS and declares_function(source, *FUNCTIONS[folder][1:]):
        return True
    return ("Command" if folder == "commands" else "Settings") in names


def test_rooms_of_a_package_import_each_other_in_one_direction() -> None:
    """A room is a subfolder of a package, or of a room; files beside rooms are each a room of their own."""
    graph: dict[str, dict[str, set[str]]] = {}
    for name, needed in import_graph().items():
        for other in needed:
            package, importer, imported = rooms_of(name, other)
            rooms = graph.setdefault(package, {})
            rooms.setdefault(importer, set()).add(imported)
            rooms.setdefault(imported, set())
    assert len(graph["mpt.planner"]) >= 8
    assert {"text", "stand_ins", "values", "execution"} <= set(graph["mpt.planner.own"])
    for package, rooms in graph.items():
        while leaves := [room for room, needed in rooms.items() if not needed & set(rooms)]:
            for room in leaves:
                del rooms[room]
        assert not rooms, f"{package}: in a circle, or above one: {rooms}"


def rooms_of(importer: str, imported: str) -> tuple[str, str, str]:
    """Return the innermost package that holds two modules, and the room of each inside it."""
    one, other = importer.split("."), imported.split(".")
    common = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return ".".join(one[:common]), *(".".join(parts[common : common + 1]) for parts in (one, other))


def test_what_a_part_may_have_is_not_probed_for() -> None:
    """Members of tasks, modes, tricks, data sets and networks have defaults in their base classes.

    Settings are asked by name, since each part has its own; and so is torch's `inplace`, which no base class has.
    """
    wrong = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in package_files()
        if package_of(path) in ("engine", "commands", "report", "doctor", "inference", "data")
        for node in ast.walk(parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        if isinstance(node.args[1], ast.Constant) and node.args[1].value != "inplace"
        if not ast.unparse(node.args[0]).endswith(("settings", "own", "choice"))
        if ast.unparse(node.args[0])
        not in ("os", "error", "frame", "container")  # Python's and PyAV's, which differ by version
    ]
    assert not wrong


def test_reports_are_made_from_files_alone() -> None:
    """A report reads run directories: of the package it knows the errors, the configuration and the run's layout."""
    allowed = {"report", "config", "errors", "foreign", "run", "version"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in sorted((PACKAGE / "report").rglob("*.py"))
        for line, name in imports_of(path.read_text("utf-8"))
        if name.startswith("mpt.") and name.split(".")[1] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_name_no_heavy_package(package: str) -> None:
    files = [path for path in package_files() if package_of(path) == package]
    assert files
    for path in files:
        assert (
            not {name.split(".")[0] for _, name in imports_of(path.read_text("utf-8"))}
            & HEAVY_PACKAGES
        ), path


@pytest.mark.parametrize(
    "source",
    [
        "import mpt.engine.building.build",
        "from mpt import engine",
        "def late():\n    from mpt.engine.building.build import Run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mpt.engine.building.build import Run",
        "import importlib\nimportlib.import_module('mpt.engine')",
        "from ..engine import build",
    ],
)
def test_an_upward_import_is_found_in_every_spelling(source: str) -> None:
    assert upward_imports("nn", source, PACKAGES)
    assert not upward_imports(
        "nn", "from mpt import errors\nfrom mpt.config.options import Options", PACKAGES
    )


def heavy_modules_after(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has imported after running the code."""
    code += f"\nimport sys; print('heavy', *sorted({HEAVY_PACKAGES!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.tier("full")
def test_importing_the_light_packages_imports_no_torch() -> None:
    light_commands = ("cli/arguments", "init", "listing", "plan", "report", "schema", "validate")
    files = [
        path
        for path in package_files()
        if package_of(path) in ("errors", "config", "report", "cli")
    ]
    files += [PACKAGE / "commands" / f"{name}.py" for name in light_commands]
    files += [PACKAGE / "__init__.py", PACKAGE / "api.py"]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files
    ]
    assert len(modules) > 20
    assert (
        heavy_modules_after(
            f"import importlib\nfor name in {modules}: importlib.import_module(name)"
        )
        == set()
    )


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["validate", "configs/dcgan_amp.yaml", "--quick"],
        ["list", "precision"],
        ["schema"],
    ],
    ids=lambda w: w[0],
)
def test_commands_that_only_look_import_no_torch(words: list[str]) -> None:
    code = f"from mpt.cli import main\ntry:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code"
    assert heavy_modules_after(code) == set()


@pytest.mark.tier("full")
def test_the_check_notices_torch() -> None:
    assert heavy_modules_after("import mpt.seams") == {"torch"}


def test_the_step_that_the_page_shows_is_put_together_of_what_there_is() -> None:
    """Functions are those of the step's module, and members those of the types that it works on."""
    import mpt.engine.step.step as step
    from mpt.seams import Loss, MemoryTrick, Phase, Precision, Run

    page = (ROOT / "docs" / "explanation" / "step.md").read_text("utf-8")
    tree = ast.parse(page.split("```python\n")[1].split("```")[0])
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls >= {"losses_of", "draw_batch", "all_finite"}
    assert not [name for name in calls if name not in {*vars(step), *dir(builtins)}]
    kinds = {
        "run": Run,
        "phase": Phase,
        "trick": MemoryTrick,
        "loss": Loss,
        "run.precision": Precision,
    }
    members = [
        (kinds[ast.unparse(node.value)], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in kinds
    ]
    assert len(members) > 8
    assert not [
        (kind, name) for kind, name in members if name not in {*dir(kind), *kind.__annotations__}
    ]


def test_classes_of_objects_are_changed_in_one_place() -> None:
    found = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if ".__class__ = " in path.read_text("utf-8")
    ]
    assert found == [Path("nn/shared/mixin.py")]


def test_cuda_is_named_only_for_what_other_accelerators_do_not_have() -> None:
    """`mpt.accelerator` asks for the rest, so that no kind of device is left out where it is forgotten."""
    allowed = {
        "precision/shared/choice.py": "a refusal of a compute capability, with the card's name",
        "inference/half.py": "the same",
        "parallel/start.py": "processes train together on CUDA devices alone",
        "systems/dain/inference/memory.py": "a calibration, which CUDA's cards have",
        "engine/step/faults.py": "cuDNN's refusals",
        "doctor/card/commands.py": "NCCL",
        "doctor/card/machine.py": "CUDA's context and pinned copies, of a check that names no other kind",
        "doctor/card/updates.py": "the same, and torch.cuda's own look for waits",
    }
    found = {
        str(path.relative_to(PACKAGE)): hits
        for path in package_files()
        if (hits := SHARED_BY_KINDS.findall(path.read_text("utf-8")))
    }
    assert not found.keys() - allowed.keys(), found


def test_no_import_changes_the_environment() -> None:
    """A script that imported one function of the planner's process no longer saw its GPU."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    changing = [
        f"{path.relative_to(ROOT)}:{statement.lineno}"
        for path in files
        for statement in parse(path.read_text("utf-8")).body
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr)
        and re.match(
            r"os\.(environ(\[|\.(setdefault|update|pop)| \|=)|putenv)", ast.unparse(statement)
        )
    ]
    assert not changing
