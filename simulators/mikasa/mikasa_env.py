"""MIKASA-Robo on SAPIEN's CPU physics and a software Vulkan renderer.

Importing this module registers the 32 tasks and repairs three things that stand between the published package and a
machine without a GPU:

1. Packages that are only needed for other features (video writing, downloads, GPU kinematics, ...) may be absent.
   They are replaced by placeholders that raise as soon as somebody uses them.
2. `torch.cuda.synchronize` is called unconditionally while an image is read: it becomes a no-op.
3. Semantics.  The tasks hide an object by writing z = 1000 into its pose inside `evaluate()`.  On the GPU backend that
   write reaches only the buffer that the renderer and the success test read; the physics engine never sees it and the
   next fetch brings the true pose back.  On the CPU backend the same assignment moves the body, so hidden cubes fall
   from a kilometre up and the recall phase never comes.  Here the true poses are saved before
   `evaluate()` and put back before the next physics step, which is what the GPU backend does.
"""
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings

warnings.filterwarnings("ignore")

OPTIONAL = ("IPython", "fast_kinematics", "git", "h5py", "huggingface_hub", "imageio", "matplotlib", "mplib", "pandas",
            "pynvml", "pytorch_kinematics", "tabulate", "tyro", "wandb", "cv2")


class _Absent(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_, **__):
            raise RuntimeError(f"{self.__name__}.{name} was called, but {self.__name__} is not installed")
        return type(name, (), {"__init__": missing})


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of optional packages that no other finder knows (it stands last on the path)."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_AbsentFinder())

import numpy as np
import torch


def _bridge_torch_1():
    """Debian's CPU-only torch 1.13 saves gigabytes; two habits of torch 2 are missing there: `with torch.device(...)`
    and int32 index tensors.  On the CPU the first has no effect and the second is a cast."""
    import ctypes
    import gc
    fields = gc.get_referents(torch.device.__dict__)[0]
    fields["__enter__"], fields["__exit__"] = (lambda self: self), (lambda self, *_: None)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))

    def cast(index):
        if isinstance(index, torch.Tensor):
            return index.long() if index.dtype == torch.int32 else index
        return tuple(map(cast, index)) if type(index) is tuple else index
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__
    torch.Tensor.__getitem__ = lambda self, index: get(self, cast(index))
    torch.Tensor.__setitem__ = lambda self, index, value: put(self, cast(index), value)


if int(torch.__version__.split(".")[0]) < 2:
    _bridge_torch_1()
torch.set_num_threads(1)
torch.cuda.synchronize = lambda *_, **__: None

import gymnasium as gym
import mikasa_robo_suite.memory_envs  # noqa: F401  (registers the tasks)
from mani_skill.utils.registration import REGISTERED_ENVS
from mani_skill.utils.structs.pose import Pose

TASKS = {k: v for k, v in REGISTERED_ENVS.items() if v.cls.__module__.startswith("mikasa")}
NEEDS_MUG = ("ShellGameTouch-v0", "ShellGamePush-v0", "ShellGamePick-v0")


def _bodies(env):
    return [a for a in env.scene.actors.values() if a.px_body_type in ("dynamic", "kinematic")]


def _put_back(env):
    for actor, pose in env.__dict__.pop("_true_poses", ()):
        actor.set_pose(pose)


def _repair(cls):
    if cls.__dict__.get("_cpu_semantics"):
        return
    evaluate, step_action, initialize = cls.evaluate, cls._step_action, cls._initialize_episode

    def patched_evaluate(self):
        _put_back(self)
        before = [(a, a.pose.raw_pose.clone()) for a in _bodies(self)]
        out = evaluate(self)
        # remember only what evaluate() moved: touching the others would disturb contacts, a grasp for example
        self._true_poses = [(a, Pose.create(p)) for a, p in before if not torch.equal(p, a.pose.raw_pose)]
        return out

    def patched_step_action(self, action):
        _put_back(self)
        return step_action(self, action)

    def patched_initialize(self, env_idx, options):
        self.__dict__.pop("_true_poses", None)
        return initialize(self, env_idx, options)

    cls.evaluate, cls._step_action, cls._initialize_episode = patched_evaluate, patched_step_action, patched_initialize
    cls._cpu_semantics = True


for _spec in TASKS.values():
    _repair(_spec.cls)


def true_pose(env, actor):
    """Position [3] and quaternion [4] (w, x, y, z) of an actor in the physics world, hidden or not."""
    for a, pose in env.__dict__.get("_true_poses", ()):
        if a is actor:
            return pose.p[0].numpy().astype(np.float64), pose.q[0].numpy().astype(np.float64)
    p = actor.pose
    return p.p[0].numpy().astype(np.float64), p.q[0].numpy().astype(np.float64)


