//! The process of a worker: started with a socket as standard input and output, ended with its owner.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The program of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Program, by path or by its name in PATH.
    pub program: OsString,
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// Environment variables besides those that this process has.
    pub variables: Vec<(OsString, OsString)>,
    /// Let the worker write to this process's standard error, instead of keeping its last lines for errors.
    pub show_output: bool,
}

/// Bytes of a worker's standard error that are kept.
const TAIL: usize = 8192;
/// Characters of a worker's standard error that an error message quotes.
const QUOTED: usize = 700;
/// Time that a worker has for its end, before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    /// The newest bytes that it wrote to standard error.
    tail: Arc<Mutex<Vec<u8>>>,
}

impl Process {
    /// Starts a worker. The worker has a process group of its own, so that Ctrl-C in a terminal reaches only
    /// the client, which then ends its workers in order.
    pub(super) fn start(launch: &Launch) -> std::io::Result<(Self, UnixStream)> {
        let (own, other) = UnixStream::pair()?;
        let output = other.try_clone()?;
        let errors = if launch.show_output { Stdio::inherit() } else { Stdio::piped() };
        let mut child = Command::new(&launch.program)
            .args(&launch.arguments)
            .envs(launch.variables.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::from(OwnedFd::from(output)))
            .stderr(errors)
            .process_group(0)
            .spawn()?;
        let tail = Arc::new(Mutex::new(Vec::new()));
        if let Some(errors) = child.stderr.take() {
            let tail = Arc::clone(&tail);
            let keep = move || keep_tail(errors, &tail);
            // Without a thread nobody reads what the worker writes there: it sees a closed pipe.
            drop(std::thread::Builder::new().name("elmur-worker".to_owned()).spawn(keep));
        }
        Ok((Self { child, tail }, own))
    }

    /// Whether the worker has not ended yet.
    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the worker's end, as long as it has time for it, then kills it.
    pub(super) fn end(&mut self) {
        self.wait(GRACE);
        self.kill();
    }

    /// Kills the worker.
    pub(super) fn kill(&mut self) {
        // Fails where the worker has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What became of a worker that no longer answers, with the last lines that it wrote; it has ended then.
    pub(super) fn obituary(&mut self) -> String {
        let status = self.wait(Duration::from_millis(500));
        self.kill();
        let mut text = match status {
            Some(status) => describe(status),
            None => "it closed its side without ending and was killed".to_owned(),
        };
        // What it wrote last may still be on its way.
        std::thread::sleep(Duration::from_millis(20));
        let last = self.last_lines();
        if !last.is_empty() {
            text.push_str("; its last lines: ");
            text.push_str(&last);
        }
        text
    }

    /// The end of what the worker wrote to standard error.
    pub(super) fn last_lines(&self) -> String {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&tail);
        let text = text.trim();
        let start = text.char_indices().rev().nth(QUOTED - 1).map_or(0, |(i, _)| i);
        text[start..].to_owned()
    }

    fn wait(&mut self, time: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if start.elapsed() < time => std::thread::sleep(Duration::from_millis(2)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it exited with status {code}"),
        (None, Some(signal)) => format!("it was killed by signal {signal}"),
        _ => "it ended".to_owned(),
    }
}

/// Reads to the end, keeping the newest bytes.
fn keep_tail(mut errors: impl Read, tail: &Mutex<Vec<u8>>) {
    let mut bytes = [0; 1024];
    while let Ok(count @ 1..) = errors.read(&mut bytes) {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(&bytes[..count]);
        let old = tail.len().saturating_sub(TAIL);
        tail.drain(..old);
    }
}
