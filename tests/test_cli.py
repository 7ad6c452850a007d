"""The command line: what it passes on, what it prints, how it exits, and that it stays light."""

import importlib
import json
import operator
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import typer

from mpt import __version__, cli, entry_point
from mpt.cli import make_app
from mpt.commands.compare import Command as CompareArguments
from mpt.commands.convert import Command as ConvertArguments
from mpt.commands.infer import Command as InferArguments
from mpt.commands.listing import Command as ListArguments
from mpt.commands.listing import show_table
from mpt.commands.plan import Command as PlanArguments
from mpt.commands.planning.plan_calibrate import Command as PlanCalibrateArguments
from mpt.commands.planning.plan_check import Command as PlanCheckArguments
from mpt.commands.planning.plan_inference import Command as PlanInferArguments
from mpt.commands.report import Command as ReportArguments
from mpt.commands.train import Command as TrainArguments
from mpt.commands.validate import Command as ValidateArguments
from mpt.config.finding import registry
from mpt.config.finding.registry import INSTALLED, SUBPACKAGES
from mpt.config.load import load_config
from mpt.errors import ConfigError, GateError, Interrupted, MptError
from tests.programs import run_mpt

pytestmark = pytest.mark.tier("fast")


CONFIG = Path(__file__).resolve().parents[1] / "configs" / "dcgan_fp32.yaml"


def run(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    return caught.value.code


def replace_run(monkeypatch, work):
    """Have every command call `work` with its part and its arguments in place of its own function."""
    find = registry.Part.member

    def member(part, name):
        return partial(work, part) if name == "run" else find(part, name)

    monkeypatch.setattr(registry.Part, "member", member)


@pytest.fixture
def called(monkeypatch):
    """Replace the commands by one that remembers its arguments."""
    calls = []
    replace_run(
        monkeypatch,
        lambda part, asked: calls.append((part.module_name.removeprefix("mpt.commands."), asked)),
    )
    return calls


def test_help_tells_every_command_in_whole_and_every_exit_code(capsys):
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert "..." not in said.partition("Commands:")[2]
    codes = {
        str(value)
        for error in MptError.__subclasses__()
        if isinstance(value := vars(error).get("exit_code"), int)
    }
    assert codes - {"1"} <= set(re.findall(r"[0-9]+", said.partition("Exit codes:")[2]))


def test_train_passes_everything_on(called):
    words = [
        "c.yaml",
        "a=1",
        "b.c=2",
        "--resume",
        "auto",
        "--name",
        "n",
        "--device",
        "cpu",
        "--seed",
        "3",
        "--smoke",
        "4",
    ]
    words += [
        "--dry-run",
        "--print-config",
        "--json",
        "--quiet",
        "--exact",
        "--with",
        "p.yaml",
        "--with",
        "q.yaml",
    ]
    assert run("train", *words, "--allow", "one", "--allow", "two", "--runs", "r") == 0
    expected = TrainArguments(
        config="c.yaml",
        overrides=("a=1", "b.c=2"),
        resume="auto",
        name="n",
        device="cpu",
        seed=3,
        smoke=4,
        dry_run=True,
        print_config=True,
        json=True,
        quiet=True,
        exact=True,
        patches=(Path("p.yaml"), Path("q.yaml")),
        allow=("one", "two"),
        runs="r",
    )
    assert called == [("train", expected)]
    assert run("train", "c.yaml") == 0
    assert called[1] == ("train", TrainArguments(config="c.yaml"))


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["c.yaml", "--resume"], "auto"),
        (["--resume", "c.yaml"], "auto"),
        (["c.yaml", "--resume", "--quiet"], "auto"),
        (["c.yaml", "--resume", "train.steps=5"], "auto"),
        (["c.yaml", "--resume", "auto", "train.steps=5"], "auto"),
        (["c.yaml", "--resume", "runs/x"], "runs/x"),
        (["c.yaml", "--resume=runs/x"], "runs/x"),
        (["c.yaml"], None),
    ],
)
def test_resume_may_be_given_without_a_value(called, words, resume):
    assert run("train", *words) == 0
    assert called[0][1].resume == resume
    assert called[0][1].config == "c.yaml"


