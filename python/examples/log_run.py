"""Log a run to Weights & Biases or MLflow, from its `metrics.jsonl`, while it trains or afterwards.

python python/examples/log_run.py RUN --to wandb                              # WANDB_MODE=offline works too
python python/examples/log_run.py RUN --to mlflow --uri sqlite:///mlflow.db

Logging again goes on where it stopped: the tracker's run is found by a hash of the run's settings.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(run: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Batch and numbers of every line; those of validations are named `validation/...`."""
    with open(run / "metrics.jsonl") as lines:
        for line in lines:
            row = json.loads(line)
            group = "validation" if "measure" in row else "train"
            numbers = {f"{group}/{key}": value for key, value in row.items() if isinstance(value, float) and key != "batch"}
            yield row["batch"], numbers


def settings(run: Path) -> tuple[dict[str, Any], str]:
    """All settings and a hash of them."""
    text = (run / "config.json").read_text()
    return json.loads(text), hashlib.sha256(text.encode()).hexdigest()[:16]


def to_wandb(run: Path, project: str) -> None:
    import wandb

    config, identity = settings(run)
    with wandb.init(project=project, name=run.name, id=identity, resume="allow", config=config) as tracked:
        done = tracked.step
        for batch, numbers in rows(run):
            if batch >= done:
                tracked.log(numbers, step=batch)


def to_mlflow(run: Path, project: str, uri: str) -> None:
    import mlflow

    config, identity = settings(run)
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(project)
    found = mlflow.search_runs(filter_string=f"tags.elmur = '{identity}'", output_format="list")
    done = max((m.step for r in found for m in mlflow.MlflowClient(uri).get_metric_history(r.info.run_id, "train/loss")), default=0)
    with mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=run.name):
        mlflow.set_tag("elmur", identity)
        mlflow.log_dict(config, "config.json")
        for batch, numbers in rows(run):
            if batch > done:
                mlflow.log_metrics(numbers, step=batch)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=["wandb", "mlflow"], required=True)
    parser.add_argument("--project", default="elmur")
    parser.add_argument("--uri", default="sqlite:///mlflow.db", help="where MLflow keeps its runs")
    given = parser.parse_args(arguments)
    if given.to == "wandb":
        to_wandb(given.run, given.project)
    else:
        to_mlflow(given.run, given.project, given.uri)


if __name__ == "__main__":
    main()
