"""Policies that tests share."""

import numpy as np
import pytest

import elmur


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def run(folder):
    """A small policy for T-Maze after a few batches."""
    data = elmur.collect("elmur/TMaze-v0", episodes=60)
    settings = {"train.batches": 12, "train.threads": 1}
    return elmur.train("small", data, folder / "maze", settings=settings, progress=False)


@pytest.fixture
def policy(run):
    return run.policy


@pytest.fixture
def seen():
    """Observations of T-Maze for eight rows and forty steps."""
    return np.random.default_rng(0).normal(size=(40, 8, 4)).astype(np.float32)
