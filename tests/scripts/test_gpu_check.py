"""The GPU check is rehearsed without a GPU: it measures, says what failed, and writes what there is."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def load_script():
    specification = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_tables_show_ratios_to_fp32_and_what_failed():
    script = load_script()
    row = {
        "mode": "fp32",
        "dtype": "float32",
        "steps": 10,
        "peak_bytes": 2 << 20,
        "reserved_bytes": None,
        "step_seconds": 0.02,
        "samples_per_second": 100.0,
        "skipped": 0,
        "metric": "accuracy",
        "figure": None,
    }
    entry = {"config": "a.yaml", "model": "dcgan", "batch_size": 4, "substitute": "shapes"}
    modes = [
        row,
        {**row, "mode": "amp", "peak_bytes": 1 << 20, "step_seconds": 0.01},
        {"mode": "O1", "error": "out of memory"},
    ]
    results = {
        "machine": {"torch": "2.11.0"},
        "tests": {"exit_code": 0, "said": "3 passed"},
        "configs": [{**entry, "modes": modes}, {"config": "b.yaml", "crash": "exit -11: "}],
        "seconds": 12.0,
    }
    text = "\n".join(script.as_markdown(results))
    assert "| amp | float32 | 1.0 MiB | 0.500× | – | 10 ms | 2.000× | 100 | 0 | – |" in text
    assert "| O1 | out of memory |" in text
    assert "the figure says nothing" in text
    assert "exit -11" in text
    assert script.is_broken(results["configs"][1])
    assert not script.is_broken(results["configs"][0])
    json.dumps(script.tidy({"figure": float("nan")}), allow_nan=False)


def test_without_a_gpu_it_says_how_to_rehearse(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path / "out")])
    assert load_script().main() == 2
    assert "--cpu-rehearsal" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rehearsal_measures_every_mode(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--cpu-rehearsal", "--minutes", "3"]
    config = ROOT / "configs" / "classify_digits.yaml"
    done = subprocess.run([*command, "--config", str(config)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    rows = content["configs"][0]["modes"]
    assert [row["mode"] for row in rows] == ["fp32", "tf32", "amp", "bf16", "O1", "O2"]
    assert all(row["steps"] == 3 and row["peak_bytes"] > 0 for row in rows)
