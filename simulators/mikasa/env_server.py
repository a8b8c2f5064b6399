"""One MIKASA-Robo environment behind standard input and output; the protocol is docs/worker-protocol.md.

Frames in both directions: "MKR1", u32 length of the header (at most 1 MiB), u64 length of the body (at most 64 MiB),
both little endian; a JSON object; raw arrays, C order, little endian, back to back, in the order of the header's
"arrays": [{"name": "rgb", "dtype": "u8" | "f32" | "i64", "shape": [128, 128, 6]}, ...].  The worker speaks first (a
hello), then answers every request with one frame that repeats the request's "id": {"id": 7, "ok": true, ...} or {"id": 7,
"ok": false, "error": {"kind": ..., "message": ...}}.  After an error the worker goes on; only a frame that cannot be parsed
ends it (status 3).  End of input ends it (status 0).  Whatever libraries print goes to standard error.

Requests ("cmd"); those beyond the common protocol are this worker's own:
    list                            tasks with their length, timing and whether their assets are present
    make   task, obs, size, render, levels, observation, reward, tail, action_noise, expert, seeds, max_steps, options
                                    obs: "rgb" (default) or "state"; size: image side, default 128;
                                    render: side of the images before they are averaged down to size, a multiple of it,
                                    default size; levels: values that a colour of a pixel may have, default 256;
                                    observation: names of the arrays to send, in their order, among rgb or state, joints,
                                    prompt (Rotate tasks) and cue (the hidden answer), default all but cue;
                                    reward: "dense" (normalised, default) or "success" (1 in steps that are solved);
                                    tail: end episodes this many steps after the first success, default never;
                                    action_noise: standard deviation of noise that is added to the arm's part of every
                                    action, drawn from the episode's seed, default 0;
                                    expert: whether the scripted expert follows episodes, default true; if false,
                                    "oracle" is refused, and an expert that is at a loss ends no evaluation;
                                    seeds: [first, end) for resets without a seed; max_steps: episode length, default
                                    the task's own; options: constructor arguments, for example {"delta_time": 100}
                                    (blank steps of the Remember* tasks; lengthen max_steps by as much).
                                    Answers with the task's facts and the arrays of "observation" and "action"
    reset  seed, exact              a new episode; answers with its first observation.  exact (default true) rebuilds the
                                    scene, so that an episode depends on nothing but its seed and its actions, bit for
                                    bit; false saves about a tenth of a second and lets traces of the last episode in
    oracle                          the scripted expert's action for the present state (asking twice changes nothing)
    step   action in the body as "action" f32 [8], or "action": [8 numbers], or "oracle": true
    close                           frees the environment; quit: answers, then ends

Arrays: "rgb" u8 [size, size, 6] (base camera, then wrist camera), "joints" f32 [25] (tcp position 3 and quaternion wxyz
4, joint positions 9, joint velocities 9), "prompt" f32 [1], "cue" f32 [n] (mikasa_env.cue), "state" f32 [n] (privileged).
Answers to reset and step also have prompt and oracle_info (the hidden answer), for use by hand; those to step have
reward, success, success_once, terminated, truncated, done, step.  Without a tail an episode always runs its full length,
as in the published data: "terminated" reports success, "done" is true at the last step only.

    mikasa-python env_server.py                             # with mikasa_env.py and oracle.py beside it
    mikasa-python -c "$(cat env_server.py)" mikasa_env="$(cat mikasa_env.py)" oracle="$(cat oracle.py)"
"""
import json
import linecache
import os
import struct
import sys
import traceback
import types

PROTOCOL, MAGIC = 1, b"MKR1"
MAX_HEADER, MAX_BODY = 1 << 20, 64 << 20
DTYPES = {"u8": "u1", "f32": "<f4", "i64": "<i8"}


class Refused(Exception):
    """A request that cannot be served; the worker stays usable."""

    def __init__(self, kind, message, identity=None):
        super().__init__(message)
        self.kind, self.identity = kind, identity


class Broken(Exception):
    """The stream itself is unusable."""