@pytest.mark.parametrize(
    ("words", "command", "arguments"),
    [
        ("infer", "infer", InferArguments()),
        (
            "infer r --half --dtype float16 --input i --output o --batch-size 2 --device cpu --runs d --allow p",
            "infer",
            InferArguments(
                "r",
                True,
                "float16",
                ("i",),
                "o",
                batch_size=2,
                device="cpu",
                runs="d",
                allow=("p",),
            ),
        ),
        ("infer --truncation 0.5 --seed 3", "infer", InferArguments(truncation=0.5, seed=3)),
        ("compare fp32 amp seed=1", "compare", CompareArguments(what=("fp32", "amp", "seed=1"))),
        (
            "compare a --config c --seeds 5 --margin 0.5 --gate --json --quiet --name n",
            "compare",
            CompareArguments(
                ("a",), Path("c"), seeds=5, margin="0.5", gate=True, name="n", json=True, quiet=True
            ),
        ),
        ("report", "report", ReportArguments()),
        ("report r --runs d", "report", ReportArguments("r", runs="d")),
        (
            "plan c a=1 --vram 6GiB --gpu rtx2060 --json --with p --output o",
            "plan",
            PlanArguments(
                Path("c"), ("a=1",), (Path("p"),), vram="6GiB", gpu="rtx2060", output="o", json=True
            ),
        ),
        ("plan calibrate r", "planning.plan_calibrate", PlanCalibrateArguments("r")),
        (
            "plan infer c --half",
            "planning.plan_inference",
            PlanInferArguments(Path("c"), half=True),
        ),
        (
            "plan check l c a=1",
            "planning.plan_check",
            PlanCheckArguments(Path("l"), Path("c"), ("a=1",)),
        ),
        ("convert r --half --to onnx", "convert", ConvertArguments("r", True, "onnx")),
        (
            "validate c a=1 --with p --quiet",
            "validate",
            ValidateArguments(Path("c"), ("a=1",), (Path("p"),), quiet=True),
        ),
        ("list models --json", "listing", ListArguments("models", json=True)),
    ],
)
def test_a_command_gets_what_was_typed(called, words, command, arguments):
    assert run(*words.split()) == 0
    [(name, asked)] = called
    assert name == command
    assert isinstance(asked, type(arguments))  # systems add options of theirs
    assert {one.name: getattr(asked, one.name) for one in fields(arguments)} == vars(arguments)


@pytest.mark.parametrize(
    "words",
    ["convert a b", "nonsense", "train c --smoke 0", "train c --parts nowhere", "deepfacelab x"],
)
def test_a_wrong_command_line_exits_with_2_and_one_message(called, capsys, words):
    assert run(*words.split()) == 2
    assert called == []
    assert "rror: " in capsys.readouterr().err


def test_plan_needs_a_config_or_a_run_to_learn_from(capsys):
    assert run("plan") == 2
    assert "CONFIG is missing" in capsys.readouterr().err


def test_a_system_brings_commands_of_its_own(called, capsys, monkeypatch):
    assert run("--help") == 0
    assert "deepfacelab" in capsys.readouterr().out
    asked = []
    monkeypatch.setattr(
        registry.Part, "member", lambda part, name: asked.append if name == "run" else dict
    )
    assert run("deepfacelab", "leras-to-torch", "a", "b", "--archi", "df-u") == 0
    assert asked == [
        {"model_dir": Path("a"), "output": Path("b"), "archi": "df-u", "name": None, "config": None}
    ]
    assert "leras" not in (Path(cli.__file__).read_text("utf-8"))


def test_every_option_of_every_command_has_a_help_text():
    """Also those of systems' commands."""

    def options(command, name):
        for inner, found in getattr(command, "commands", {}).items():
            yield from options(found, f"{name} {inner}")
        yield from ((name, option.name, getattr(option, "help", "")) for option in command.params)

    found = list(options(typer.main.get_command(make_app()), "mpt"))
    assert len(found) > 250
    assert not [(command, option) for command, option, text in found if not text]


