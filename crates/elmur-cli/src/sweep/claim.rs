//! Claims: which worker has which run.
//!
//! A claim is a file on which its worker holds a lock of the operating system. The lock goes with the last
//! process that has the file open, however it ends, so a dead worker's run is free at once. Workers hand the
//! open file down to the processes they start: the claim outlives a killed worker until the training that it
//! began has stopped too.
//!
//! Some shared file systems keep locks within one machine. For them the file also says which machine holds it,
//! and is written again every [`BEAT`]: a worker of another machine leaves the run alone until the file has been
//! silent for [`SILENCE`], even if the lock is granted.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use elmur_train::{Error, Result};
use serde_json::{Value, json};

/// Time between two signs of life.
const BEAT: Duration = Duration::from_secs(10);
/// A claim of another machine without sign of life for this long is void.
pub const SILENCE: Duration = Duration::from_secs(120);
/// Time after which two machines that have claimed a run at the same moment see who was last.
const SETTLE: Duration = Duration::from_secs(2);

/// Who may claim runs: a process on a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// Identity of the machine: locks are good between workers that share it.
    pub machine: String,
    /// Name of the machine, for people.
    pub host: String,
    /// Number of the process.
    pub process: u32,
}

impl Worker {
    /// This process.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let host = read("/proc/sys/kernel/hostname")
            .or_else(|| read("/etc/hostname"))
            .or_else(|| std::env::var("HOSTNAME").ok())
            .unwrap_or_else(|| "unknown".to_owned());
        // Containers of one machine share its kernel and locks, but not its name.
        let machine = read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|| host.clone());
        Self { machine, host, process: std::process::id() }
    }

    fn text(&self) -> String {
        json!({"machine": self.machine, "host": self.host, "process": self.process}).to_string()
    }

    /// The worker that a claim names; none for a claim that was given back.
    fn named_by(text: &str) -> Option<Self> {
        let claim: Value = serde_json::from_str(text).ok()?;
        let word = |key: &str| Some(claim[key].as_str()?.to_owned());
        let process = claim["process"].as_u64().and_then(|n| u32::try_from(n).ok())?;
        Some(Self { machine: word("machine")?, host: word("host")?, process })
    }
}

/// What a claim that was given back begins with; the machine that gave it back follows.
const FREE: &str = "free ";

/// A run that this process has; given back when dropped.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    file: File,
    worker: Worker,
    beaten: Mutex<Instant>,
    /// Whether the run is this worker's: else the file is another's, and is left alone.
    obtained: bool,
}

impl Claim {
    /// Claims the run of this file; none if another worker has it.
    pub fn take(path: &Path, worker: &Worker) -> Result<Option<Self>> {
        Self::take_after(path, worker, SILENCE, SETTLE)
    }

