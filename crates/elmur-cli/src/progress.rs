//! Progress of long work: a bar that redraws itself on a terminal, a plain line now and then elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Whether `--quiet` was given.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Shows no progress from now on, if `quiet`.
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Whether no progress is shown.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Progress of one piece of work.
pub struct Bar {
    label: String,
    total: u64,
    /// How much was done when the bar began; rates count from there.
    first: u64,
    start: Instant,
    shown: Option<Instant>,
    /// Whether the end has been shown.
    ended: bool,
    terminal: bool,
}

const WIDTH: usize = 24;

impl Bar {
    /// A bar that begins when `done` of `total` are done.
    pub fn new(label: &str, done: u64, total: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self {
            label: label.to_owned(),
            total,
            first: done,
            start: Instant::now(),
            shown: None,
            ended: false,
            terminal,
        }
    }

    /// Shows where we are, if it is time to.
    pub fn update(&mut self, done: u64, unit: &str, note: &str) {
        let pause = if self.terminal { Duration::from_millis(100) } else { Duration::from_secs(10) };
        let due =
            self.shown.map_or(!self.terminal || self.start.elapsed() > pause, |at| at.elapsed() > pause);
        let ends = done >= self.total && !self.ended;
        if is_quiet() || (!due && !ends) {
            return;
        }
        self.ended |= ends;
        self.shown = Some(Instant::now());
        let line = self.line(done, unit, note, self.start.elapsed());
        if self.terminal {
            // Erase to the end of the line: the last one may have been longer.
            self.write(&format!("\r{line}\x1b[K"));
        } else {
            self.write(&format!("{line}\n"));
        }
    }

    fn line(&self, done: u64, unit: &str, note: &str, elapsed: Duration) -> String {
        let part = if self.total == 0 { 1.0 } else { (done as f64 / self.total as f64).min(1.0) };
        let rate = (done - self.first.min(done)) as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = match self.total.saturating_sub(done) {
            0 => clock(0.0),
            // Before anything is done nobody knows.
            _ if rate == 0.0 => "-:--".to_owned(),
            left => clock(left as f64 / rate),
        };
        let full = (part * WIDTH as f64) as usize;
        let bar = format!("{}{}", "█".repeat(full), "░".repeat(WIDTH - full));
        let label = &self.label;
        format!("{label:<10} {bar} {:>3.0}%  {}/s  ETA {left}  {note}", 100.0 * part, amount(rate, unit))
    }

    /// Ends the bar's line.
    pub fn finish(&self) {
        if self.terminal && self.shown.is_some() {
            self.write("\r\x1b[K");
        }
    }

    fn write(&self, text: &str) {
        // Progress is a courtesy: where nobody listens, the work goes on.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

/// 12345.6 steps as "12k steps".
fn amount(rate: f64, unit: &str) -> String {
    if rate >= 1e6 {
        format!("{:.1}M {unit}", rate / 1e6)
    } else if rate >= 1e4 {
        format!("{:.0}k {unit}", rate / 1e3)
    } else if rate >= 100.0 {
        format!("{rate:.0} {unit}")
    } else if rate >= 0.1 || rate == 0.0 {
        format!("{rate:.1} {unit}")
    } else {
        format!("{rate:.3} {unit}")
    }
}

/// Seconds as h:mm:ss or m:ss.
pub fn clock(seconds: f64) -> String {
    let s = seconds.round() as u64;
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{}:{:02}", s / 60, s % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_part_rate_and_time_left() {
        let bar = Bar::new("training", 100, 300);
        let line = bar.line(200, "batches", "loss 0.5", Duration::from_secs(50));
        assert!(line.contains(" 67%  2.0 batches/s  ETA 0:50  loss 0.5"), "{line}");
        let waiting = bar.line(100, "batches", "", Duration::from_secs(50));
        assert!(waiting.contains("0.0 batches/s  ETA -:--"), "{waiting}");
        let slow = bar.line(102, "episodes", "", Duration::from_secs(50));
        assert!(slow.contains("0.040 episodes/s"), "{slow}");
        let empty = Bar::new("x", 0, 0).line(0, "steps", "", Duration::from_secs(1));
        assert!(empty.contains("100%"), "{empty}");
        assert_eq!((clock(59.6), clock(3725.0)), ("1:00".to_owned(), "1:02:05".to_owned()));
        assert_eq!(amount(123_456.0, "steps"), "123k steps");
    }
}