class Wire:
    def __init__(self, source, sink):
        self.source, self.sink = source, sink

    def _exactly(self, count, at_start=False):
        data = b""
        while len(data) < count:
            part = self.source.read(count - len(data))
            if not part:
                if at_start and not data:
                    return None
                raise Broken(f"input ended after {len(data)} of {count} bytes")
            data += part
        return data

    def receive(self):
        """A header and its arrays, or None at the end of input."""
        import numpy as np
        prefix = self._exactly(16, at_start=True)
        if prefix is None:
            return None
        if prefix[:4] != MAGIC:
            raise Broken(f"frame starts with {prefix[:4]!r}, expected {MAGIC!r}")
        head, body = struct.unpack("<IQ", prefix[4:])
        if head > MAX_HEADER or body > MAX_BODY:
            raise Broken(f"frame of {head} + {body} bytes is beyond the limits {MAX_HEADER} + {MAX_BODY}")
        text, data = self._exactly(head), self._exactly(body)
        try:
            header = json.loads(text.decode())
            assert isinstance(header, dict)
        except Exception as error:
            raise Broken(f"header is not a JSON object: {error}") from None
        arrays, at = {}, 0
        try:
            for spec in header.get("arrays", ()):
                shape = [int(n) for n in spec["shape"]]
                if min(shape, default=0) < 0:
                    raise ValueError(f"negative shape {shape}")
                dtype = np.dtype(DTYPES[spec["dtype"]])
                size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                if at + size > len(data):
                    raise ValueError(f"array {spec['name']!r} needs {size} bytes, {len(data) - at} are left")
                arrays[spec["name"]] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(shape)
                at += size
            if at != len(data):
                raise ValueError(f"{len(data) - at} bytes of the body belong to no array")
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("bad_request", f"arrays: {error}", header.get("id")) from None
        return header, arrays

    def send(self, header, arrays=None):
        import numpy as np
        chunks, specs = [], []
        for name, array in (arrays or {}).items():
            kind = {"uint8": "u8", "float32": "f32", "int64": "i64"}[str(array.dtype)]
            specs.append({"name": name, "dtype": kind, "shape": list(array.shape)})
            chunks.append(np.ascontiguousarray(array).tobytes())
        if specs:
            header = dict(header, arrays=specs)
        text, body = json.dumps(header, separators=(",", ":")).encode(), b"".join(chunks)
        self.sink.write(MAGIC + struct.pack("<IQ", len(text), len(body)) + text + body)
        self.sink.flush()