def test_every_command_of_our_own_shows_examples_that_are_not_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    plans = [f"plan {name}" for name in cli.PLAN_COMMANDS]
    systems = [
        f"{part.package.name} {part.name.replace('_', '-')}"
        for part in INSTALLED.commands()
        if not part.package.outside
    ]
    assert len(systems) > 15
    for command in [*cli.COMMANDS, *plans, *systems]:
        assert run(*command.split(), "--help") == 0
        (shown,) = re.findall(r"^  Examples:\n((?:    .+\n)+)", capsys.readouterr().out, re.M)
        lines = [line.strip() for line in shown.splitlines()]
        assert all(line.startswith("mpt ") for line in lines), command


def test_help_says_what_each_system_is_for(capsys):
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert re.search(r"^  dain +Video frame interpolation\.$", said, re.M)
    assert re.search(r"^  yolofuse +Object detection with one or two cameras\.$", said, re.M)


def test_no_words_and_help_print_help(capsys):
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "train" in shown
    assert "--install-completion" in shown
    run()
    assert "Usage: mpt" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train",
            "mpt train: CONFIG is missing: name a YAML file (`mpt init` writes one), or one that comes with mpt",
        ),
        (
            "dain interpolate",
            "mpt dain interpolate: RUN is missing: name a run (`mpt list runs`), or its path",
        ),
        ("infer --cuont 3", "mpt infer: no such option: --cuont (Possible options: --count"),
        ("infer --count x", "mpt infer: --count: found 'x'; allowed: a whole number, 1 or more"),
        ("plan --vram", "option '--vram' requires an argument"),
        ("trian", "mpt: no such command 'trian'. Did you mean 'train'?"),
        (
            "export",
            "mpt: no such command 'export'; `mpt convert` does that, `mpt convert -h` explains it",
        ),
        ("plan", "mpt plan: CONFIG is missing"),
        ("plan infer c --nproc 2", "mpt plan infer: no such option: --nproc"),
        (
            "schema extra",
            "mpt schema: got unexpected extra argument(s) (extra); `mpt schema -h` lists what there is",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_way_out(capsys, words, said):
    assert run(*words.split()) == 2
    shown, line = capsys.readouterr()
    assert shown == ""
    assert line.startswith(f"error: {said}")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("x"), 2, "error: x\n"),
        (GateError("y"), 8, "error: y\n"),
        (Interrupted("saved", 15), 143, "saved\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(13, "Permission denied", "f"), 5, "error: f: Permission denied\n"),
        (
            OSError(28, "No space left on device"),
            5,
            "error: what was to be written: No space left on device\n",
        ),
    ],
)
def test_an_error_is_a_message_and_a_code(monkeypatch, capsys, error, code, words):
    def fail(*_):
        raise error

    replace_run(monkeypatch, fail)
    assert run("report") == code
    assert capsys.readouterr().err == words


def test_a_name_that_the_locale_has_no_letters_for_is_one_line(monkeypatch, capsys):
    def fail(*_):
        "имя".encode("ascii")

    monkeypatch.setattr("mpt.cli.run_command", fail)
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", "x.yaml"])
    assert end.value.code == 5
    assert capsys.readouterr().err == (
        "error: имя: no file name in ascii, this locale's; set PYTHONUTF8=1\n"
    )


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("infer",), "try a smaller --batch-size, --vram SIZE, --half or --device cpu"),
        (("infer", "--half", "--vram", "4GiB", "--device", "cpu"), "try a smaller --batch-size"),
        (("report",), ""),
    ],
)
def test_a_command_whose_memory_ran_out_says_what_asks_for_less(monkeypatch, capsys, words, advice):
    importlib.import_module("torch")  # without it no memory of its is refused

    def fail(*_):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    replace_run(monkeypatch, fail)
    assert run(*words) == 7
    assert (
        capsys.readouterr().err
        == f"error: out of memory (CUDA error: out of memory){advice and f'; {advice}'}\n"
    )


