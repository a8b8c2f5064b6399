"""Training: demonstrations in, a run in a folder out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elmur import _elmur
from elmur._elmur import Dataset, ElmurError, Policy
from elmur.progress import Bar

_SECTIONS = ("data", "model", "train", "eval")


@dataclass(frozen=True)
class Run(os.PathLike):
    """A run in a folder: its settings, its metrics, its checkpoints."""

    path: Path
    ended: str | None = None
    """How training ended: "finished", "target" (reached) or "stopped"; None if the run was not trained by this process."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def policy(self) -> Policy:
        """The policy of the best checkpoint."""
        return Policy.load(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """All settings."""
        return json.loads((self.path / "config.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``: one per batch and one per validation."""
        with open(self.path / "metrics.jsonl") as lines:
            return [json.loads(line) for line in lines]


def presets() -> dict[str, str]:
    """The names of all presets, with what they are."""
    return dict(_elmur.presets())


def policies() -> dict[str, str]:
    """The names of all policies (``settings={"policy": NAME}``), with what they are."""
    return dict(_elmur.policies())


def config(base: str | os.PathLike[str] | Mapping[str, Any] = "small", settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All settings of a preset, a ``config.json`` or a dictionary, with changes, as `train` would use them."""
    return json.loads(_elmur.preset_config(*_resolve(base, settings)))


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    data: Dataset | str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    resume: bool = False,
    *,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Run:
    """Trains a policy and writes the run to the folder `out`.

    config: a preset (`presets`), the ``config.json`` of a run, or a dictionary: either all settings (`config` gives them), or
        changes to the preset that its key "preset" names ("small" without it), as in ``{"train": {"batches": 300}}`` or
        ``{"train.batches": 300}``. The key "policy" chooses another policy.
    data: a `Dataset`, or a file or folder of one; None: the player of the preset's environment demonstrates.
    callback: called with a dictionary for every line of ``metrics.jsonl``: one per batch and one per validation. Training
        does not wait for it. It stops, saved and resumable, when the callback returns False or raises.
    resume: go on where the run in `out` stopped, bit for bit; where there is none, begin it.
    settings: more changes, by their dotted keys or as nested dictionaries.
    overwrite: replace a run that is in `out` already.

    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; ``resume=True`` goes on from there.
    """
    if out is None:
        raise ElmurError("out: expected a folder for the run, got None")
    out = Path(out)
    if isinstance(data, (str, os.PathLike)):
        data = Dataset.open(data)
    elif data is not None and not isinstance(data, Dataset):
        raise ElmurError(f"data: expected a Dataset, a path or None, got {type(data).__name__}")
    base, changes = _resolve(config, settings)
    bar = Bar(progress, "training", unit="batch")
    text = {"loss": "", "score": ""}

    def notify(what: str, news: str) -> bool:
        told = json.loads(news)
        if what == "started":
            bar.start(told["done"], told["planned"])
        elif what == "note":
            bar.say(f"note: {told['note']}")
        elif what == "metrics":
            if "measure" in told:
                text["score"] = f", {told['measure']} {told['score']:.3f}"
            else:
                text["loss"] = f"loss {told['loss']:.4f}"
            bar.to(told["batch"], text["loss"] + text["score"])
            return callback is None or callback(told) is not False
        return True

    try:
        ended = _elmur.train(base, changes, data, out, resume, overwrite, notify)
    finally:
        bar.close()
    return Run(out, ended)


def _resolve(base: Any, settings: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    """A base that the library knows (preset, file, or a whole config as JSON) and changes to it as KEY=VALUE."""
    changes: dict[str, Any] = {}
    if isinstance(base, Mapping):
        if all(section in base for section in _SECTIONS):
            base = json.dumps(base)
        else:
            changes.update(base)
            base = changes.pop("preset", "small")
    elif not isinstance(base, (str, os.PathLike)):
        raise ElmurError(f"config: expected a preset, a path or a dictionary, got {type(base).__name__}")
    base = os.fspath(base)
    changes.update(settings or {})
    known = json.loads(_elmur.preset_config(base, []))
    return base, [f"{key}={value}" for key, value in _flat(changes, known)]


def _flat(changes: Mapping[str, Any], known: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values of nested changes. Where the config holds a value, a dictionary is a value too."""
    flat = []
    for key, value in changes.items():
        inner = known
        for part in key.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        nested = isinstance(value, Mapping) and isinstance(inner, dict) and prefix + key != "env"
        # A choice with settings of its own ({"moe": {...}} for {"swi_glu": {...}}) is replaced as a whole.
        nested = nested and (not prefix or not value or any(name in inner for name in value))
        if nested:
            flat += _flat(value, inner, f"{prefix}{key}.")
        elif key == "policy" and not prefix:
            flat.append((key, str(value)))
        else:
            flat.append((prefix + key, json.dumps(value, default=os.fspath)))
    return flat