class Server:
    def __init__(self):
        import mikasa_env
        import oracle
        self.M, self.oracle = mikasa_env, oracle
        self.env = self.task = None
        self.steps = self.planned = None

    def hello(self):
        import sapien
        return {"hello": "mikasa-env", "protocol": PROTOCOL, "tasks": len(self.M.TASKS),
                "versions": {"mikasa_robo_suite": "0.0.5", "sapien": sapien.__version__,
                             "torch": self.M.torch.__version__, "python": sys.version.split()[0]}}

    def serve(self, header, arrays):
        cmd = header.get("cmd")
        handler = getattr(self, f"do_{cmd}", None) if isinstance(cmd, str) else None
        if handler is None:
            raise Refused("bad_request", f"unknown command {cmd!r}; known: list, make, reset, oracle, step, close, quit")
        return handler(header, arrays)

    def do_list(self, header, arrays):
        return {"tasks": [self.M.describe(name) for name in sorted(self.M.TASKS)]}, None

    def do_make(self, header, arrays):
        task, obs, size = header.get("task"), header.get("obs", "rgb"), header.get("size", 128)
        if task not in self.M.TASKS:
            raise Refused("unknown_task", f"{task!r} is not one of the {len(self.M.TASKS)} tasks")
        if obs not in ("rgb", "state"):
            raise Refused("bad_request", f"obs is {obs!r}; expected \"rgb\" or \"state\"")
        if not isinstance(size, int) or not 16 <= size <= 512:
            raise Refused("bad_request", f"size is {size!r}; expected an integer from 16 to 512")
        render, levels = header.get("render", size), header.get("levels", 256)
        if not isinstance(render, int) or not size <= render <= 512 or render % size:
            raise Refused("bad_request", f"render is {render!r}; expected a multiple of size up to 512")
        if not isinstance(levels, int) or not 2 <= levels <= 256:
            raise Refused("bad_request", f"levels is {levels!r}; expected an integer from 2 to 256")
        seeds = header.get("seeds", [0, 1 << 31])
        if not (isinstance(seeds, list) and len(seeds) == 2 and all(isinstance(s, int) for s in seeds)
                and 0 <= seeds[0] < seeds[1] <= 1 << 31):
            raise Refused("bad_request", f"seeds is {seeds!r}; expected [first, end) below 2**31")
        options = header.get("options", {})
        if not isinstance(options, dict):
            raise Refused("bad_request", f"options is {options!r}; expected an object")
        reward, tail, noise = header.get("reward", "dense"), header.get("tail"), header.get("action_noise", 0.0)
        if reward not in ("dense", "success"):
            raise Refused("bad_request", f"reward is {reward!r}; expected \"dense\" or \"success\"")
        if tail is not None and (not isinstance(tail, int) or tail < 0):
            raise Refused("bad_request", f"tail is {tail!r}; expected an integer of at least 0")
        expert = header.get("expert", True)
        if not isinstance(expert, bool):
            raise Refused("bad_request", f"expert is {expert!r}; expected true or false")
        if not isinstance(noise, (int, float)) or not 0 <= noise <= 1:
            raise Refused("bad_request", f"action_noise is {noise!r}; expected a number from 0 to 1")
        facts = self.M.describe(task)
        known = [obs, "joints"] + ["prompt"] * facts["prompt"]
        names = header.get("observation", known)
        if not isinstance(names, list) or not names or any(n not in [*known, "cue"] for n in names) or len(set(names)) < len(names):
            raise Refused("bad_request", f"observation is {names!r}; expected some of {[*known, 'cue']}")
        limit = header.get("max_steps", facts["max_steps"])
        if not isinstance(limit, int) or not 1 <= limit <= 1000000:
            raise Refused("bad_request", f"max_steps is {limit!r}; expected an integer from 1 to 1000000")
        facts["max_steps"] = limit
        if not facts["assets_present"]:
            raise Refused("missing_asset", f"{task} needs the mug asset; run standin_mug.py or fetch the original")
        self.do_close({}, {})
        try:
            self.env = self.M.make(task, images=obs == "rgb", size=render, max_episode_steps=limit, **options)
        except TypeError as error:
            raise Refused("bad_request", f"options: {error}") from None
        self.task, self.obs, self.names, self.seeds, self.next_seed = task, obs, names, seeds, seeds[0]
        self.reward, self.tail, self.noise = reward, tail, float(noise)
        self.shrink, self.levels = render // size, levels
        facts["blank_steps"] = getattr(self.env.unwrapped, "DELTA_TIME", 5) if task.startswith("Remember") else facts["blank_steps"]
        self.expert, self.limit = self.oracle.expert_for(task, self.env) if expert else None, limit
        return {"task": facts, "obs": obs, "size": size, "observation": self.parts(size),
                "action": [{"name": "action", "dtype": "f32", "shape": [8]}], "action_low": -1.0, "action_high": 1.0,
                "action_size": 8, "control_mode": "pd_joint_delta_pos", "control_hz": 20}, None

    def parts(self, size):
        """The arrays of an observation."""
        shapes = {"joints": [25], "prompt": [1], "cue": [self.M.cue_size(self.task)]}
        if self.obs == "state":
            shapes["state"] = [int(self.env.single_observation_space.shape[-1])]
        camera = {"name": "rgb", "dtype": "u8", "shape": [size, size, 6], "channels_last": True}
        return [camera if n == "rgb" else {"name": n, "dtype": "f32", "shape": shapes[n]} for n in self.names]

    def do_reset(self, header, arrays):
        if self.env is None:
            raise Refused("no_env", "make an environment first")
        seed = header.get("seed")
        if seed is None:
            seed = self.next_seed
            self.next_seed = seed + 1 if seed + 1 < self.seeds[1] else self.seeds[0]
        if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
            raise Refused("bad_request", f"seed is {seed!r}; expected an integer from 0 to 2**31 - 1")
        obs, info = self.env.reset(seed=seed, options={"reconfigure": header.get("exact", True) is not False})
        self.steps, self.planned, self.once = 0, None, False
        self.end = self.limit
        self.draws = self.M.np.random.default_rng(seed)
        if self.expert is not None:
            self.expert.reset()
        self.cue = self.M.cue(self.task, self.env) if "cue" in self.names else None
        return {"seed": seed, "step": 0, **self.facts(info)}, self.arrays(obs, info)

    def going_on(self):
        """Refuses what needs an episode where none is going on."""
        if self.steps is None:
            raise Refused("no_episode", "reset first")
        if self.steps >= self.end:
            raise Refused("episode_over", f"the episode ended after {self.end} steps; reset first")

    def plan(self):
        self.going_on()
        if self.expert is None:
            raise Refused("bad_request", "no expert follows this episode; make the environment with \"expert\": true")
        if self.planned is None:
            self.planned = self.expert.action()
        return self.planned

    def do_oracle(self, header, arrays):
        return {"step": self.steps}, {"action": self.plan()}

    def do_step(self, header, arrays):
        np = self.M.np
        self.going_on()
        if self.expert is not None:
            self.plan()             # the expert keeps count of steps, so it looks at each of them
        if header.get("oracle") is True:
            action = self.plan()
        else:
            action = arrays.get("action", header.get("action"))
            try:
                action = np.array(action, dtype=np.float32)
            except (TypeError, ValueError):
                raise Refused("bad_request", "action is not a list of numbers") from None
            if action.shape != (8,) or not np.isfinite(action).all():
                raise Refused("bad_request", f"action has shape {list(action.shape)}; expected 8 finite numbers")
            action = np.clip(action, -1.0, 1.0)
        taken = action.copy()
        if self.noise > 0:
            taken[:7] += self.draws.normal(0.0, self.noise, 7).astype(np.float32)
            taken = np.clip(taken, -1.0, 1.0)
        obs, reward, terminated, truncated, info = self.env.step(self.M.torch.from_numpy(taken))
        self.steps, self.planned = self.steps + 1, None
        success = bool(info["success"][0])
        if success and not self.once and self.tail is not None:
            self.end = min(self.limit, self.steps + self.tail)
        self.once = self.once or success
        over = self.steps >= self.end
        out = {"step": self.steps, "reward": float(success) if self.reward == "success" else float(reward[0]),
               "success": success, "success_once": self.once, "terminated": bool(terminated[0]), "truncated": over,
               "done": over, **self.facts(info)}
        data = self.arrays(obs, info)
        if header.get("oracle") is True:
            data["action"] = action
        return out, data

    def do_close(self, header, arrays):
        if self.env is not None:
            self.env.close()
        self.env = self.task = self.steps = self.planned = None
        return {}, None

    def do_quit(self, header, arrays):
        self.do_close(header, arrays)
        return {"bye": True}, None

    def facts(self, info):
        """What the published observation carries beside images: the prompt (Rotate tasks); and the hidden answer."""
        def plain(x):
            return None if x is None else [float(v) for v in x[0].reshape(-1)]
        return {"prompt": plain(info.get("prompt")), "oracle_info": plain(info.get("oracle_info"))}

    def arrays(self, obs, info):
        def array(name):
            if name == "rgb":
                return self.M.rgb(obs, self.shrink, self.levels)
            if name == "state":
                return obs[0].numpy().astype("float32")
            if name == "joints":
                return self.M.joints(self.env)
            if name == "prompt":
                return info["prompt"][0].reshape(1).numpy().astype("float32")
            return self.cue
        return {name: array(name) for name in self.names}


