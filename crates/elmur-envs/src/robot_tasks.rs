//! The 32 tasks of MIKASA-Robo: how long an episode lasts, and how many numbers the hidden answer has.

/// A task of MIKASA-Robo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RobotTask {
    /// Name in the published package, such as RememberColor3-v0. That of the environment is `mikasa-` and this.
    pub name: &'static str,
    /// Steps of every episode.
    pub steps: u64,
    /// Numbers of the hidden answer: see `cue` in `simulators/mikasa/mikasa_env.py`.
    pub answer: usize,
}

impl RobotTask {
    /// Whether the target is a number that no image shows; observations carry it unless it is left out (`prompt`).
    pub fn has_prompt(&self) -> bool {
        self.name.starts_with("Rotate")
    }

    /// Whether the number of blank steps between cue and recall can be chosen.
    pub fn has_blank(&self) -> bool {
        self.name.starts_with("Remember")
    }

    /// Name without the version, such as RememberColor3.
    pub fn short_name(&self) -> &'static str {
        self.name.strip_suffix("-v0").unwrap_or(self.name)
    }

    /// The task of this name, with or without `-v0` at its end.
    pub fn find(name: &str) -> Option<&'static Self> {
        let short = name.strip_suffix("-v0").unwrap_or(name);
        ROBOT_TASKS.iter().find(|task| task.short_name() == short)
    }
}

const fn task(name: &'static str, steps: u64, answer: usize) -> RobotTask {
    RobotTask { name, steps, answer }
}

/// All tasks of MIKASA-Robo, in the order of the paper's table.
pub const ROBOT_TASKS: [RobotTask; 32] = [
    task("ShellGameTouch-v0", 90, 3),
    task("ShellGamePush-v0", 90, 3),
    task("ShellGamePick-v0", 90, 3),
    task("InterceptSlow-v0", 90, 2),
    task("InterceptMedium-v0", 90, 2),
    task("InterceptFast-v0", 90, 2),
    task("InterceptGrabSlow-v0", 90, 2),
    task("InterceptGrabMedium-v0", 90, 2),
    task("InterceptGrabFast-v0", 90, 2),
    task("RotateLenientPos-v0", 90, 1),
    task("RotateLenientPosNeg-v0", 90, 1),
    task("RotateStrictPos-v0", 90, 1),
    task("RotateStrictPosNeg-v0", 90, 1),
    task("TakeItBack-v0", 180, 2),
    task("RememberColor3-v0", 60, 3),
    task("RememberColor5-v0", 60, 5),
    task("RememberColor9-v0", 60, 9),
    task("RememberShape3-v0", 60, 3),
    task("RememberShape5-v0", 60, 5),
    task("RememberShape9-v0", 60, 9),
    task("RememberShapeAndColor3x2-v0", 60, 6),
    task("RememberShapeAndColor3x3-v0", 60, 9),
    task("RememberShapeAndColor5x3-v0", 60, 15),
    task("BunchOfColors3-v0", 120, 9),
    task("BunchOfColors5-v0", 120, 9),
    task("BunchOfColors7-v0", 120, 9),
    task("SeqOfColors3-v0", 120, 9),
    task("SeqOfColors5-v0", 120, 9),
    task("SeqOfColors7-v0", 120, 9),
    task("ChainOfColors3-v0", 120, 27),
    task("ChainOfColors5-v0", 120, 45),
    task("ChainOfColors7-v0", 120, 63),
];