def make(task, images=True, size=128, **options):
    """One environment of a task.  `images`: render both cameras; `size`: image side (the paper's data: 128)."""
    kwargs = dict(num_envs=1, obs_mode="rgb" if images else "state", sim_backend="cpu", render_backend="cpu",
                  control_mode="pd_joint_delta_pos", reward_mode="normalized_dense", **options)
    if images and size != 128:
        kwargs["sensor_configs"] = dict(width=size, height=size)
    return gym.make(task, **kwargs)


def rgb(obs, shrink=1, levels=256):
    """u8 [size, size, 6]: base camera, then wrist camera, the channel order of the published data; thinned."""
    both = np.concatenate([camera["rgb"][0].numpy() for camera in obs["sensor_data"].values()], axis=-1)
    return thinned(both, shrink, levels)


def thinned(image, shrink=1, levels=256):
    """An image u8 [height, width, channels] with `shrink` x `shrink` pixels averaged to one, of which every number is
    rounded to one of `levels` evenly spaced values from 0 to 255.  Whole numbers throughout, as recordings are thinned."""
    if shrink > 1:
        height, width, channels = image.shape
        blocks = image.reshape(height // shrink, shrink, width // shrink, shrink, channels)
        count = shrink * shrink
        image = ((blocks.sum(axis=(1, 3), dtype=np.uint32) + count // 2) // count).astype(np.uint8)
    if levels < 256:
        steps = levels - 1
        level = (image.astype(np.uint32) * steps + 127) // 255
        image = ((level * 255 + steps // 2) // steps).astype(np.uint8)
    return image


def joints(env):
    """f32 [25]: tcp pose (x y z, quaternion w x y z), joint positions [9], joint velocities [9], as published."""
    e = env.unwrapped
    robot = e.agent.robot
    parts = (e.agent.tcp.pose.raw_pose[0], robot.get_qpos()[0], robot.get_qvel()[0])
    return np.concatenate([p.numpy() for p in parts]).astype(np.float32)


def _timing(task):
    """(first steps with the cue, blank steps): observation k shows the cue while k < cue, nothing while k < cue + blank."""
    cls = TASKS[task].cls
    if task.startswith("Remember"):
        return cls.TIME_OFFSET, 5
    if task.startswith("Bunch"):
        return cls.STEP_DURATION, cls.EMPTY_DURATION
    if task.startswith(("Seq", "Chain")):
        return cls.STEP_DURATION * cls.SEQUENCE_LENGTH, cls.EMPTY_DURATION
    if task.startswith("Shell"):
        return cls.TIME_OFFSET, 0
    return 0, 0


def describe(task):
    cue, blank = _timing(task)
    mug = os.path.join(os.environ.get("MS_ASSET_DIR", os.path.expanduser("~/.maniskill/data")),
                       "assets", "mani_skill2_ycb", "models", "025_mug", "textured.obj")
    return {"name": task, "max_steps": TASKS[task].max_episode_steps, "cue_steps": cue, "blank_steps": blank,
            "prompt": task.startswith("Rotate"), "oracle": True,
            "assets_present": task not in NEEDS_MUG or os.path.exists(mug)}


def cue_size(task):
    """How many numbers `cue` has."""
    cls = TASKS[task].cls
    if task.startswith(("RememberShapeAndColor", "RememberShape")):
        return cls.SHAPES
    if task.startswith("RememberColor"):
        return cls.COLORS
    if task.startswith(("Bunch", "Seq")):
        return 9
    if task.startswith("Chain"):
        return 9 * cls.SEQUENCE_LENGTH
    return {"Shell": 3, "Inter": 2, "Rotat": 1, "TakeI": 2}[task[:5]]


def cue(task, env):
    """f32 [cue_size]: the answer that a policy has to remember, as it stands after a reset.

    Remember*: one-hot, which object; ShellGame*: one-hot, which mug; Bunch*, Seq*: 1 for each of the nine colours to
    touch; Chain*: one-hot of the colour for each place of the chain; Intercept*: the ball's velocity, x and y in m/s;
    Rotate*: the angle to turn by, in rad; TakeItBack: where the cube stands, x and y in m."""
    e, size = env.unwrapped, cue_size(task)
    out = np.zeros(size, np.float32)
    if task.startswith("RememberShapeAndColor"):
        out[int(e.true_shape_indices[0])] = 1
    elif task.startswith(("Remember", "Shell")):
        out[int(e.oracle_info[0])] = 1
    elif task.startswith(("Bunch", "Seq")):
        out[[int(i) for i in e.oracle_info[0]]] = 1
    elif task.startswith("Chain"):
        out[[9 * place + int(i) for place, i in enumerate(e.oracle_info[0])]] = 1
    elif task.startswith("Rotate"):
        out[0] = float(e.target_angle[0])
    else:
        out[:] = e.oracle_info[0][:2].numpy()
    return out