def provide(arguments):
    """Makes modules of arguments NAME=SOURCE importable, with lines for tracebacks."""
    for argument in arguments:
        name, _, source = argument.partition("=")
        module = types.ModuleType(name)
        module.__file__ = f"{name}.py"
        linecache.cache[module.__file__] = len(source), None, source.splitlines(keepends=True), module.__file__
        sys.modules[name] = module
        exec(compile(source, module.__file__, "exec"), module.__dict__)


def main():
    # the protocol owns the real stdout; everything that prints, native code included, is sent to stderr
    wire = Wire(os.fdopen(os.dup(0), "rb", buffering=1 << 16), os.fdopen(os.dup(1), "wb", buffering=1 << 20))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    if "__file__" in globals():
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    provide(sys.argv[1:])
    server = Server()
    wire.send(server.hello())
    while True:
        identity = None
        try:
            message = wire.receive()
            if message is None:
                return 0
            header, arrays = message
            identity = header.get("id")
            answer, data = server.serve(header, arrays)
            wire.send({"id": identity, "ok": True, **answer}, data)
            if header.get("cmd") == "quit":
                return 0
        except Refused as error:
            wire.send({"id": identity if error.identity is None else error.identity, "ok": False,
                       "error": {"kind": error.kind, "message": str(error)}})
        except Broken as error:
            wire.send({"id": None, "ok": False, "error": {"kind": "protocol", "message": str(error)}})
            return 3
        except BrokenPipeError:
            return 0
        except Exception as error:  # a bug or the simulator: report it, stay alive
            traceback.print_exc()
            wire.send({"id": identity, "ok": False,
                       "error": {"kind": "internal", "message": f"{type(error).__name__}: {error}"}})


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)    # the renderer's own exit handlers can take long and have nothing left to save
