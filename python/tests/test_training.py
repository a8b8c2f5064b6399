"""Training and evaluation from Python."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np
import pytest

import elmur

QUICK = {"train.batches": 6, "train.threads": 1, "model.layers": 1, "eval.every": 3, "train.batch": 16}


@pytest.fixture(scope="module")
def data():
    return elmur.collect("elmur/RepeatFirstEasy-v0", episodes=40)


def test_a_callback_sees_every_line_of_the_metrics(data, tmp_path):
    told = []
    run = elmur.train("small", data, tmp_path / "run", told.append, settings=QUICK, progress=False)
    assert run.ended == "finished" and told == run.metrics
    assert [row["batch"] for row in told if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["measure"] for row in told if "measure" in row] == ["accuracy", "accuracy"]
    assert run.config["train"]["batches"] == 6 and run.policy.action_space.n == 4
    assert elmur.Policy.load(run).parameters == run.policy.parameters


def test_settings_are_nested_or_dotted_and_mistakes_are_named(data, tmp_path):
    nested = {"preset": "small", "train": {"batches": 6, "lr": 0.5}, "model": {"layers": 1, "memory": {"gradient": "detached"}}}
    dotted = {"train.batches": 6, "train.lr": 0.5, "model.layers": 1, "model.memory.gradient": "detached"}
    assert elmur.config(nested) == elmur.config("small", dotted)
    through = elmur.config("small", {"model": {"memory": {"gradient": {"through": 1}}}})
    assert through["model"]["memory"]["gradient"] == {"through": 1}
    assert elmur.config(elmur.config("small", dotted)) == elmur.config("small", dotted), "a whole config is a config"
    assert elmur.config("tmaze", {"env": {"name": "tmaze", "length": 90}})["env"]["length"] == 90
    for settings, message in (
        ({"train.lrr": 1}, "did you mean `train.lr`"),
        ({"train.batches": "many"}, "train.batches"),
        ({"policy": "elmer"}, "policy"),
    ):
        with pytest.raises(elmur.ElmurError, match=message):
            elmur.train("small", data, tmp_path / "no", settings=settings)
    with pytest.raises(elmur.ElmurError, match="tmaze"):
        elmur.train("tmase", data, tmp_path / "no")
    with pytest.raises(elmur.ElmurError, match="data: expected a Dataset"):
        elmur.train("small", [1, 2], tmp_path / "no")
    with pytest.raises(elmur.ElmurError, match="out: expected a folder"):
        elmur.train("small", data)
    assert not (tmp_path / "no").exists()
    assert "small" in elmur.presets() and "bc-lstm" in elmur.policies()


def test_other_policies_and_paths(data, tmp_path):
    data.save(tmp_path / "data.elmur")
    settings = {"policy": "bc-lstm", "train.batches": 2, "train.threads": 1}
    run = elmur.train("small", tmp_path / "data.elmur", tmp_path / "lstm", settings=settings, progress=False)
    assert run.policy.config["kind"] == "bc_lstm"
    with pytest.raises(elmur.ElmurError):
        elmur.train("small", data, tmp_path / "lstm", settings=settings)
    elmur.train(run.path / "config.json", data, tmp_path / "lstm", settings={"train.batches": 1}, overwrite=True, progress=False)


def test_a_policy_that_reads_returns_is_asked_for_one(data, tmp_path):
    settings = {"policy": "dt", "train.batches": 2, "train.threads": 1, "model.layers": 1}
    policy = elmur.train("small", data, tmp_path / "dt", settings=settings, progress=False).policy
    assert policy.reads_returns and policy.target_return == pytest.approx(1, abs=0.01)
    assert len(elmur.evaluate(policy, "elmur/RepeatFirstEasy-v0", episodes=3).returns) == 3
    seen = policy.observation_space.sample()
    with pytest.raises(elmur.ElmurError, match="return-to-go"):
        policy.act(seen)
    policy.act(seen, returns=1.0)


def test_stopped_runs_resume_to_the_same_bits(data, tmp_path):
    whole = elmur.train("small", data, tmp_path / "whole", settings=QUICK, progress=False)

    def enough(row):
        time.sleep(0.01)
        return row["batch"] < 2

    stopped = elmur.train("small", data, tmp_path / "parts", enough, settings=QUICK, progress=False)
    done = elmur.train("small", data, tmp_path / "parts", resume=True, progress=False)
    assert stopped.ended in ("stopped", "finished") and done.ended == "finished"
    files = [(run.path / "checkpoints" / "last" / "model.safetensors").read_bytes() for run in (whole, done)]
    assert files[0] == files[1]
    began = elmur.train("small", data, tmp_path / "new", resume=True, settings=QUICK, progress=False)
    assert began.ended == "finished", "where there is no run, one is begun"


def test_a_callback_that_raises_stops_training_and_the_run_is_saved(data, tmp_path):
    settings = {**QUICK, "train.batches": 100_000, "eval.every": 50_000}

    def breaks(row):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        elmur.train("small", data, tmp_path / "run", breaks, settings=settings, progress=False)
    assert elmur.Policy.load(tmp_path / "run" / "checkpoints" / "last")
    steps = len(elmur.training.Run(tmp_path / "run").metrics)
    run = elmur.train("small", data, tmp_path / "run", lambda row: False, resume=True, progress=False)
    assert run.ended == "stopped" and len(run.metrics) > steps


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_control_c_saves_and_raises(tmp_path):
    script = f"""
import elmur
settings = {{"train.batches": 1_000_000, "train.threads": 1, "model.layers": 1, "train.batch": 16, "data.episodes": 20}}
try:
    elmur.train("tmaze-quick", None, {str(tmp_path / "run")!r}, lambda row: print(row["batch"], flush=True), settings=settings)
