//! The folder of a run.
//!
//! ```text
//! config.json              everything that decided the run
//! data.json                what the dataset was: a resumed run must have the same
//! .lock                    held by the process that trains
//! metrics.jsonl            a row per batch and per evaluation
//! tensorboard/             the same as event files
//! checkpoints/00000100/    model.safetensors, config.json, state.safetensors, progress.json
//! checkpoints/last, best   links to two of them
//! ```
//!
//! A checkpoint is written into a folder of another name, made durable and renamed; only then `last` points
//! to it. A crash or a full disk leaves the checkpoints that were there.

use std::fs;
use std::path::{Path, PathBuf};

use elmur_base::files::{read_small, write_atomic};
use elmur_data::{Source, earlier_fingerprint};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::trainer::{STATE_FILE, Trainer};

/// The folder of a run.
#[derive(Debug, Clone)]
pub struct RunFolder(PathBuf);

/// Keeps other processes from training the same run; given back when dropped.
#[derive(Debug)]
pub struct RunLock(#[expect(dead_code, reason = "held, not read")] fs::File);

/// What a run was trained on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct DataNote {
    episodes: usize,
    fingerprint: Fingerprint,
}

/// A checksum of a run's data.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Fingerprint {
    /// Of earlier versions: [`earlier_fingerprint`].
    Earlier(u32),
    /// [`Source::fingerprint`] in hexadecimal digits.
    Now(String),
}

impl DataNote {
    /// The note of data, in the form of `like` or in today's.
    fn of(source: &dyn Source, like: Option<&DataNote>) -> Result<Self> {
        let fingerprint = match like.map(|note| &note.fingerprint) {
            Some(Fingerprint::Earlier(_)) => Fingerprint::Earlier(earlier_fingerprint(source)?),
            _ => Fingerprint::Now(format!("{:016x}", source.fingerprint())),
        };
        Ok(Self { episodes: source.episodes(), fingerprint })
    }
}

impl std::fmt::Display for DataNote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.fingerprint {
            Fingerprint::Earlier(checksum) => {
                write!(f, "{} episodes with checksum {checksum:08x}", self.episodes)
            }
            Fingerprint::Now(checksum) => write!(f, "{} episodes with checksum {checksum}", self.episodes),
        }
    }
}

/// What a resumed run must know to choose checkpoints and to stop as the whole run would; saved with each
/// checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Progress {
    /// Best score so far (more is better), and its batch.
    pub best: Option<(f64, u64)>,
    /// What that score is of: measure and settings of validation. Scores of something else do not compare.
    #[serde(default)]
    pub judged_by: Option<String>,
    /// Number of evaluations running that reached the target.
    pub reached: u32,
    /// Sum and number of losses since the last checkpoint.
    pub losses: (f64, u64),
    /// Whether the run was stopped before this batch's evaluation was done.
    pub evaluation_due: bool,
}

/// [`Progress`] as its file has it: with a checksum, which earlier versions did not write.
#[derive(Serialize, Deserialize)]
struct ProgressFile {
    progress: Progress,
    checksum: u32,
}

impl Progress {
    /// Takes note of a score by this measure and settings. Among equals the latest is the best, since it has
    /// learnt most.
    pub fn improves(&mut self, score: f64, batch: u64, judged_by: String) -> bool {
        if self.judged_by.as_ref().is_some_and(|before| *before != judged_by) {
            self.best = None;
        }
        self.judged_by = Some(judged_by);
        let best = self.best.is_none_or(|(best, _)| score >= best);
        if best {
            self.best = Some((score, batch));
        }
        best
    }

    fn checksum(&self) -> u32 {
        crc32fast::hash(&serde_json::to_vec(self).unwrap_or_default())
    }

    fn read(path: &Path) -> Result<Self> {
        let text = read_small(path, MAX_SMALL)?;
        let damaged =
            || Error::file(path, "damaged: not the progress of a run, or its checksum does not fit");
        match serde_json::from_str::<ProgressFile>(&text) {
            Ok(file) if file.progress.checksum() == file.checksum => Ok(file.progress),
            Ok(_) => Err(damaged()),
            Err(_) => serde_json::from_str(&text).map_err(|_| damaged()),
        }
    }
}

