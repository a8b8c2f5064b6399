"""Minari's recorder around our environments writes what our reader reads."""

import gymnasium
import numpy as np
import pytest

import elmur

minari = pytest.importorskip("minari", reason="minari is not installed: its recordings were not tried")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["elmur/TMaze-v0", "elmur/RepeatFirstEasy-v0", "elmur/BattleshipEasy-v0"])
def test_recordings_of_minari_are_read(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make(name))
    env.action_space.seed(0)
    for seed in range(3):
        env.reset(seed=seed)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
    dataset = env.create_dataset(dataset_id="ours/test-v0", algorithm_name="random")
    folder = dataset.storage.data_path.parent
    env.close()
    data = elmur.Dataset.from_minari(folder)
    assert len(data) == 3
    for ours, theirs in zip(data, dataset.iterate_episodes()):
        assert np.array_equal(ours["actions"], theirs.actions) and np.allclose(ours["rewards"], theirs.rewards)
        seen = theirs.observations if isinstance(theirs.observations, tuple) else (theirs.observations,)
        mine = ours["observations"] if isinstance(ours["observations"], tuple) else (ours["observations"],)
        assert all(np.array_equal(a[: len(b)], b[: len(a)]) for a, b in zip(mine, seen, strict=True))
        assert ours["terminated"] == theirs.terminations[-1]
