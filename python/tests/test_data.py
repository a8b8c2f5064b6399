"""Datasets: arrays in, episodes out, files."""

import copy
import os
import pickle
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import elmur

RNG = np.random.default_rng(0)


def arrays(steps=10):
    return RNG.normal(size=(steps, 3)).astype(np.float32), RNG.integers(0, 4, steps), RNG.normal(size=steps).astype(np.float32)


def test_steps_are_cut_into_episodes_by_flags_or_by_counts():
    seen, actions, rewards = arrays()
    ends = np.zeros(10, bool)
    ends[[3, 9]] = True
    for given in (ends, [4, 10], np.array([4, 10], np.uint8)):
        data = elmur.Dataset.from_numpy(seen, actions, rewards, episode_ends=given)
        assert len(data) == 2 and data.steps == 10
        assert [len(episode["rewards"]) for episode in data] == [4, 6]
        assert np.array_equal(data[1]["observations"], seen[4:]) and np.array_equal(data[-2]["actions"], actions[:4])
        assert data[0]["terminated"] and not data[0]["truncated"]
        assert data.action_space == gymnasium.spaces.Discrete(actions.max() + 1)
        assert data.observation_space == gymnasium.spaces.Box(-np.inf, np.inf, (3,))


def test_lists_hold_one_array_per_episode_with_or_without_the_last_observation():
    parts = [arrays(steps) for steps in (4, 6)]
    last = [np.concatenate([seen, seen[:1]]) for seen, _, _ in parts]
    data = elmur.Dataset.from_numpy([s for s, _, _ in parts], [a for _, a, _ in parts], terminated=[True, False])
    more = elmur.Dataset.from_numpy(last, [a for _, a, _ in parts], [r for _, _, r in parts])
    assert data[1]["truncated"] and not data[1]["terminated"] and not data[0]["rewards"].any()
    assert more[0]["observations"].shape == (5, 3) and data[0]["observations"].shape == (4, 3)


def test_several_kinds_of_observations_come_in_the_order_of_their_keys():
    pixels = RNG.integers(0, 256, (10, 12, 16, 3), np.uint8)
    seen = {"wrist": RNG.integers(0, 5, 10), "camera": pixels, "joints": RNG.normal(size=(10, 2))}
    data = elmur.Dataset.from_numpy(seen, RNG.normal(size=(10, 2)), episode_ends=[10])
    assert list(data[0]["observations"]) == ["camera", "joints", "wrist"]
    camera, joints, wrist = data[0]["observations"].values()
    assert np.array_equal(camera, pixels.transpose(0, 3, 1, 2)) and camera.dtype == np.uint8, "channels come first"
    assert np.array_equal(wrist, seen["wrist"]) and np.allclose(joints, seen["joints"])
    given = gymnasium.spaces.Dict(
        camera=gymnasium.spaces.Box(0, 255, (12, 16, 3), np.uint8),
        joints=gymnasium.spaces.Box(-1, 1, (2,)),
        wrist=gymnasium.spaces.Discrete(9),
    )
    actions = gymnasium.spaces.Box(-1, 1, (2,))
    known = elmur.Dataset.from_numpy(seen, RNG.normal(size=(10, 2)), episode_ends=[10], spaces=(given, actions))
    assert known.observation_space[2].n == 9 and known.action_space == actions


@pytest.mark.parametrize(
    "change, message",
    [
        ({"episode_ends": None}, "episode_ends: expected where episodes end"),
        ({"episode_ends": [4, 11]}, "episode_ends: expected booleans, or increasing numbers of steps up to 10"),
        ({"episode_ends": [6, 4, 10]}, "increasing"),
        ({"episode_ends": np.zeros(10, bool)}, "episode_ends"),
        ({"rewards": np.zeros(9)}, "rewards: expected 10 steps, as there are actions, got 9"),
        ({"observations": np.zeros((9, 3))}, "observations: expected 10 steps"),
        ({"observations": np.full((10, 3), np.inf)}, "finite"),
        ({"observations": np.zeros((10, 3), complex)}, "observations"),
        ({"actions": np.full(10, -1)}, "actions: expected integers from 0 on"),
        ({"spaces": (gymnasium.spaces.Text(4), gymnasium.spaces.Discrete(4))}, "observation space: expected Box"),
        ({"spaces": (gymnasium.spaces.Box(-9, 9, (3,)), gymnasium.spaces.Discrete(2))}, "action"),
        ({"spaces": (gymnasium.spaces.Box(-9, 9, (2,)), gymnasium.spaces.Discrete(4))}, r"observations: expected numbers of shape \(10, 2\)"),
        ({"terminated": [True, True]}, "terminated: expected 1 booleans"),
    ],
)
def test_what_makes_no_dataset_is_refused_by_name(change, message):
    seen, actions, rewards = arrays()
    actions[0] = 3
    given = {"observations": seen, "actions": actions, "rewards": rewards, "episode_ends": [10], **change}
    with pytest.raises(elmur.ElmurError, match=message):
        elmur.Dataset.from_numpy(**given)


