"""The library's environments in Gymnasium."""

import copy
import os
import pickle
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vec_contract import check, same

import elmur
from elmur._elmur import environments
from elmur.envs import gymnasium_id

ALL = [gymnasium_id(name) for name in environments()]
# Those of the robot simulator, which is installed apart, are tested where there is one.
IDS = [name for name in ALL if "mikasa-" not in name]


def test_all_environments_are_registered():
    assert (len(ALL), len(set(ALL)), len(IDS)) == (82, 82, 50)
    assert {"elmur/TMaze-v0", "elmur/CartPole-v0", "elmur/RepeatFirstEasy-v0"} <= set(IDS)
    assert "elmur/mikasa-RememberColor3-v0" in ALL
    assert set(ALL) <= set(gymnasium.registry)
    for name in ALL:
        gymnasium.registry[name].to_json()


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_checks_the_single_environment(name):
    check_env(gymnasium.make(name).unwrapped)


@pytest.mark.parametrize("name", IDS)
def test_the_vector_is_gymnasiums_vector_of_the_single_environment(name):
    def vector(rows, mode):
        return gymnasium.make_vec(name, num_envs=rows, autoreset_mode=mode)

    check(vector, lambda: gymnasium.make(name, disable_env_checker=True), num_envs=3)


def test_settings_and_wrappers_are_keywords():
    maze = gymnasium.make("elmur/TMaze-v0", length=90)
    maze.reset(seed=0)
    steps = 1
    while not any(maze.step(0)[2:4]):
        steps += 1
    assert steps == 90
    wrapped = gymnasium.make_vec("elmur/RepeatFirstEasy-v0", 2, previous_action=True, first_step=True)
    assert len(wrapped.single_observation_space) == 3
    with pytest.raises(elmur.ElmurError, match="did you mean `length`"):
        gymnasium.make("elmur/TMaze-v0", lenght=9)
    with pytest.raises(elmur.ElmurError, match="purpose: expected evaluate or collect, got fun"):
        gymnasium.make("elmur/TMaze-v0", purpose="fun")


def test_make_vec_takes_the_mode_as_a_word_and_an_id_with_its_package():
    env = gymnasium.make_vec("elmur:elmur/TMaze-v0", num_envs=3, autoreset_mode="SameStep")
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and env.spec.id == "elmur/TMaze-v0"


def test_threads_change_nothing():
    one, two = (gymnasium.make_vec("elmur/CountRecallEasy-v0", 600, threads=n, autoreset_mode="SameStep") for n in (1, 2))
    assert same(one.reset(seed=1), two.reset(seed=1))
    one.action_space.seed(0)
    for _ in range(60):
        actions = one.action_space.sample()
        assert same(one.step(actions), two.step(actions))


def test_actions_are_converted_or_refused_by_name():
    env = gymnasium.make_vec("elmur/TMaze-v0", num_envs=3)
    env.reset(seed=0)
    for actions in ([0, 1, 2], np.array([0, 1, 2], np.int8), np.arange(6)[::2] // 2, np.array([True, False, True])):
        env.step(actions)
    for actions, message in (
        ([0, 1], r"actions: expected integers of shape \(3\), got int64 of shape \(2,\)"),
        ([0.0, 1.0, 2.0], "actions: expected integers, got float64"),
        ([0, 1, 7], "got 7"),
        (["a", "b", "c"], "actions: expected integers"),
    ):
        with pytest.raises(elmur.ElmurError, match=message):
            env.step(actions)


def test_an_ended_row_must_be_reset_when_autoreset_is_off():
    env = gymnasium.make_vec("elmur/TMaze-v0", num_envs=2, autoreset_mode="Disabled")
    env.reset(seed=0)
    while not np.logical_or(*(flags := env.step([0, 0])[2:4])).any():
        pass
    with pytest.raises(elmur.ElmurError, match="its episode has ended"):
        env.step([0, 0])
    env.reset(options={"reset_mask": np.logical_or(*flags)})
    env.step([0, 0])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_statistics_of_episodes_are_recorded_around_ours(mode):
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    env = RecordEpisodeStatistics(gymnasium.make_vec("elmur/RepeatFirstEasy-v0", num_envs=4, autoreset_mode=mode))
    env.reset(seed=0)
    env.action_space.seed(0)
    told = []
    for _ in range(120):
        _, _, terminated, truncated, infos = env.step(env.action_space.sample())
        done = terminated | truncated
        told += [(infos["episode"]["r"][row], infos["episode"]["l"][row]) for row in np.flatnonzero(done)]
        if mode is AutoresetMode.DISABLED and done.any():
            env.reset(options={"reset_mask": done})
    assert len(told) >= 8 and all(steps == 51 or steps == 52 for _, steps in told), told


def test_observations_can_be_normalised_and_infos_listed():
    from gymnasium.wrappers.vector import DictInfoToList, NormalizeObservation

    env = NormalizeObservation(gymnasium.make_vec("elmur/CartPole-v0", num_envs=4))
    env.reset(seed=0)
    assert np.isfinite(env.step(env.action_space.sample())[0]).all()
    env = DictInfoToList(gymnasium.make_vec("elmur/TMaze-v0", num_envs=2, autoreset_mode="SameStep"))
    env.reset(seed=0)
    assert len(env.step([0, 0])[4]) == 2


def test_pickled_environments_are_made_anew():
    for env in (gymnasium.make("elmur/TMaze-v0", length=12).unwrapped, gymnasium.make_vec("elmur/TMaze-v0", 3, length=12)):
        for other in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
            assert same(env.reset(seed=4), other.reset(seed=4))
            assert other.native_spec == env.native_spec


def test_processes_can_make_them():
    env = gymnasium.make_vec("elmur/TMaze-v0", num_envs=2, vectorization_mode="async")
    ours = gymnasium.make_vec("elmur/TMaze-v0", num_envs=2)
    assert same(env.reset(seed=5)[0], ours.reset(seed=5)[0])
    env.close()


def test_a_single_environment_goes_on_as_a_row_of_a_vector_does():
    one, rows = gymnasium.make("elmur/RepeatPreviousEasy-v0"), gymnasium.make_vec("elmur/RepeatPreviousEasy-v0", 1, autoreset_mode="SameStep")
    one.reset(seed=8)
    rows.reset(seed=8)
    for _ in range(150):
        seen, _, terminated, truncated, _ = one.step(1)
        if terminated or truncated:
            seen, _ = one.reset()
        assert same(np.asarray(seen), rows.step([1])[0][0])


def test_the_reference_itself_passes_the_contract():
    def one():
        return gymnasium.make("CartPole-v1", max_episode_steps=30)

    check(lambda rows, mode: SyncVectorEnv([one] * rows, autoreset_mode=mode), one, num_envs=3)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_control_c_ends_waiting_for_a_simulator(tmp_path):
    silent = tmp_path / "mikasa-python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    task = "mikasa-RememberColor3-v0"
    env = gymnasium.make(f"elmur/{task}", folder=str(tmp_path), disable_env_checker=True)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        for wait in (env.reset, lambda: elmur.collect(f"elmur/{task}", episodes=1, folder=str(tmp_path))):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