impl RunFolder {
    /// Makes the folder of a new run. A folder that already holds one is refused.
    pub fn create(path: &Path, config: &RunConfig) -> Result<Self> {
        Self::create_locked(path, config).map(|(folder, _)| folder)
    }

    /// [`RunFolder::create`] that takes the run for this process ([`RunFolder::lock`]) before anything of it can
    /// be seen. The lock must be dropped before the run is trained, which takes it again.
    pub fn create_locked(path: &Path, config: &RunConfig) -> Result<(Self, RunLock)> {
        let folder = Self(path.to_owned());
        folder.refuse_taken()?;
        fs::create_dir_all(folder.checkpoints())
            .map_err(|e| Error::file(path, format!("{e}; choose another --out")))?;
        let lock = folder.lock()?;
        // Another process may have been faster.
        folder.refuse_taken()?;
        folder.save_config(config)?;
        Ok((folder, lock))
    }

    /// Refuses a folder in which no run can be made.
    fn refuse_taken(&self) -> Result<()> {
        let (folder, path) = (self, self.path());
        if folder.config_path().exists() || folder.metrics().exists() {
            return Err(Error::file(
                path,
                "holds a run already; resume it with --resume, replace it with --force, or choose another --out",
            ));
        }
        if fs::read_dir(folder.checkpoints()).is_ok_and(|mut all| all.next().is_some()) {
            return Err(Error::file(
                path,
                "has a folder `checkpoints` with something in it; choose another --out",
            ));
        }
        Ok(())
    }

