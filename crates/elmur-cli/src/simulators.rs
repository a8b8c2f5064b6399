//! `elmur simulators`: installs simulators, which are no part of `elmur`, and tries whether they work.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use elmur_base::{Row, Values, files};
use elmur_envs::mikasa::{INSTALLER, LAUNCHER, SCRIPTS, VARIABLE};
use elmur_envs::{EnvSpec, Purpose};
use elmur_train::{Error, Result};
use serde_json::json;

use crate::{Context, note, say};

/// What `elmur simulators` does.
#[derive(clap::Subcommand)]
pub enum Simulators {
    /// Install a simulator into a folder. May be repeated: what is there already is kept.
    ///
    /// Example: elmur simulators install mikasa /opt/mikasa
    Install(Install),
    /// Start a simulator, play some steps and say how long they take.
    ///
    /// Example: elmur simulators check /opt/mikasa
    Check(Check),
}

/// Options of `elmur simulators install`.
#[derive(clap::Args)]
pub struct Install {
    /// Simulator to install.
    simulator: Simulator,
    /// Folder to install it in.
    folder: PathBuf,
    /// Thin the robot's visual meshes this far; fewer triangles are rendered faster.
    #[arg(long, value_enum, default_value_t = Mesh::Tiny)]
    mesh: Mesh,
}

/// Simulators that can be installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Simulator {
    /// MIKASA-Robo: 32 memory tasks of a robot arm.
    Mikasa,
}

/// Detail of the robot's visual meshes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mesh {
    /// 68,249 triangles, about 30 ms of a core per step.
    Tiny,
    /// The wrist camera's housing thinned, about 60 ms.
    Small,
    /// The original, 560,708 triangles, about 165 ms.
    Full,
}

/// Options of `elmur simulators check`.
#[derive(clap::Args)]
pub struct Check {
    /// Folder of the simulator; default: $ELMUR_MIKASA.
    folder: Option<PathBuf>,
    /// Try this task.
    #[arg(long, default_value = "mikasa-RememberColor3-v0")]
    env: String,
    /// Play this many steps.
    #[arg(long, default_value_t = 20, value_parser = crate::count(10_000))]
    steps: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs `elmur simulators`.
pub fn run(what: &Simulators, context: &Context) -> Result<()> {
    match what {
        Simulators::Install(args) => install(args, context),
        Simulators::Check(args) => check(args, context),
    }
}

/// Time that an installer has to end by itself after it was interrupted.
const GRACE: Duration = Duration::from_secs(10);

fn install(args: &Install, context: &Context) -> Result<()> {
    let Simulator::Mikasa = args.simulator;
    note(&format!(
        "installing MIKASA-Robo: 0.7 GB in {}, and up to 1.1 GB of system packages where they are missing \
         (Debian 12, as root); about 3 minutes",
        args.folder.display()
    ));
    let scripts = args.folder.join("scripts");
    let refused = |error| Error::file(&scripts, format!("{error}; name a folder that can be written to"));
    std::fs::create_dir_all(&scripts).map_err(refused)?;
    for (name, text) in SCRIPTS {
        files::write_atomic(&scripts.join(name), text.as_bytes())?;
    }
    let installer = scripts.join(INSTALLER);
    let mesh = match args.mesh {
        Mesh::Tiny => "tiny",
        Mesh::Small => "small",
        Mesh::Full => "full",
    };
    let mut command = Command::new("bash");
    command.arg(&installer).arg(&args.folder).args(["--mesh", mesh]).stdin(std::process::Stdio::null());
    // A group of its own: a stop reaches the programs that the installer has started too.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|cause| Error::file(&installer, format!("bash: {cause}")))?;
    let status = wait(&mut child, context).map_err(|cause| Error::io(&installer, cause))?;
    match status {
        None => Err(Error::Stopped),
        Some(status) if status.success() => {
            let folder = args.folder.canonicalize().unwrap_or_else(|_| args.folder.clone());
            say(&format!("installed; use it with: export {VARIABLE}={}", folder.display()));
            Ok(())
        }
        Some(status) => {
            let problem = format!(
                "did not succeed ({status}); what it printed says why, the same command goes on from there"
            );
            Err(Error::file(&installer, problem))
        }
    }
}

/// Waits for a process; none if a stop was requested and the process was ended.
fn wait(child: &mut Child, context: &Context) -> std::io::Result<Option<ExitStatus>> {
    let mut asked: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(asked.is_none().then_some(status));
        }
        match asked {
            None if context.stop.requested() => {
                signal(child, libc::SIGINT);
                asked = Some(Instant::now());
            }
            Some(since) if since.elapsed() > GRACE => signal(child, libc::SIGKILL),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sends a signal to a child and all processes of its group.
fn signal(child: &Child, signal: i32) {
    if let Ok(group) = i32::try_from(child.id()) {
        // SAFETY: `kill` takes two numbers and touches no memory; the child was not waited for, so that its
        // number is not another's.
        unsafe { libc::kill(-group, signal) };
    }
}

fn check(args: &Check, context: &Context) -> Result<()> {
    let mut spec = EnvSpec::new(&args.env);
    if let Some(folder) = &args.folder {
        spec = spec.with("folder", folder.display().to_string());
    }
    let environment = context.registry.find(&spec)?;
    let spaces = environment.spaces();
    let (mut seen, still) = (Row::of(&spaces.observation), Row::of(&spaces.action));
    if seen.values().bytes.is_empty() {
        let expected = "an environment of a simulator, with images".to_owned();
        return Err(Error::Config { key: "--env".to_owned(), expected, got: environment.name().to_owned() });
    }
    environment.available()?;
    note("starting the simulator; the first image takes 10 to 45 seconds");
    let mut env = environment.make(Purpose::Evaluate)?;
    let start = Instant::now();
    let stopped =
        |error: elmur_envs::Error| if context.stop.requested() { Error::Stopped } else { error.into() };
    env.reset(0, seen.as_mut()).map_err(stopped)?;
    let ready = start.elapsed().as_secs_f64();
    let mut taken = Duration::ZERO;
    for seed in 1..=args.steps as u64 {
        let start = Instant::now();
        let done = env.step(still.values(), seen.as_mut()).map_err(stopped)?.done();
        taken += start.elapsed();
        if done {
            env.reset(seed, seen.as_mut()).map_err(stopped)?;
        }
    }
    let step = taken.as_secs_f64() / args.steps as f64;
    let (mean, deviation) = brightness(seen.values());
    if deviation < 10.0 {
        let problem = format!(
            "no usable image: all pixels are near {mean:.0}; install the simulator again, and see that {LAUNCHER} \
             finds its software renderer"
        );
        return Err(Error::file(args.folder.as_deref().unwrap_or(Path::new(VARIABLE)), problem));
    }
    if args.json {
        let row = json!({
            "env": environment.name(), "ready_s": ready, "step_ms": 1000.0 * step, "pixel_mean": mean,
            "pixel_deviation": deviation,
        });
        say(&row.to_string());
    } else {
        let (name, milliseconds) = (environment.name(), 1000.0 * step);
        say(&format!("{name}: works; ready after {ready:.1} s, then {milliseconds:.0} ms per step"));
    }
    Ok(())
}

/// Mean and standard deviation of an image's bytes.
fn brightness(seen: Values<'_>) -> (f64, f64) {
    let count = seen.bytes.len().max(1) as f64;
    let mean = seen.bytes.iter().map(|byte| f64::from(*byte)).sum::<f64>() / count;
    let square = seen.bytes.iter().map(|byte| (f64::from(*byte) - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}