def same_episodes(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x[key], y[key]) for x, y in zip(a, b) for key in ("observations", "actions", "rewards", "terminated")
    )


def test_files_keep_everything_and_are_not_replaced_unasked(tmp_path):
    seen, actions, rewards = arrays()
    data = elmur.Dataset.from_numpy(seen, actions, rewards, episode_ends=[4, 10], metadata={"robot": "arm"})
    data.save(tmp_path / "a.elmur")
    data.save(tmp_path / "npz", npz=True)
    opened = elmur.Dataset.open(tmp_path / "a.elmur")
    assert same_episodes(data, opened) and opened.metadata["robot"] == "arm"
    assert same_episodes(data, elmur.Dataset.open(tmp_path / "npz"))
    files = [tmp_path / "npz" / f"train_data_{i}.npz" for i in (1, 0)]
    assert same_episodes(data[::-1], elmur.Dataset.from_npz(files))
    for options in ({"path": tmp_path / "a.elmur"}, {"path": tmp_path / "npz", "npz": True}):
        with pytest.raises(elmur.ElmurError):
            data.save(**options)
        data[:1].save(**options, overwrite=True)
        assert len(elmur.Dataset.open(options["path"])) == 1
    with pytest.raises(elmur.ElmurError, match="no such dataset"):
        elmur.Dataset.open(tmp_path / "none")


