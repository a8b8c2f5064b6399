"""One Gymnasium environment behind standard input and output; the protocol is docs/worker-protocol.md.

Needs numpy, and gymnasium for ids. Any class with Gymnasium's `reset`, `step`, `observation_space` and `action_space`
will do. Whatever is printed goes to standard error.
"""
import importlib
import importlib.util
import json
import os
import select
import struct
import sys
import threading
import time
import traceback

PROTOCOL, MAGIC = 1, b"MKR1"
MAX_HEADER, MAX_BODY = 1 << 20, 64 << 20
SIZES = {"u8": 1, "f32": 4, "i64": 8}
SMALL = 4096    # bytes that are sooner copied than sent apart


class Refused(Exception):
    """A request that cannot be served; the worker stays usable."""

    def __init__(self, kind, message, identity=None):
        super().__init__(message)
        self.kind, self.identity = kind, identity


class Broken(Exception):
    """The stream itself is unusable."""


class Wire:
    """Frames on two file descriptors."""

    def __init__(self, source, sink):
        self.source, self.sink = os.fdopen(source, "rb", buffering=1 << 16), sink

    def exactly(self, count, at_start=False):
        data = self.source.read(count)
        if len(data) == count:
            return data
        if at_start and not data:
            return None
        raise Broken(f"input ended after {len(data)} of {count} bytes")

    def receive(self):
        """A header and its arrays as bytes, or None at the end of input."""
        prefix = self.exactly(16, at_start=True)
        if prefix is None:
            return None
        if prefix[:4] != MAGIC:
            raise Broken(f"frame starts with {prefix[:4]!r}, expected {MAGIC!r}")
        head, body = struct.unpack("<IQ", prefix[4:])
        if head > MAX_HEADER or body > MAX_BODY:
            raise Broken(f"frame of {head} + {body} bytes is beyond the limits {MAX_HEADER} + {MAX_BODY}")
        text, data = self.exactly(head), self.exactly(body) if body else b""
        try:
            header = json.loads(text)
        except ValueError as error:
            raise Broken(f"header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise Broken("header is not a JSON object")
        arrays, at = {}, 0
        try:
            for spec in header.get("arrays", ()):
                size = SIZES[spec["dtype"]]
                for n in spec["shape"]:
                    size *= n
                if not isinstance(size, int) or size < 0 or at + size > len(data):
                    raise ValueError(f"array {spec['name']!r} does not fit into the body")
                arrays[spec["name"]] = (spec["dtype"], data[at:at + size])
                at += size
            if at != len(data):
                raise ValueError(f"{len(data) - at} bytes of the body belong to no array")
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("bad_request", f"arrays: {error}", header.get("id")) from None
        return header, arrays

    def send(self, text, chunks=()):
        """A header as bytes, and buffers: small ones as bytes, large ones sent from where they lie."""
        chunks = [c if type(c) is bytes else memoryview(c).cast("B") for c in chunks]
        length = sum(map(len, chunks))
        pending = [MAGIC + struct.pack("<IQ", len(text), length) + text, *chunks]
        if length <= SMALL:
            pending = [b"".join(pending)]
        while pending:
            sent = os.writev(self.sink, pending[:16])
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = memoryview(pending[0])[sent:]

    def answer(self, identity, fields):
        self.send(json.dumps({"id": identity, **fields}, separators=(",", ":")).encode())


# Spaces -------------------------------------------------------------------------------------------------------------


def kind_of(space):
    """The kind of a space by the names of its classes, so that gym's and own spaces count too."""
    known = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Dict", "Tuple")
    for base in type(space).__mro__:
        if base.__name__ in known:
            return base.__name__
    raise Refused("bad_request", f"spaces of type {type(space).__name__} are not supported; known: {', '.join(known)}")


class Leaf:
    """A part of a space, with the array that carries it."""

    def __init__(self, name, path, space):
        self.name, self.path, self.kind = name, path, kind_of(space)
        self.start, self.dtype = 0, None
        if self.kind == "Discrete":
            self.start, self.type, self.shape = int(getattr(space, "start", 0)), "i64", [1]
            self.space = {"discrete": {"n": int(space.n)}}
        elif self.kind == "MultiDiscrete":
            self.start = np.asarray(getattr(space, "start", 0), dtype=np.int64).reshape(-1)
            sizes, self.type = np.asarray(space.nvec).reshape(-1), "i64"
            self.space, self.shape = {"multi_discrete": {"sizes": [int(n) for n in sizes]}}, [len(sizes)]
            self.dtype = np.dtype(getattr(space, "dtype", None) or np.int64)
        elif self.kind == "MultiBinary":
            count = int(np.prod(space.shape))
            self.space, self.type, self.shape = {"multi_discrete": {"sizes": [2] * count}}, "i64", [count]
            self.dtype = np.dtype(np.int8)
        else:
            self.box(space)
        self.own_shape, self.size = tuple(getattr(space, "shape", None) or ()), 1
        for n in self.shape:
            self.size *= n

    def box(self, space):
        shape, self.dtype = [int(n) for n in space.shape], np.dtype(space.dtype)
        low, high = np.asarray(space.low, dtype=np.float64), np.asarray(space.high, dtype=np.float64)
        self.shape, self.type = shape or [1], "f32"
        # Bytes are numbers from 0 to 255; a box of bytes with other bounds means something else.
        if self.dtype == np.uint8 and (low == 0).all() and (high == 255).all():
            self.type = "u8"
            shown = list(self.shape)
            if len(shown) == 2:
                shown = [1, *shown]
            if self.is_image_with_channels_last():
                shown = [shown[2], shown[0], shown[1]]
            self.space = {"bytes": {"shape": shown}}
            return
        most = float(np.finfo(np.float32).max)
        bounds = [np.clip(np.nan_to_num(b.reshape(-1), nan=0.0), -most, most) for b in (low, high)]
        if all((b == b[0]).all() for b in bounds) or len(bounds[0]) > 4096:
            bounds = [[b.min() if i == 0 else b.max()] for i, b in enumerate(bounds)]
        low, high = ([float(np.float32(x)) for x in b] for b in bounds)
        self.space = {"box": {"shape": self.shape, "low": low, "high": high}}

    def is_image_with_channels_last(self):
        """Images have fewer channels than rows and columns; the shorter end is the channels."""
        return self.type == "u8" and len(self.shape) == 3 and self.shape[2] < min(self.shape[:2])

    def part(self):
        part = {"name": self.name, "dtype": self.type, "shape": self.shape}
        return {**part, "channels_last": True} if self.is_image_with_channels_last() else part

    def encode(self, value, what):
        for key in self.path:
            value = value[key]
        if self.kind == "Discrete":
            return struct.pack("<q", int(value) - self.start)
        try:
            if self.type == "i64":
                array = np.asarray(value).reshape(-1).astype("<i8") - self.start
            else:
                array = np.ascontiguousarray(value, dtype="u1" if self.type == "u8" else "<f4")
        except (TypeError, ValueError) as error:
            raise Refused("internal", f"{what} {self.name!r}: {error}") from None
        if array.size != self.size:
            expected = f"shape {self.shape}"
            raise Refused("internal", f"{what} {self.name!r}: expected {expected}, got {list(np.shape(value))}")
        return array.tobytes() if array.nbytes <= SMALL else array.reshape(-1)

    def decode(self, arrays):
        given = arrays.get(self.name)
        if given is None or given[0] != self.type or len(given[1]) != self.size * SIZES[self.type]:
            raise Refused("bad_request", f"expected the action's array {self.name!r} {self.type} {self.shape}")
        if self.kind == "Discrete":
            return np.int64(struct.unpack("<q", given[1])[0] + self.start)
        array = np.frombuffer(given[1], {"u8": "u1", "f32": "<f4", "i64": "<i8"}[self.type])
        if self.type == "i64":
            array = array + self.start
        return array.astype(self.dtype).reshape(self.own_shape)


class Layout:
    """A space as a list of leaves."""

    def __init__(self, space, name):
        self.leaves, self.space = [], space
        self.described = self.walk(space, name, ())
        self.parts = [leaf.part() for leaf in self.leaves]

    def walk(self, space, name, path):
        kind = kind_of(space)
        if kind in ("Dict", "Tuple"):
            inner = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
            return {"tuple": {"parts": [self.walk(s, f"{name}/{key}", (*path, key)) for key, s in inner]}}
        leaf = Leaf(name, path, space)
        self.leaves.append(leaf)
        return leaf.space

    def encode(self, value, what):
        return [leaf.encode(value, what) for leaf in self.leaves]

    def decode(self, arrays):
        if len(self.leaves) == 1 and not self.leaves[0].path:
            return self.leaves[0].decode(arrays)
        values = {leaf.path: leaf.decode(arrays) for leaf in self.leaves}
        return self.gather(self.space, (), values)

    def gather(self, space, path, values):
        kind = kind_of(space)
        if kind == "Dict":
            return {key: self.gather(s, (*path, key), values) for key, s in space.spaces.items()}
        if kind == "Tuple":
            return tuple(self.gather(s, (*path, i), values) for i, s in enumerate(space.spaces))
        return values[path]


# The environment ----------------------------------------------------------------------------------------------------


def load(entry, what):
    """What `module:name` or `file.py:name` means."""
    module, _, name = entry.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location("elmur_" + os.path.basename(module)[:-3], module)
        if not os.path.exists(module):
            raise Refused("bad_request", f"{what}: no file {module!r} in {os.getcwd()!r}")
        found = sys.modules.get(spec.name)
        if found is None:
            sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
            found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
    else:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            place = f"{sys.executable}, folder {os.getcwd()}"
            raise Refused("bad_request", f"{what}: {error} ({place}); see the setting `python`") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refused("bad_request", f"{what}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def is_import(entry):
    """Whether an entry is module:name; ids of Gymnasium, such as module:Name-v0, are not."""
    module, colon, name = entry.rpartition(":")
    return bool(module and colon) and all(part.isidentifier() for part in name.split("."))


def make_env(entry, kwargs):
    if is_import(entry):
        return load(entry, "environment")(**kwargs)
    try:
        import gymnasium
    except ImportError as error:
        message = f"{entry!r} is an id of Gymnasium, and {sys.executable} cannot import it: {error}"
        raise Refused("bad_request", f"{message}; see the setting `python`") from None
    try:
        return gymnasium.make(entry, **{"disable_env_checker": True, **kwargs})
    except gymnasium.error.Error as error:
        raise Refused("unknown_task", f"{type(error).__name__}: {error}") from None


def flag(info, *names):
    """A flag of the info, as JSON; null if there is none."""
    for name in names:
        value = info.get(name) if isinstance(info, dict) else None
        if value is not None:
            value = np.asarray(value).reshape(-1)
            return "null" if value.size != 1 else "true" if value[0] else "false"
    return "null"


class Server:
    def __init__(self):
        self.env = self.expert = None
        self.steps, self.planned, self.running = 0, None, False

    def hello(self):
        return {"hello": "elmur-python", "protocol": PROTOCOL,
                "versions": {"python": sys.version.split()[0], "numpy": np.__version__}}

    def make(self, header):
        entry, kwargs = header.get("entry"), header.get("kwargs") or {}
        if not isinstance(entry, str) or not isinstance(kwargs, dict):
            raise Refused("bad_request", "expected an entry (text) and kwargs (an object)")
        expert, limit = header.get("expert"), header.get("max_steps")
        if expert is not None and not (isinstance(expert, str) and is_import(expert)):
            raise Refused("bad_request", f"expert is {expert!r}; expected module:function")
        self.close()
        self.expert = None
        if expert is not None:
            found = load(expert, "expert")
            self.expert = found() if isinstance(found, type) else found
        env = make_env(entry, kwargs)
        for name in ("reset", "step", "observation_space", "action_space"):
            if not hasattr(env, name):
                raise Refused("bad_request", f"{entry!r} has no {name!r}; expected a Gymnasium environment")
        self.observation = Layout(env.observation_space, "observation")
        self.action = Layout(env.action_space, "action")
        self.arrays = json.dumps(self.observation.parts, separators=(",", ":"))
        self.action_arrays = json.dumps(self.action.parts, separators=(",", ":"))
        self.env, self.limit, self.running = env, limit, False
        spec = getattr(env, "spec", None)
        own = getattr(spec, "max_episode_steps", None)
        limits = [n for n in (own, limit) if isinstance(n, int)]
        good = getattr(spec, "reward_threshold", None)
        return {"spaces": {"observation": self.observation.described, "action": self.action.described},
                "observation": self.observation.parts, "action": self.action.parts,
                "max_steps": min(limits, default=None), "expert": self.expert is not None,
                "good_return": None if good is None else float(good)}

    def reset(self, identity, header):
        if self.env is None:
            raise Refused("no_env", "make an environment first")
        seed = header.get("seed")
        if seed is not None and not isinstance(seed, int):
            raise Refused("bad_request", f"seed is {seed!r}; expected an integer")
        self.running = False
        answer = self.env.reset(seed=seed)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise Refused("internal", "reset must return (observation, info), as in Gymnasium 0.26 and later")
        self.seen, self.info = answer
        self.steps, self.planned, self.running = 0, None, True
        if hasattr(self.expert, "reset"):
            self.expert.reset()
        chunks = self.observation.encode(self.seen, "observation")
        text = (f'{{"id":{identity},"ok":true,"step":0,"uses_action":{flag(self.info, "uses_action")},'
                f'"arrays":{self.arrays}}}')
        return text.encode(), chunks

    def plan(self):
        if not self.running:
            raise Refused("no_episode", "no episode is running; reset first")
        if self.planned is None and self.expert is not None:
            self.planned = self.action.encode(self.expert(self.seen, self.info), "expert's action")
        return self.planned

    def oracle(self, identity):
        planned = self.plan()
        if planned is None:
            raise Refused("bad_request", "there is no expert; make the environment with one")
        return f'{{"id":{identity},"ok":true,"arrays":{self.action_arrays}}}'.encode(), planned

    def step(self, identity, arrays):
        # An expert that keeps count looks at every step, whoever acts.
        self.plan()
        action = self.action.decode(arrays)
        self.running = False
        answer = self.env.step(action)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            expected = "(observation, reward, terminated, truncated, info), as in Gymnasium 0.26 and later"
            raise Refused("internal", f"step must return {expected}")
        self.seen, reward, terminated, truncated, self.info = answer
        self.steps, self.planned, reward = self.steps + 1, None, float(reward)
        if reward - reward != 0.0:
            raise Refused("internal", f"the reward is {reward}; expected a finite number")
        terminated, truncated = bool(terminated), bool(truncated) or self.steps == self.limit
        done = terminated or truncated
        self.running = not done
        chunks = self.observation.encode(self.seen, "observation")
        text = (f'{{"id":{identity},"ok":true,"step":{self.steps},"reward":{reward!r},'
                f'"terminated":{"true" if terminated else "false"},"truncated":{"true" if truncated else "false"},'
                f'"done":{"true" if done else "false"},"success":{flag(self.info, "success", "is_success")},'
                f'"uses_action":{flag(self.info, "uses_action")},"arrays":{self.arrays}}}')
        return text.encode(), chunks

    def close(self):
        env, self.env, self.running = self.env, None, False
        if env is not None and hasattr(env, "close"):
            env.close()

    def serve(self, wire, header, arrays):
        command, identity = header.get("cmd"), header.get("id")
        if not isinstance(identity, int):
            raise Refused("bad_request", "a request needs an integer id")
        if command == "step":
            wire.send(*self.step(identity, arrays))
        elif command == "oracle":
            wire.send(*self.oracle(identity))
        elif command == "reset":
            wire.send(*self.reset(identity, header))
        elif command == "make":
            wire.answer(identity, {"ok": True, **self.make(header)})
        elif command in ("close", "quit"):
            self.close()
            wire.answer(identity, {"ok": True})
        else:
            known = "make, reset, step, oracle, close, quit"
            raise Refused("bad_request", f"unknown command {command!r}; known: {known}")
        return command != "quit"


def where(error):
    """The place in the user's code that an exception came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != "<string>"]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def end_with_client(descriptor):
    """Ends the worker when its client has gone, even in the middle of a step."""
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll():
        pass
    time.sleep(5)   # what reads the end of the input comes first, and closes the environment
    os._exit(0)


def main():
    # The protocol owns the real standard input and output, in descriptors that no process started by the environment
    # inherits. Everything that prints, native code included, goes to stderr.
    source, sink, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    threading.Thread(target=end_with_client, args=(source,), daemon=True).start()
    wire, server = Wire(source, sink), Server()
    wire.send(json.dumps(server.hello()).encode())
    going = True
    while going:
        identity = None
        try:
            message = wire.receive()
            if message is None:
                server.close()
                return 0
            header, arrays = message
            identity = header.get("id")
            going = server.serve(wire, header, arrays)
        except Refused as error:
            identity = identity if error.identity is None else error.identity
            wire.answer(identity, {"ok": False, "error": {"kind": error.kind, "message": str(error)}})
        except Broken as error:
            wire.answer(None, {"ok": False, "error": {"kind": "protocol", "message": str(error)}})
            return 3
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as error:  # a bug in the environment: report it, stay alive
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}{where(error)}"
            wire.answer(identity, {"ok": False, "error": {"kind": "internal", "message": message[:2000]}})
    return 0


if __name__ == "__main__":
    try:
        import numpy as np
    except ImportError as problem:
        sys.exit(f"{sys.executable} cannot import numpy: {problem}; see the setting `python`")
    status = main()
    sys.stderr.flush()
    os._exit(status)    # exit handlers of simulators can take long and have nothing left to save