def test_the_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"mpt {__version__}\n"


def test_a_programmers_error_keeps_its_traceback(monkeypatch):
    replace_run(monkeypatch, operator.truediv)  # without a frame, which would be the user's own
    with pytest.raises(TypeError):
        cli.main(["report"])


def test_validate_says_yes_or_says_why(capsys, tmp_path):
    assert run("validate", CONFIG) == 0
    assert "valid: dcgan on digits, fp32" in capsys.readouterr().out
    assert run("validate", CONFIG, "optimizer.rl=1", "train.steps=x") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: override 'optimizer.rl=1': optimizer.rl: unknown key 'rl'")
    assert len(shown.err.splitlines()) == 2
    assert run("validate", tmp_path / "none.yaml") == 2


def test_list_names_every_plugin(capsys):
    assert run("list", "--json") == 0
    tables = json.loads(capsys.readouterr().out)
    listed = {name for table in tables.values() for name in table}
    assert {name for subpackage in SUBPACKAGES for name in INSTALLED.names(subpackage)} <= listed
    assert all(text for table in tables.values() for text in table.values())
    assert run("list", "precision") == 0
    assert "16-mixed" in capsys.readouterr().out
    assert run("list", "modles") == 2
    assert "did you mean 'models'?" in capsys.readouterr().err


@pytest.mark.parametrize("model", INSTALLED.names("nn"))
def test_init_writes_a_config_that_means_the_defaults(capsys, tmp_path, model):
    path = tmp_path / "new.yaml"
    assert run("init", path, "--model", model) == 0
    task = INSTALLED.find("tasks", INSTALLED.find("nn", model).task or "")
    name = task.literals.get("DATASET") if task else None
    dataset = {"dataset": name} if name else {}
    assert load_config(path) == load_config({"model": {"name": model}, **dataset})
    assert path.read_text().count("#") > 10
    before = path.read_text()
    assert run("init", path) == 2
    assert path.read_text() == before


def test_init_refuses_what_it_cannot_write(capsys, tmp_path):
    assert run("init", tmp_path / "a.yaml", "--model", "dcgam") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --model: found 'dcgam'")
    assert "did you mean dcgan?" in said
    assert run("init", tmp_path / "no" / "a.yaml") == 5
    assert list(tmp_path.iterdir()) == []


