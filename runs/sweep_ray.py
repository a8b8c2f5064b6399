"""Workers of a sweep on a Ray cluster whose nodes share the current folder.

    python runs/sweep_ray.py runs/sweep-example.json --workers 4 --cpus 2 [--gpus 0.5] [-- options of `elmur sweep run`]

Each worker is an actor that runs `elmur sweep run FILE --jobs 1` until no run is left. The sweep's claims keep two workers from one run, so an
actor that dies is simply started again. ELMUR names a program built elsewhere.
"""

import argparse
import os
import subprocess
import sys

import ray


class Worker:
    """Takes runs of the sweep, one after the other."""

    def run(self, command, folder):
        # Ray ends actors without a signal to their children: --die-with-parent lets them save and end.
        return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the sweep")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores per worker")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per worker")
    parser.add_argument("--address", help="address of a Ray cluster; default: a cluster on this machine")
    parser.add_argument("more", nargs="*", help="options of `elmur sweep run`, after --")
    args = parser.parse_args()

    elmur = os.path.abspath(os.environ.get("ELMUR", "target/release/elmur"))
    threads = str(max(1, int(args.cpus)))
    command = [elmur, "sweep", "run", args.file, "--jobs", "1", "--threads", threads, "--die-with-parent", *args.more]
    ray.init(address=args.address)
    actor = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus, max_restarts=3, max_task_retries=3)(Worker)
    workers = [actor.remote() for _ in range(args.workers)]
    codes = ray.get([worker.run.remote(command, os.getcwd()) for worker in workers])
    subprocess.run([elmur, "sweep", "status", args.file])
    # 75: other workers had all that was left.
    sys.exit(max(code for code in codes if code != 75) if any(code != 75 for code in codes) else 75)


if __name__ == "__main__":
    main()