    /// Removes the run in a folder, so that another can be made there. What does not belong to a run stays. A
    /// run that another process trains is refused, and so is a folder that holds files but no run.
    pub fn remove(path: &Path) -> Result<()> {
        let folder = Self(path.to_owned());
        if !path.exists() {
            return Ok(());
        }
        let foreign = Error::file(path, "holds something that is not a run; choose another --out");
        if folder.config_path().is_file() {
            // Configs of checkpoints and of other programs have the same name.
            folder.config().map_err(|_| foreign)?;
        } else if fs::read_dir(folder.checkpoints()).is_ok_and(|all| !all.filter_map(|e| e.ok()).all(is_ours))
        {
            return Err(foreign);
        }
        if !folder.checkpoints().is_dir() && !folder.config_path().is_file() {
            // A process that died after removing a run leaves the lock's file.
            let mut entries = fs::read_dir(path).map_err(|e| Error::io(path, e))?.filter_map(|e| e.ok());
            let empty = entries.all(|entry| entry.file_name() == ".lock");
            return if empty { Ok(()) } else { Err(Error::file(path, "not a run; choose another --out")) };
        }
        let _lock = folder.lock()?;
        // The config goes last: until then the folder is known as a run.
        let parts =
            [folder.checkpoints(), folder.0.join("tensorboard"), folder.metrics(), folder.data_path()];
        for part in parts.into_iter().chain([folder.config_path()]) {
            let gone = if part.is_dir() { fs::remove_dir_all(&part) } else { fs::remove_file(&part) };
            match gone {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&part, e)),
                _ => {}
            }
        }
        folder.sweep_temporary(&folder.0)
    }

    /// The run in this folder.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = Self(path.to_owned());
        folder.config()?;
        Ok(folder)
    }

    /// Whether a folder holds a run.
    pub fn is_run(path: &Path) -> bool {
        let folder = Self(path.to_owned());
        folder.config_path().is_file() && folder.checkpoints().is_dir()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn config_path(&self) -> PathBuf {
        self.0.join("config.json")
    }

    fn data_path(&self) -> PathBuf {
        self.0.join("data.json")
    }

    /// The folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// The best checkpoint, else the last.
    pub fn best(&self) -> PathBuf {
        let best = self.checkpoints().join("best");
        if best.exists() { best } else { self.checkpoints().join("last") }
    }

    /// The last checkpoint.
    pub fn last(&self) -> PathBuf {
        self.checkpoints().join("last")
    }

    /// The file of metrics, one JSON object per line.
    pub fn metrics(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    /// The settings of the run.
    pub fn config(&self) -> Result<RunConfig> {
        let path = self.config_path();
        if !path.exists() {
            return Err(Error::file(&path, "no such file; not the folder of a run"));
        }
        RunConfig::read(&path)
    }

    pub(crate) fn save_config(&self, config: &RunConfig) -> Result<()> {
        let text = serde_json::to_vec_pretty(config).map_err(|e| Error::file(&self.0, e))?;
        Ok(write_atomic(&self.config_path(), &text)?)
    }

    /// Takes the run for this process. A run that another process trains is refused.
    pub fn lock(&self) -> Result<RunLock> {
        let path = self.0.join(".lock");
        let open = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(|e| Error::io(&path, e))?;
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => {
                Err(Error::file(&self.0, "another process trains this run; wait until it ends, or stop it"))
            }
            // Where a file system has no locks, runs go without.
            Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(RunLock(file)),
        }
    }

    /// Writes the fingerprint of the data to `data.json`, or, on resume, refuses data with another
    /// fingerprint. A run without `data.json` accepts the data it is given.
    pub(crate) fn same_data(&self, data: &dyn Source, resume: bool) -> Result<()> {
        let path = self.data_path();
        if !resume || !path.exists() {
            let now = DataNote::of(data, None)?;
            let text = serde_json::to_vec_pretty(&now).map_err(|e| Error::file(&path, e))?;
            return Ok(write_atomic(&path, &text)?);
        }
        let then: DataNote = serde_json::from_str(&read_small(&path, MAX_SMALL)?).map_err(|e| {
            let problem = format!("damaged ({e}); if the run's data are the same as ever, remove this file");
            Error::file(&path, problem)
        })?;
        let now = DataNote::of(data, Some(&then))?;
        if then == now {
            return Ok(());
        }
        Err(Error::Mismatch {
            what: "data of the resumed run",
            expected: then.to_string(),
            got: now.to_string(),
            remedy: "give it the data it began with (--data PATH), or begin another run",
        })
    }

    /// Saves a checkpoint and points `last` to it.
    pub(crate) fn save(&self, trainer: &Trainer, progress: &Progress) -> Result<()> {
        let name = format!("{:08}", trainer.checkpoint_number());
        let (aside, target) =
            (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(&name));
        let _ = fs::remove_dir_all(&aside);
        let write = || -> Result<()> {
            trainer.save(&aside)?;
            let file = ProgressFile { progress: progress.clone(), checksum: progress.checksum() };
            let text = serde_json::to_vec(&file).map_err(|e| Error::file(&aside, e))?;
            write_atomic(&aside.join("progress.json"), &text)?;
            // A checkpoint of this batch is there when a run was stopped before its evaluation; it goes only
            // when the new one has its name, and `resume` gives it back if we die in between.
            let old = self.checkpoints().join(format!(".{name}.old"));
            if target.exists() {
                fs::rename(&target, &old).map_err(|e| Error::io(&target, e))?;
            }
            fs::rename(&aside, &target).map_err(|e| Error::io(&target, e))?;
            let _ = fs::remove_dir_all(&old);
            let _ = fs::File::open(self.checkpoints()).and_then(|folder| folder.sync_all());
            self.link("last", &name)
        };
        write().inspect_err(|_| {
            let _ = fs::remove_dir_all(&aside);
        })
    }

    /// Points a link to a checkpoint, in one step.
    #[cfg(unix)]
    pub(crate) fn link(&self, name: &str, target: &str) -> Result<()> {
        let (aside, link) = (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(name));
        let _ = fs::remove_file(&aside);
        let point = || {
            std::os::unix::fs::symlink(target, &aside)?;
            fs::rename(&aside, &link)
        };
        point().map_err(|e| Error::io(&link, e))
    }

    /// Without symbolic links: a copy.
    #[cfg(not(unix))]
    pub(crate) fn link(&self, name: &str, target: &str) -> Result<()> {
        let (aside, link) = (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(name));
        let point = || {
            let _ = fs::remove_dir_all(&aside);
            fs::create_dir_all(&aside)?;
            for file in fs::read_dir(self.checkpoints().join(target))? {
                let file = file?;
                fs::copy(file.path(), aside.join(file.file_name()))?;
            }
            let _ = fs::remove_dir_all(&link);
            fs::rename(&aside, &link)
        };
        point().map_err(|e| Error::io(&link, e))
    }

    /// Removes checkpoints that are neither the best nor among the two newest.
    pub(crate) fn prune(&self, progress: &Progress) -> Result<()> {
        let folder = self.checkpoints();
        let numbers = self.numbers()?;
        let best = progress.best.map(|(_, batch)| batch);
        let old = &numbers[..numbers.len().saturating_sub(2)];
        for number in old.iter().filter(|n| Some(**n) != best) {
            // Under a hidden name first: a process that dies here leaves nothing that looks like a checkpoint.
            let (path, aside) =
                (folder.join(format!("{number:08}")), folder.join(format!(".{number:08}.gone")));
            fs::rename(&path, &aside).map_err(|e| Error::io(&path, e))?;
            fs::remove_dir_all(&aside).map_err(|e| Error::io(&aside, e))?;
        }
        Ok(())
    }

    /// Numbers of the whole checkpoints, in order.
    fn numbers(&self) -> Result<Vec<u64>> {
        let folder = self.checkpoints();
        let entries = fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?;
        let number = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let number: u64 = name.parse().ok()?;
            (name == format!("{number:08}") && entry.path().join(STATE_FILE).is_file()).then_some(number)
        };
        let mut numbers: Vec<u64> = entries.filter_map(|e| e.ok().and_then(number)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Loads the newest whole checkpoint into the trainer and returns its progress, and a note for each
    /// damaged one that was passed over and set aside. Without a checkpoint the run starts from the
    /// beginning. Leftovers of processes that died are removed.
    pub(crate) fn resume(&self, trainer: &mut Trainer) -> Result<(Progress, Vec<String>)> {
        self.sweep()?;
        let folder = self.checkpoints();
        let mut notes = Vec::new();
        let mut problems = Vec::new();
        for number in self.numbers()?.into_iter().rev() {
            let name = format!("{number:08}");
            let path = folder.join(&name);
            let loaded = Progress::read(&path.join("progress.json"))
                .and_then(|progress| trainer.load(&path).map(|()| progress));
            match loaded {
                Ok(progress) => {
                    for (name, problem) in problems.drain(..) {
                        let aside = folder.join(format!("{name}.damaged"));
                        let _ = fs::remove_dir_all(&aside);
                        fs::rename(folder.join(&name), &aside).map_err(|e| Error::io(&aside, e))?;
                        let number = path.display();
                        notes.push(format!("{problem}; kept as {}, resuming from {number}", aside.display()));
                    }
                    self.go_on_from(&name, &progress, trainer.batches())?;
                    return Ok((progress, notes));
                }
                Err(error) if is_damage(&error) => problems.push((name, error.to_string())),
                // Another model, data that cannot be read, a device without memory: not this folder's fault.
                Err(error) => return Err(error),
            }
        }
        if let Some((_, problem)) = problems.first() {
            let problem = format!("no checkpoint of this run can be read ({problem}); begin another run");
            return Err(Error::file(&folder, problem));
        }
        self.forget_metrics_after(0, false)?;
        Ok((Progress::default(), notes))
    }

    /// Points links to the checkpoints that a run resumes with, removes those that are no longer needed, and drops
    /// metrics of batches after it.
    fn go_on_from(&self, name: &str, progress: &Progress, batches: u64) -> Result<()> {
        // A process that died before it could move `last` has left a whole checkpoint all the same.
        self.link("last", name)?;
        if let Some((_, batch)) = progress.best {
            let best = format!("{batch:08}");
            if self.checkpoints().join(&best).exists() {
                self.link("best", &best)?;
            }
        }
        // A process may have died between a checkpoint and this, even behind the last one.
        self.prune(progress)?;
        self.forget_metrics_after(batches, progress.evaluation_due)
    }

    /// Removes what processes that died have left: half-written and half-removed checkpoints and files.
    fn sweep(&self) -> Result<()> {
        let folder = self.checkpoints();
        for entry in fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?.filter_map(|e| e.ok()) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap_or_default());
            let hidden = |end: &str| name.strip_prefix('.').and_then(|name| name.strip_suffix(end));
            let number = name.len() == 8 && name.bytes().all(|b| b.is_ascii_digit());
            if let Some(target) = hidden(".old").map(|name| folder.join(name)) {
                // It was to be replaced: the new one is there, or this one is still the newest.
                let done =
                    if target.exists() { fs::remove_dir_all(&path) } else { fs::rename(&path, &target) };
                done.map_err(|e| Error::io(&path, e))?;
            } else if hidden(".gone").is_some() || (hidden(".tmp").is_some() && path.is_dir()) {
                fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
            } else if number && path.is_dir() && !path.join(STATE_FILE).is_file() && is_part(&path) {
                fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
            }
        }
        self.sweep_temporary(&folder)?;
        self.sweep_temporary(&self.0)
    }

    /// Removes files that were being written aside.
    fn sweep_temporary(&self, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))?.filter_map(|e| e.ok()) {
            let name = entry.file_name().into_string().unwrap_or_default();
            let temporary = name.starts_with('.') && name.ends_with(".tmp");
            if temporary && fs::symlink_metadata(entry.path()).is_ok_and(|about| !about.is_dir()) {
                fs::remove_file(entry.path()).map_err(|e| Error::io(&entry.path(), e))?;
            }
        }
        Ok(())
    }

    /// Drops rows of batches that will be done again, and with `evaluation_due` those of the evaluation after
    /// `batch`.
    fn forget_metrics_after(&self, batch: u64, evaluation_due: bool) -> Result<()> {
        let path = self.metrics();
        let Ok(bytes) = fs::read(&path) else { return Ok(()) };
        let text = String::from_utf8_lossy(&bytes);
        let keep = |line: &&str| {
            let row = serde_json::from_str::<Value>(line);
            row.is_ok_and(|row| {
                let again = evaluation_due && row["score"].is_number();
                row["batch"].as_u64().is_some_and(|b| b < batch || (b == batch && !again))
            })
        };
        let kept: String = text.lines().filter(keep).flat_map(|line| [line, "\n"]).collect();
        Ok(write_atomic(&path, kept.as_bytes())?)
    }
}

