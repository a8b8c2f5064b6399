//! Work that takes long: on a thread of its own, while the thread that called hears signals and calls back.
//!
//! Python is asked for at most ten times a second, or as often as there is news, and never by the thread that works.

use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use elmur::base::Stop;
use elmur::train::{Error, Result};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use serde_json::Value;

use crate::fail;

/// Time between two looks at signals.
const LOOK: Duration = Duration::from_millis(100);

/// News that may wait for Python; more make the work wait.
const WAITING: usize = 4096;

/// Signal that a callback stops with when it returns False: that of a polite request to end.
const TERMINATE: usize = 15;

/// Where the work tells what it does.
#[derive(Clone)]
pub struct News(SyncSender<(&'static str, Value)>);

impl News {
    /// Tells something that must arrive.
    pub fn tell(&self, what: &'static str, news: Value) {
        // Where nobody listens any more the work is asked to stop.
        let _ = self.0.send((what, news));
    }

    /// Tells something that may be left out where there is too much of it.
    pub fn mention(&self, what: &'static str, news: Value) {
        let _ = self.0.try_send((what, news));
    }
}

/// Does some work, and calls `notify(what, news as JSON)` with what it tells. The work is asked to stop when `notify`
/// returns False or raises, and by signals; what was raised is raised when the work has ended.
pub fn watch<T: Send>(
    py: Python<'_>,
    notify: &Bound<'_, PyAny>,
    work: impl FnOnce(&Stop, &News) -> Result<T> + Send,
) -> PyResult<T> {
    let stop = Stop::default();
    let done = attend(py, &stop, |news| work(&stop, &news), |(what, news)| tell(notify, what, &news))?;
    match done {
        Ok(done) => Ok(done),
        Err(Error::Stopped) => Err(PyKeyboardInterrupt::new_err("stopped")),
        Err(error) => Err(fail(error)),
    }
}

/// Does some work that may wait for other processes. Signals request `stop`, and what they raise is raised when the work
/// has ended.
pub fn interruptible<T: Send>(py: Python<'_>, stop: &Stop, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    // The news is dropped when the work has ended.
    let work = |_news| work();
    attend(py, stop, work, |_| Ok(true))
}

/// Does some work on a thread of its own, and calls `hear` with its news. `stop` is requested when `hear` says false or
/// raises, and by signals.
fn attend<T: Send>(
    py: Python<'_>,
    stop: &Stop,
    work: impl FnOnce(News) -> T + Send,
    mut hear: impl FnMut((&'static str, Value)) -> PyResult<bool>,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::sync_channel(WAITING);
    let receiver = Mutex::new(receiver);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("elmur".to_owned())
            .spawn_scoped(scope, move || work(News(sender)))
            .map_err(|cause| PyRuntimeError::new_err(format!("no thread for the work: {cause}")))?;
        let mut raised = None;
        loop {
            let next =
                py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
            let answered = match next {
                Ok(news) if raised.is_none() => hear(news),
                Ok(_) | Err(RecvTimeoutError::Timeout) => Ok(true),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match answered.and_then(|go_on| py.check_signals().map(|()| go_on)) {
                Ok(true) => {}
                Ok(false) => stop.request(TERMINATE),
                Err(error) => {
                    stop.request(if error.is_instance_of::<PyKeyboardInterrupt>(py) { 2 } else { TERMINATE });
                    raised.get_or_insert(error);
                }
            }
        }
        match (raised, py.detach(|| thread.join())) {
            (Some(error), _) => Err(error),
            (None, Ok(done)) => Ok(done),
            (None, Err(_)) => Err(PyRuntimeError::new_err(
                "the work ended by a panic, which is a bug of elmur; please report it",
            )),
        }
    })
}

/// Calls back; false if the callback wants the work to stop.
fn tell(notify: &Bound<'_, PyAny>, what: &str, news: &Value) -> PyResult<bool> {
    let answer = notify.call1((what, news.to_string()))?;
    Ok(answer.is_none() || answer.is_truthy()?)
}