    fn take_after(path: &Path, worker: &Worker, silence: Duration, settle: Duration) -> Result<Option<Self>> {
        let io = |e| Error::io(path, e);
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        // Of all machines, one makes the file.
        let (file, new) = match options.clone().create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                (options.open(path).map_err(io)?, false)
            }
            Err(e) => return Err(io(e)),
        };
        // Others may look at a new file for a moment before they leave it to the one that made it.
        let mut looks = if new { 100 } else { 1 };
        while let Err(fs::TryLockError::WouldBlock) = file.try_lock() {
            looks -= 1;
            if looks == 0 {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Where a file system has no locks, signs of life must do.
        let mut claim = Self::open(path, file, worker);
        let before = claim.read()?;
        let freed = before.strip_prefix(FREE);
        // Another machine's worker, or one that has made the file and not yet written to it.
        let elsewhere = match Worker::named_by(&before) {
            Some(holder) => holder.machine != worker.machine,
            None => !new && freed.is_none(),
        };
        if elsewhere && claim.silent_for()? < silence {
            return Ok(None);
        }
        claim.write(&worker.text())?;
        if elsewhere || freed.is_some_and(|machine| machine != worker.machine) {
            std::thread::sleep(settle);
            if Worker::named_by(&claim.read()?).as_ref() != Some(worker) {
                return Ok(None);
            }
        }
        claim.obtained = true;
        Ok(Some(claim))
    }

    /// A claim that is not obtained yet.
    fn open(path: &Path, file: File, worker: &Worker) -> Self {
        let beaten = Mutex::new(Instant::now());
        Self { path: path.to_owned(), file, worker: worker.clone(), beaten, obtained: false }
    }

    /// The open file, for a process that works on the run: the claim lasts until that process has ended too.
    pub fn handed_down(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| Error::io(&self.path, e))
    }

    /// Gives a sign of life, if it is time to; an error if another worker has taken the run over.
    pub fn beat(&self) -> Result<()> {
        let mut beaten = self.beaten.lock().unwrap_or_else(PoisonError::into_inner);
        if beaten.elapsed() >= BEAT {
            self.still_ours()?;
            self.write(&self.worker.text())?;
            *beaten = Instant::now();
        }
        Ok(())
    }

    /// Where a file system has no locks, a machine that gave no sign of life for long, because it slept, may have
    /// lost its run.
    fn still_ours(&self) -> Result<()> {
        match Worker::named_by(&self.read()?) {
            Some(other) if other != self.worker => {
                let Worker { host, process, .. } = other;
                let problem =
                    format!("process {process} on {host} has taken this run over; it goes on there");
                Err(Error::file(&self.path, problem))
            }
            _ => Ok(()),
        }
    }

    fn read(&self) -> Result<String> {
        let mut text = String::new();
        (&self.file).rewind().map_err(|e| Error::io(&self.path, e))?;
        match (&self.file).take(4096).read_to_string(&mut text) {
            Err(e) if e.kind() != std::io::ErrorKind::InvalidData => Err(Error::io(&self.path, e)),
            _ => Ok(text),
        }
    }

    fn write(&self, text: &str) -> Result<()> {
        let mut file = &self.file;
        let write = |file: &mut &File| {
            file.rewind()?;
            file.write_all(text.as_bytes())?;
            file.set_len(text.len() as u64)?;
            file.sync_data()
        };
        write(&mut file).map_err(|e| Error::io(&self.path, e))
    }

    /// Time since the file was written, by the clock of its file system.
    fn silent_for(&self) -> Result<Duration> {
        let io = |e| Error::io(&self.path, e);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let clock = self.path.with_file_name(format!(".{name}.{}.clock", self.worker.process));
        let now = File::create(&clock).and_then(|file| file.metadata()?.modified());
        let _ = fs::remove_file(&clock);
        let then = self.file.metadata().and_then(|about| about.modified()).map_err(io)?;
        Ok(now.unwrap_or_else(|_| SystemTime::now()).duration_since(then).unwrap_or_default())
    }

    /// The worker that has the run of this file now; none if it is free.
    pub fn holder(path: &Path, worker: &Worker) -> Option<Worker> {
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let locked = matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock));
        let claim = Self::open(path, file, worker);
        let named = claim.read().ok().and_then(|text| Worker::named_by(&text));
        let alive = match &named {
            Some(named) if named.machine != worker.machine => {
                claim.silent_for().is_ok_and(|silent| silent < SILENCE)
            }
            _ => false,
        };
        match locked || alive {
            true => Some(named.unwrap_or(Worker {
                machine: String::new(),
                host: "unknown".to_owned(),
                process: 0,
            })),
            false => None,
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // One that cannot be written is void all the same when its lock is gone.
        if self.obtained && self.still_ours().is_ok() {
            let _ = self.write(&format!("{FREE}{}", self.worker.machine));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A claim's file in a folder of its own, gone when the test has passed.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("elmur-claim-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn file(&self) -> PathBuf {
            self.0.join("run.claim")
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn worker(machine: &str, process: u32) -> Worker {
        Worker { machine: machine.to_owned(), host: machine.to_owned(), process }
    }

    /// Ends a worker that has no time to give its claim back.
    fn kill(mut claim: Claim) {
        claim.obtained = false;
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_claim_is_one_workers_until_it_is_given_back() {
        let place = Place::new("one");
        let (a, b) = (worker("m", 1), worker("m", 2));
        assert_eq!(Claim::holder(&place.file(), &a), None);
        let claim = Claim::take(&place.file(), &a).unwrap().unwrap();
        assert!(Claim::take(&place.file(), &b).unwrap().is_none());
        assert_eq!(Claim::holder(&place.file(), &b), Some(a.clone()));
        claim.beat().unwrap();
        drop(claim);
        assert_eq!(Claim::holder(&place.file(), &b), None);
        assert!(Claim::take(&place.file(), &b).unwrap().is_some());
        assert_eq!(fs::read_dir(&place.0).unwrap().count(), 1);
    }

    #[test]
    fn a_claim_lasts_until_the_process_that_inherits_it_ends() {
        let place = Place::new("inherited");
        let (a, b) = (worker("m", 1), worker("m", 2));
        let claim = Claim::take(&place.file(), &a).unwrap().unwrap();
        let child = claim.handed_down().unwrap();
        // What a killed worker leaves: its name in the file, and the child's copy of the file.
        kill(claim);
        assert!(Claim::take(&place.file(), &b).unwrap().is_none());
        drop(child);
        assert!(Claim::take(&place.file(), &b).unwrap().is_some());
    }

    #[test]
    fn a_dead_workers_claim_is_free_at_once_on_its_machine_and_after_silence_elsewhere() {
        let place = Place::new("dead");
        kill(Claim::take(&place.file(), &worker("m", 1)).unwrap().unwrap());
        let other = worker("other", 7);
        assert!(Claim::take(&place.file(), &other).unwrap().is_none());
        assert_eq!(Claim::holder(&place.file(), &other), Some(worker("m", 1)));
        assert!(Claim::take_after(&place.file(), &other, NOW, NOW).unwrap().is_some());
        kill(Claim::take(&place.file(), &worker("m", 1)).unwrap().unwrap());
        assert!(Claim::take(&place.file(), &worker("m", 2)).unwrap().is_some());
    }

    #[test]
    fn a_file_that_another_machine_is_about_to_write_is_left_alone() {
        let place = Place::new("empty");
        fs::write(place.file(), "").unwrap();
        assert!(Claim::take(&place.file(), &worker("m", 1)).unwrap().is_none());
        assert!(Claim::take_after(&place.file(), &worker("m", 1), NOW, NOW).unwrap().is_some());
        for damaged in [&b"{"[..], b"\xff\xfe", b"{\"machine\": 3}"] {
            fs::write(place.file(), damaged).unwrap();
            assert!(Claim::take_after(&place.file(), &worker("m", 1), NOW, NOW).unwrap().is_some());
        }
    }

    #[test]
    fn a_claim_that_was_lost_is_neither_renewed_nor_given_back() {
        let place = Place::new("lost");
        let claim = Claim::take(&place.file(), &worker("m", 1)).unwrap().unwrap();
        let other = worker("other", 7);
        fs::write(place.file(), other.text()).unwrap();
        *claim.beaten.lock().unwrap() = Instant::now() - BEAT;
        let error = claim.beat().unwrap_err().to_string();
        assert!(error.contains("process 7 on other has taken this run over"), "{error}");
        drop(claim);
        assert_eq!(Worker::named_by(&fs::read_to_string(place.file()).unwrap()), Some(other));
    }
}