/// Largest size of a run's small files, in bytes.
pub(crate) const MAX_SMALL: u64 = 1 << 20;

/// Whether an entry of `checkpoints` is one that runs make.
fn is_ours(entry: fs::DirEntry) -> bool {
    let name = entry.file_name().into_string().unwrap_or_default();
    let number = name.trim_start_matches('.').split('.').next().unwrap_or_default();
    let numbered = number.len() >= 8 && number.bytes().all(|b| b.is_ascii_digit());
    numbered || ["last", "best", ".last.tmp", ".best.tmp"].contains(&name.as_str())
}

/// Whether loading a checkpoint failed because of what its files hold.
fn is_damage(error: &Error) -> bool {
    use elmur_base::Error::{File, Io};
    match error {
        Error::Base(File { .. }) | Error::Model(elmur_model::Error::Base(File { .. })) => true,
        Error::Base(Io { cause, .. }) | Error::Model(elmur_model::Error::Base(Io { cause, .. })) => {
            // Text that is not text, and files that are gone.
            matches!(cause.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::NotFound)
        }
        Error::Model(elmur_model::Error::Config { .. } | elmur_model::Error::Input { .. }) => true,
        _ => false,
    }
}

/// Whether a folder holds nothing but files of a checkpoint.
fn is_part(path: &Path) -> bool {
    let known = ["model.safetensors", "config.json", "progress.json"];
    fs::read_dir(path).is_ok_and(|mut files| {
        files.all(|file| file.is_ok_and(|file| known.iter().any(|name| file.file_name() == *name)))
    })
}
