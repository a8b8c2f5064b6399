//! The numbers of a run, row by row: `metrics.jsonl` and TensorBoard event files.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::tensorboard::EventWriter;

/// Writes metrics as lines of JSON and as event files.
pub(crate) struct Metrics {
    path: PathBuf,
    file: fs::File,
    events: EventWriter,
}

impl Metrics {
    /// Opens the metrics of a run to append to them.
    pub fn open(folder: &RunFolder) -> Result<Self> {
        let path = folder.metrics();
        let open = fs::OpenOptions::new().create(true).append(true).open(&path);
        let file = open.map_err(|e| Error::io(&path, e))?;
        let tensorboard = folder.path().join("tensorboard");
        let events = EventWriter::create(&tensorboard, now()).map_err(|e| Error::io(&tensorboard, e))?;
        Ok(Self { path, file, events })
    }

    /// Writes a row, and its numbers as scalars of a group.
    pub fn row(&mut self, group: &str, batch: u64, row: &Value) -> Result<()> {
        let mut write = || -> std::io::Result<()> {
            writeln!(self.file, "{row}")?;
            for (name, value) in row.as_object().into_iter().flatten() {
                if let Some(value) = value.as_f64().filter(|_| name != "batch") {
                    self.events.scalar(&format!("{group}/{name}"), batch, value as f32, now())?;
                }
            }
            self.events.flush()
        };
        write().map_err(|e| Error::io(&self.path, e))
    }

    /// Refuses to go on if the file is no longer where it was opened: someone has removed or replaced the
    /// folder of the run, and what is written to it would be lost.
    #[cfg(unix)]
    pub fn check_present(&self) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let same = match (fs::metadata(&self.path), self.file.metadata()) {
            (Ok(there), Ok(open)) => (there.dev(), there.ino()) == (open.dev(), open.ino()),
            _ => false,
        };
        if same {
            return Ok(());
        }
        Err(Error::file(
            &self.path,
            "the run's folder was removed or replaced while it trained; start it again",
        ))
    }

    /// Refuses to go on if the file is gone.
    #[cfg(not(unix))]
    pub fn check_present(&self) -> Result<()> {
        if self.path.exists() {
            return Ok(());
        }
        Err(Error::file(&self.path, "the run's folder was removed while it trained; start it again"))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}
