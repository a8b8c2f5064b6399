"""The examples and the README's lines, run."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "python" / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_memory_task_written_in_python_is_solved(tmp_path):
    assert load("own_env").main(str(tmp_path / "run")).success_rate == 1.0
    lines = (EXAMPLES / "own_env.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 60


def test_the_loop_in_the_manner_of_stable_baselines(tmp_path):
    assert load("sb3_loop").main(str(tmp_path / "run")) > 0.9


def test_runs_are_logged_to_wandb(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: logging to it was not tried")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    load("log_run").main([str(run.path), "--to", "wandb"])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_runs_are_logged_to_mlflow(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: logging to it was not tried")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        load("log_run").main([str(run.path), "--to", "mlflow"])
    (found,) = mlflow.search_runs(experiment_names=["elmur"], output_format="list")
    assert found.data.metrics["train/loss"] > 0


def test_the_rows_that_are_logged(run):
    rows = list(load("log_run").rows(run.path))
    assert rows[0][0] == 1 and rows[0][1]["train/loss"] > 0
    assert "validation/accuracy" in rows[-1][1]


def test_the_lines_of_the_readme(tmp_path, monkeypatch):
    section = (ROOT / "README.md").read_text().split("## From Python")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    exec("\n".join(blocks), names)
    result = names["elmur"].evaluate(names["run"].policy, names["env"], episodes=16)
    assert result.mean_return > 0.9, result


def test_a_recording_of_lerobot_is_trained_on(tmp_path):
    recording = ROOT / "crates/elmur-data/tests/fixtures/lerobot-v3/image"
    error = load("train_lerobot").main(str(recording), str(tmp_path / "run"), "20")
    assert 0 < error < 10