except KeyboardInterrupt:
    print("interrupted", elmur.Policy.load({str(tmp_path / "run" / "checkpoints" / "last")!r}).parameters, flush=True)
"""
    # Where these tests run in the background, their processes would not hear it.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **heard) as process:
        assert process.stdout.readline().strip() == "1"
        process.send_signal(signal.SIGINT)
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0 and lines[-1].startswith("interrupted ")


def test_other_threads_run_while_training_does(data, tmp_path):
    counted, over = [0], threading.Event()

    def count():
        while not over.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    elmur.train("small", data, tmp_path / "run", settings=QUICK, progress=False)
    over.set()
    thread.join()
    assert counted[0] > 3


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_evaluations_are_the_same_in_every_mode_and_leave_the_policy_alone(policy, mode):
    env = gymnasium.make_vec("elmur/TMaze-v0", num_envs=4, autoreset_mode=mode, length=9)
    result = elmur.evaluate(policy, env, episodes=10, seed=3)
    expected = elmur.evaluate(policy, gymnasium.make_vec("elmur/TMaze-v0", num_envs=4, length=9), episodes=10, seed=3)
    assert np.array_equal(result.returns, expected.returns) and np.array_equal(result.lengths, expected.lengths)
    assert np.array_equal(result.successes, expected.successes) and (result.lengths <= 9).all()
    assert policy.times == [0] and 0 <= result.success_rate <= 1 and "episodes=10" in repr(result)


def test_evaluation_takes_ids_functions_and_single_environments(policy):
    rows = [
        elmur.evaluate(policy, "elmur/TMaze-v0", episodes=3, length=9),
        elmur.evaluate(policy, lambda: gymnasium.make("elmur/TMaze-v0", length=9), episodes=3),
        elmur.evaluate(policy, gymnasium.make("elmur/TMaze-v0", length=9), episodes=3, deterministic=False),
    ]
    assert all(len(row.returns) == 3 for row in rows)
    with pytest.raises(elmur.ElmurError, match="observation: expected numbers of shape"):
        elmur.evaluate(policy, "elmur/CountRecallEasy-v0", episodes=2)


class Camera(gymnasium.Env):
    """A picture with its channels last, one without channels, a vector, and an action of two numbers."""

    observation_space = gymnasium.spaces.Dict(
        speed=gymnasium.spaces.Box(-1, 1, (2,), np.float64),
        eye=gymnasium.spaces.Box(0, 255, (12, 10, 3), np.uint8),
        grey=gymnasium.spaces.Box(0, 255, (8, 9), np.uint8),
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def _see(self):
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self._see(), {}

    def step(self, action):
        assert action in self.action_space
        self.time += 1
        return self._see(), float(action[0]), False, self.time == 9, {}


def test_pictures_and_vectors_in_a_dictionary(tmp_path):
    data = elmur.collect(Camera, lambda seen, info: seen["speed"], episodes=6)
    eye, speed = data[0]["observations"]["eye"], data[0]["observations"]["speed"]
    assert eye.shape == (10, 3, 12, 10) and data[0]["observations"]["grey"].shape == (10, 1, 8, 9)
    assert np.allclose(speed[:9], data[0]["actions"])
    settings = {**QUICK, "train.batches": 2, "model.segment_length": 3}
    policy = elmur.train("small", data, tmp_path / "run", settings=settings, progress=False).policy
    assert elmur.evaluate(policy, Camera, episodes=2).lengths.tolist() == [9, 9]
    rows = gymnasium.vector.SyncVectorEnv([Camera] * 3)
    assert elmur.evaluate(policy, rows, episodes=3).lengths.tolist() == [9, 9, 9]
    seen, other = policy.observation_space.sample(), policy.with_rows(1)
    last = {"eye": seen[0].transpose(1, 2, 0), "grey": seen[1][0], "speed": seen[2]}
    assert np.array_equal(policy.act(seen), other.act(last)), "channels first or last"
    with pytest.raises(elmur.ElmurError, match=r"observation, part 0: expected bytes \(uint8\)"):
        policy.act({**last, "eye": last["eye"] / 255})


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episode_starts_mark_first_observations(mode):
    env = gymnasium.make_vec("elmur/TMaze-v0", num_envs=3, autoreset_mode=mode, purpose="collect")
    seen, _ = env.reset(seed=1)
    start = elmur.episode_starts(env)
    assert start.all()
    for _ in range(100):
        assert np.array_equal(start, seen[:, 1] != 0), "T-Maze shows the hint in the first observation alone"
        seen, _, terminated, truncated, _ = env.step(np.zeros(3, int))
        start = elmur.episode_starts(env, terminated, truncated)
        if mode == "Disabled" and start.any():
            seen, _ = env.reset(options={"reset_mask": start.copy()})
    env.reset(seed=1)
    assert elmur.episode_starts(env).all()
    assert elmur.episode_starts(gymnasium.make("CartPole-v1"), True, False)


def test_the_progress_bar_counts_batches_and_episodes(data, tmp_path, capsys):
    pytest.importorskip("tqdm")
    elmur.train("small", data, tmp_path / "run", settings=QUICK, progress=True)
    text = capsys.readouterr().err
    assert "training" in text and "/6 [" in text and "accuracy" in text and "note: " in text
    elmur.collect("CartPole-v1", lambda seen, info: 0, episodes=2, progress=True)
    assert "collecting" in capsys.readouterr().err
    elmur.collect("CartPole-v1", lambda seen, info: 0, episodes=2)
    assert capsys.readouterr().err == "", "no bar where nobody sees it"


def test_metrics_are_json_lines(run):
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        assert "batch" in json.loads(line)