FIXTURES = Path(__file__).parents[2] / "crates/elmur-data/tests/fixtures"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("npz", [False, True])
def test_control_c_ends_a_save_and_leaves_what_was_there(tmp_path, npz):
    steps = 200_000
    data = elmur.Dataset.from_numpy(np.zeros((steps, 2), np.float32), np.zeros(steps, int), episode_ends=np.ones(steps, bool))
    path = tmp_path / "data"
    data[:2].save(path, npz=npz)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            data.save(path, npz=npz, overwrite=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(elmur.Dataset.open(path)) == 2 and [found.name for found in tmp_path.iterdir()] == ["data"]


def test_recordings_of_other_packages_are_opened_by_content():
    robot = elmur.Dataset.from_lerobot(FIXTURES / "lerobot-v3/image")
    assert len(robot) == 4 and list(robot[0]["observations"]) == ["observation.images.top", "observation.state"]
    assert robot[0]["observations"]["observation.images.top"].shape == (13, 3, 24, 32)
    state = elmur.Dataset.open(FIXTURES / "lerobot-v3/image", ["observation.state"])
    assert state[0]["observations"].shape == (13, 6)
    assert np.array_equal(pickle.loads(pickle.dumps(state))[1]["observations"], state[1]["observations"])
    cards = elmur.Dataset.from_minari(FIXTURES / "minari/dict-v0")
    assert list(cards[0]["observations"]) == ["cards", "image", "pair/0", "pair/1", "state"]
    assert cards[0]["observations"]["cards"].shape == (5, 2) and cards[0]["observations"]["cards"].sum() == 12
    arm = elmur.Dataset.from_hdf5(FIXTURES / "robomimic/robomimic.hdf5")
    assert arm[0]["actions"].shape == (5, 7)
    assert len(elmur.Dataset.from_hdf5(FIXTURES / "d4rl/d4rl-writer.hdf5")) > 0
    with pytest.raises(elmur.ElmurError, match="observation.stat"):
        elmur.Dataset.open(FIXTURES / "lerobot-v3/image", ["observation.stat"])


def test_copies_pickles_and_slices(tmp_path):
    seen, actions, rewards = arrays()
    data = elmur.Dataset.from_numpy(seen, actions, rewards, episode_ends=[2, 4, 10])
    data.save(tmp_path / "a.elmur")
    for whole in (data, elmur.Dataset.open(tmp_path / "a.elmur")):
        for other in (copy.copy(whole), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
            assert same_episodes(other, data)
        assert [len(episode["rewards"]) for episode in whole[1:]] == [2, 6]
        with pytest.raises(IndexError):
            whole[3]
        with pytest.raises(IndexError):
            whole[3:]
        with pytest.raises(TypeError):
            whole["a"]
    assert data.summary()["episodes"] == 3 and "episodes=3" in repr(data)


def test_players_demonstrate_their_environments(tmp_path):
    data = elmur.collect("elmur/RepeatFirstEasy-v0", episodes=20, seed=3)
    again = elmur.collect("elmur/RepeatFirstEasy-v0", episodes=20, seed=3, out=tmp_path / "a.elmur")
    assert same_episodes(data, again) and data.summary()["returns"]["mean"] == pytest.approx(1, abs=0.01)
    shown = elmur.collect("elmur/RepeatFirstEasy-v0", episodes=2, previous_action=True)
    assert len(shown.observation_space) == 2
    with pytest.raises(elmur.ElmurError, match="only the library's own environments have a player"):
        elmur.collect("CartPole-v1", episodes=2)
    wrapped = gymnasium.wrappers.FlattenObservation(gymnasium.make("elmur/RepeatFirstEasy-v0"))
    with pytest.raises(elmur.ElmurError, match="does not know Gymnasium's wrappers"):
        elmur.collect(wrapped, episodes=2)


class Remember:
    """An expert for RepeatFirst, with a memory of its own."""

    def reset(self):
        self.card = None

    def __call__(self, seen, info):
        if self.card is None:
            self.card = seen[1] if isinstance(seen, tuple) else seen
        return self.card


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_recordings_of_every_autoreset_mode_are_whole_episodes(mode):
    env = gymnasium.make_vec("elmur/RepeatPreviousEasy-v0", num_envs=3, autoreset_mode=mode)
    batched = gymnasium.make_vec("elmur/RepeatPreviousEasy-v0", num_envs=3, autoreset_mode=mode)

    def expert(seen, info):
        return int(np.sum(seen)) % 4

    data = elmur.collect(env, expert, episodes=8, seed=5)
    together = elmur.collect(batched, lambda seen, infos: np.reshape(seen, (3, -1)).sum(1) % 4, episodes=8, seed=5, batched=True)
    one = elmur.collect("elmur/RepeatPreviousEasy-v0", expert, episodes=3, seed=5)
    assert len(data) == 8 and same_episodes(data, together)
    assert same_episodes(one[:1], data[:1]) and same_episodes(one[1:2], data[3:4]), "a row plays as it would alone"
    for episode in data:
        assert len(episode["actions"]) == len(episode["rewards"]) == len(episode["observations"]) - 1
        assert np.array_equal(episode["actions"], episode["observations"][:-1] % 4)
        assert episode["terminated"] or episode["truncated"]


def test_experts_with_a_memory_are_objects_of_every_row():
    env = gymnasium.make_vec("elmur/RepeatFirstEasy-v0", num_envs=3)
    data = elmur.collect(env, Remember, episodes=6)
    assert data.summary()["returns"]["min"] > 0.9
    with pytest.raises(elmur.ElmurError, match="expected a class"):
        elmur.collect(env, Remember(), episodes=6)
    assert elmur.collect("elmur/RepeatFirstEasy-v0", Remember(), episodes=2).summary()["returns"]["min"] > 0.9


def test_noise_is_recorded_as_not_to_be_imitated():
    data = elmur.collect("CartPole-v1", lambda seen, info: int(seen[2] > 0), episodes=5, noise=0.3)
    marks = np.concatenate([episode["imitate"] for episode in data])
    assert 0.5 < marks.mean() < 0.9


def test_environments_that_cannot_be_trained_on_are_refused_with_the_part_that_cannot():
    class Chat(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Box(0, 1), said=gymnasium.spaces.Text(9))
        action_space = gymnasium.spaces.Discrete(3, start=1)

    with pytest.raises(elmur.ElmurError, match="observation space, key 'said': expected Box.* got Text"):
        elmur.collect(Chat(), lambda *_: 1, episodes=1)
    Chat.observation_space = gymnasium.spaces.Box(0, 1)
    with pytest.raises(elmur.ElmurError, match="action space: expected choices from 0 on, got Discrete"):
        elmur.collect(Chat(), lambda *_: 1, episodes=1)
    with pytest.raises(elmur.ElmurError, match="env: expected an environment of Gymnasium"):
        elmur.collect(3, lambda *_: 1, episodes=1)


def test_a_broken_expert_leaves_nothing_behind(tmp_path):
    def breaks(seen, info):
        raise RuntimeError("tired")

    with pytest.raises(RuntimeError, match="tired"):
        elmur.collect("CartPole-v1", breaks, episodes=2, out=tmp_path / "a.elmur")
    assert not list(tmp_path.glob("*.elmur*"))
