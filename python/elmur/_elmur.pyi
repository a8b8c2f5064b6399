"""The compiled part of the package."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

__version__: str

_Path = str | os.PathLike[str]

class ElmurError(ValueError):
    """What the library refuses, with what was expected and what came."""

@final
class Snapshot:
    """Everything that some rows of a policy remember. ``bytes(snapshot)`` can be kept; snapshots can be pickled."""

    @staticmethod
    def from_bytes(bytes: bytes) -> Snapshot: ...
    @property
    def times(self) -> list[int]:
        """Environment steps since each row's episode began."""
    def states(self) -> dict[str, NDArray[Any]]:
        """All states by name, [rows, ...]."""
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...

@final
class Policy:
    """A policy with a number of rows, each an episode with a memory of its own.

    Observations are arrays [rows, ...]; a tuple or dictionary of them where there are several kinds (dictionaries in the
    order of their sorted keys). With one row the axis of rows may be left out, and actions then have none either. Other
    real numbers than float32 are converted, integers are not taken for floats' places, pictures may have their channels last.
    """

    @staticmethod
    def load(
        path: _Path, device: str = "cpu", rows: int = 1, *, threads: int = 1, weights: str = "f32"
    ) -> Policy:
        """Loads the policy in a folder: a run (its best checkpoint) or a checkpoint.

        ``weights="bf16"`` keeps the weights of linear layers in half the memory, which makes small batches faster on a CPU.
        """
    @staticmethod
    def from_bytes(
        data: bytes, device: str = "cpu", rows: int = 1, *, threads: int = 1, weights: str = "f32"
    ) -> Policy:
        """A policy from the bytes of a ``model.safetensors``."""
    def with_rows(self, rows: int) -> Policy:
        """The same policy with another number of rows, all at the start of an episode. Parameters are shared."""
    def save(self, path: _Path) -> None:
        """Writes the policy as a checkpoint folder."""
    def act(
        self,
        observation: Any,
        episode_start: ArrayLike | None = None,
        *,
        returns: ArrayLike | None = None,
        deterministic: bool = True,
        logits: bool = False,
        out: NDArray[Any] | None = None,
    ) -> Any:
        """Actions [rows] or [rows, parts] for the next observations.

        episode_start: booleans [rows]; these rows begin a new episode first. Without it all rows go on: nothing is ever
            reset by itself.
        returns: a return-to-go per row, for policies that read it (`reads_returns`).
        deterministic: take the likeliest actions instead of drawing them.
        logits: return the outputs of the head [rows, outputs] instead; the likeliest action is the one that goes on.
        out: an array to write the actions to.
        """
    def defer_writes(self, defer: bool = True) -> None:
        """Leaves writing the memory at the end of a segment to ``settle``, so that its last action comes as soon as others."""
    def settle(self) -> None:
        """Does the writes that ``defer_writes`` left, while the environment moves; without it the next step does them first."""
    def select_action(self, batch: Any) -> Any:
        """Actions for a batch as LeRobot has it: a dictionary whose keys begin with ``observation``, or any observation."""
    def predict(
        self,
        observation: Any,
        state: Snapshot | bytes | None = None,
        episode_start: ArrayLike | None = None,
        deterministic: bool = False,
        *,
        returns: ArrayLike | None = None,
    ) -> tuple[Any, Snapshot]:
        """Actions and the next state, from observations and a state alone, as in Stable-Baselines3.

        Nothing is remembered in the policy: the same state gives the same actions. No state means fresh rows.
        """
    def reset(self, rows: ArrayLike | None = None, seeds: ArrayLike | None = None) -> None:
        """Begins new episodes in `rows`: all for None, one, several, or a mask.

        The same seed gives the same initial memory and draws; an integer means seed, seed + 1, ...; without seeds each row
        goes on to its next.
        """
    def snapshot(self, rows: ArrayLike | None = None) -> Snapshot:
        """Everything that `rows` remember (all for None), as a value."""
    def restore(self, state: Snapshot | bytes, rows: ArrayLike | None = None) -> None:
        """Puts a snapshot into `rows` (all for None), which go on from there bit for bit."""
    def memory(self, layer: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What a layer of an ELMUR policy remembers, read-only: its slots [rows, slots, width], and for each slot the number
        of steps since it was written [rows, slots], -1 if it never was."""
    def states(self) -> dict[str, NDArray[Any]]:
        """All states that the policy carries from step to step, by name, [rows, ...]."""
    @property
    def times(self) -> list[int]:
        """Environment steps since each row's episode began."""
    @property
    def rows(self) -> int:
        """Number of rows."""
    @property
    def device(self) -> str:
        """The device that acts."""
    @property
    def weights(self) -> str:
        """How weights of linear layers are kept: f32 or bf16."""
    @property
    def target_return(self) -> float | None:
        """The return that the policy was asked for in its run's validations; None if it does not aim at one."""
    @property
    def reads_returns(self) -> bool:
        """Whether the policy reads a return-to-go at every step (`returns`)."""
    @property
    def parameters(self) -> int:
        """Number of parameters."""
    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
    @property
    def observation_space(self) -> Any:
        """The Gymnasium space of observations of one row."""
    @property
    def action_space(self) -> Any:
        """The Gymnasium space of actions of one row."""

@final
class Dataset:
    """Recorded episodes, in memory or on disk. Datasets do not change."""

    @staticmethod
    def open(
        path: _Path, keys: Sequence[str] | None = None, *, action_key: str | None = None, mask: str | None = None
    ) -> Dataset:
        """Opens a file or folder of any format that is known, by its content: ``.elmur``, ``.npz``, LeRobot, Minari, D4RL,
        robomimic.

        keys: names of the observations to read, in this order; without it all of them, in the order of their names.
        action_key, mask: the array of actions and the list of episodes to read, where a format has several.
        """
    @staticmethod
    def from_numpy(
        observations: Any,
        actions: Any,
        rewards: Any = None,
        episode_ends: ArrayLike | None = None,
        spaces: tuple[Any, Any] | None = None,
        *,
        terminated: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Dataset:
        """A dataset from arrays: see `elmur.data.from_numpy`."""
    @staticmethod
    def from_npz(files: _Path | Sequence[_Path]) -> Dataset:
        """A dataset from one ``.npz`` file per episode, or from a folder of them."""
    @staticmethod
    def from_minari(path: _Path, keys: Sequence[str] | None = None) -> Dataset:
        """A dataset from the folder of a Minari dataset."""
    @staticmethod
    def from_lerobot(path: _Path, keys: Sequence[str] | None = None) -> Dataset:
        """A dataset from the folder of a LeRobot dataset."""
    @staticmethod
    def from_hdf5(
        path: _Path, keys: Sequence[str] | None = None, *, action_key: str | None = None, mask: str | None = None
    ) -> Dataset:
        """A dataset from an HDF5 file of D4RL or robomimic."""
    @staticmethod
    def from_bytes(data: bytes) -> Dataset:
        """A dataset from the bytes of an ``.elmur`` file."""
    def save(self, path: _Path, *, npz: bool = False, overwrite: bool = False) -> None:
        """Writes all episodes to a new ``.elmur`` file, or with `npz` to a folder with one ``.npz`` file per episode."""
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice, /) -> Dataset: ...
    def __iter__(self) -> Episodes: ...
    def __copy__(self) -> Dataset: ...
    def __deepcopy__(self, _memo: Any, /) -> Dataset: ...
    @property
    def steps(self) -> int:
        """Number of steps of all episodes."""
    @property
    def metadata(self) -> dict[str, str]:
        """Notes on the data: environment, expert, seed, ..."""
    def summary(self) -> dict[str, Any]:
        """Counts and statistics of returns and lengths."""
    @property
    def observation_space(self) -> Any:
        """The Gymnasium space of observations."""
    @property
    def action_space(self) -> Any:
        """The Gymnasium space of actions."""

@final
class Episodes:
    """The episodes of a dataset that are yet to come."""

    def __iter__(self) -> Episodes: ...
    def __next__(self) -> dict[str, Any]: ...

@final
class Rows:
    """Rows of an environment, stepped together. For `elmur.envs`."""

    def __new__(cls, spec: str, rows: int, autoreset: str, purpose: str, threads: int) -> Rows: ...
    def spaces(self) -> tuple[str, str]: ...
    def reset(self, seeds: Sequence[int] | None, rows: ArrayLike | None = None) -> Any: ...
    def step(
        self, actions: Any
    ) -> tuple[
        Any,
        NDArray[np.float64],
        NDArray[np.bool_],
        NDArray[np.bool_],
        tuple[NDArray[np.bool_], NDArray[np.bool_]] | None,
        bool,
    ]: ...
    def final_observations(self) -> Any: ...

@final
class Recorder:
    """Episodes that are recorded one after the other, in memory or in a file. For `elmur.collect` and `elmur.data`."""

    def __new__(
        cls, observation: str, action: str, metadata: Mapping[str, str], path: _Path | None = None, overwrite: bool = False
    ) -> Recorder: ...
    def push(
        self,
        observations: Any,
        actions: Any,
        rewards: ArrayLike,
        terminated: bool,
        truncated: bool,
        *,
        seen: int,
        imitate: ArrayLike | None = None,
    ) -> None: ...
    def finish(self) -> Dataset: ...
    def discard(self) -> None: ...

def environments() -> list[str]: ...
def presets() -> list[tuple[str, str]]: ...
def policies() -> list[tuple[str, str]]: ...
def preset_config(base: str, changes: Sequence[str]) -> str: ...
def train(
    base: str,
    changes: Sequence[str],
    data: Dataset | None,
    out: _Path,
    resume: bool,
    overwrite: bool,
    notify: Callable[[str, str], Any],
) -> str: ...
def collect_player(
    spec: str,
    episodes: int,
    seed: int,
    noise: float,
    path: _Path | None,
    overwrite: bool,
    notify: Callable[[str, str], Any],
) -> Dataset: ...
def snapshot_from_bytes(bytes: bytes) -> Snapshot: ...
def policy_from_parts(
    checkpoint: bytes,
    rows: int,
    device: str,
    threads: int,
    target_return: float | None,
    snapshot: bytes,
    weights: str,
) -> Policy: ...