def test_schema_is_printed_or_written(capsys, tmp_path):
    assert run("schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert run("schema", "--output", tmp_path / "s.json") == 0
    assert json.loads((tmp_path / "s.json").read_text()) == printed
    capsys.readouterr()
    assert run("schema", "--plan") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "mpt plan --json"


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "words", [["--help"], ["validate", str(CONFIG)], ["list"], ["schema"], ["train", "--help"]]
)
def test_light_commands_load_neither_torch_nor_rich(words):
    code = f"""
import sys
from mpt.cli import main
try:
    main({words!r})
except SystemExit as stop:
    heavy = {{"torch", "numpy", "rich", "torchvision", "matplotlib"}} & set(sys.modules)
    sys.exit(f"{{stop.code}} {{heavy}}" if stop.code or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_the_command_does():
    done = run_mpt("validate", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr == "error: nowhere.yaml: no such file; a YAML file is expected\n"


def test_a_configuration_comes_from_the_standard_input_too():
    text = b"model: small_cnn\nprecision: fp32\n"
    command = [sys.executable, "-m", "mpt", "train", "-", "--print-config", "train.steps=7"]
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert b"steps: 7" in done.stdout
    done = subprocess.run([*command[:4], "-"], input=b"model: nope\n", capture_output=True)
    assert done.returncode == 2
    assert b"standard input:1:8: model.name: found 'nope'" in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    for reader in ("head -c 10", "true"):  # the second is gone before anything is written
        command = f"set -o pipefail; {shlex.quote(sys.executable)} -m mpt list | {reader}"
        done = subprocess.run(["bash", "-c", command], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("c a=1 --infer --half --vram 1GiB", "infer c a=1 --half --vram 1GiB"),
        ("c --frame 2x2", "infer c --frame 2x2"),
        ("c --presets --output d", "presets c --output d"),
        ("--tune c", "tune c"),
        ("--calibrate r", "calibrate r"),
        ("c --lock=l --gpu t4", "lock c --output l --gpu t4"),
        ("c --check l --tolerance 2%", "check l c --tolerance 2%"),
        ("c --scaling weak --nproc 8", "cluster c --scaling weak --nproc 8"),
        ("c --cards t4:2 --cards v100", "cluster c --cards t4:2 --cards v100"),
    ],
)
def test_what_was_an_option_of_plan_is_answered_with_its_command(called, capsys, before, now):
    assert run("plan", *before.split()) == 2
    option = next(word.partition("=")[0] for word in before.split() if word.startswith("--"))
    answer = f"error: mpt plan: {option} belongs to a sub-command now: mpt plan {now}\n"
    assert capsys.readouterr().err == answer
    assert called == []
    run("plan", *now.split())
    assert capsys.readouterr().err == "", "what is answered is taken"
    assert len(called) == 1


def test_configurations_come_with_mpt_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("validate", "@classify_digits", "--quick") == 0
    assert run("list", "configs") == 0
    said = capsys.readouterr().out
    assert "classify_digits" in said
    assert "saehd_512.plan" not in said
    assert run("init", "--from", "wgan_gp", "mine.yaml") == 0
    assert (tmp_path / "mine.yaml").read_bytes() == (CONFIG.parent / "wgan_gp.yaml").read_bytes()
    assert run("validate", "@clasify_digits") == 2
    assert "did you mean @classify_digits?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "place", "expected"),
    [
        ("mpt tr", "1", "train"),
        ("mpt plan inf", "2", "infer"),
        ("mpt plan infer x.yaml --fr", "4", "--frame"),
        ("mpt train @lsgan optimizer.l", "3", "optimizer.lr="),
        ("mpt infer di", "2", "digits"),
    ],
)
def test_the_shell_completes_commands_settings_and_runs(
    typed, place, expected, tmp_path, monkeypatch
):
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CONFIG.parents[1]))
    environment = {
        **os.environ,
        "_MPT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": place,
    }
    done = subprocess.run(
        [sys.executable, "-m", "mpt"], env=environment, capture_output=True, text=True
    )
    assert expected in done.stdout.split()


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_list_fits_a_narrow_terminal(width: int) -> None:
    text = show_table(
        "Models", {"torchvision:retinanet": "A detector with one stage and a focal loss."}, width
    )
    assert max(map(len, text.splitlines())) <= width
    assert "torchvision:retinanet" in text


def test_a_slip_in_the_number_of_workers_does_not_fill_the_machine(capsys):
    assert run("validate", "@classify_digits", "dataset.workers=100000") == 2
    assert (
        "dataset.workers: found 100000; allowed: a number not above 512" in capsys.readouterr().err
    )


def test_an_interrupt_while_the_command_line_is_imported_is_one_line_too(monkeypatch, capsys):
    def stop(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpt.planner.client.processes.start_ahead", stop)
    for start in (partial(runpy.run_module, "mpt", run_name="__main__"), entry_point.main):
        with pytest.raises(SystemExit) as ended:
            start()
        assert ended.value.code == 130
        assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_at_the_command_s_end_is_one_line_too(monkeypatch, capsys):
    """One that comes while the command's objects are freed is raised at the next instruction, out of all handlers."""

    class End(SystemExit):
        @property
        def code(self):
            raise KeyboardInterrupt

    def end():
        raise End

    monkeypatch.setattr("mpt.planner.client.processes.start_ahead", lambda words: None)
    monkeypatch.setattr("mpt.cli.main", end)
    with pytest.raises(SystemExit) as ended:
        entry_point.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_an_interrupt_while_python_exits_says_nothing():
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['mpt', '--version']\n"
        "from mpt.entry_point import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
