//! Frames: what workers and their client send each other (docs/worker-protocol.md).
//!
//! ```text
//! bytes 0..4    "MKR1"
//! bytes 4..8    u32 little endian: length of the header, at most 1 MiB
//! bytes 8..16   u64 little endian: length of the body, at most 64 MiB
//! then          the header (a JSON object), the body (raw arrays, back to back)
//! ```
//!
//! Nothing is allocated for a body: its arrays are read where they belong, and those that nobody asked for
//! are passed over.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use elmur_base::Stop;

/// First bytes of every frame.
pub(super) const MAGIC: [u8; 4] = *b"MKR1";
/// Longest header in bytes.
pub(super) const MAX_HEADER: usize = 1 << 20;
/// Longest body in bytes.
pub(super) const MAX_BODY: u64 = 64 << 20;
/// Time between two looks at the clock and at whether a stop was requested, while nothing arrives.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes that are read ahead: a whole answer without pixels.
const AHEAD: usize = 4096;

/// Why a worker does not answer as it should.
#[derive(Debug)]
pub(super) enum Failure {
    /// The worker has ended, or closed its side.
    Ended,
    /// Nothing came for this long.
    Silent(Duration),
    /// A stop was requested meanwhile.
    Stopped,
    /// What came is not an answer of this protocol.
    Protocol(String),
    /// The worker answered that it cannot do what was asked.
    Refused {
        /// Kind of the error, as the protocol names it.
        kind: String,
        /// What the worker says.
        message: String,
    },
}

/// One side of the connection to a worker.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    stop: Stop,
    /// Bytes that were read ahead, and which of them are left.
    ahead: Box<[u8; AHEAD]>,
    left: std::ops::Range<usize>,
    /// The frame that is sent.
    frame: Vec<u8>,
}

impl Connection {
    /// A connection over a stream. Waiting ends when `stop` is requested.
    pub(super) fn new(stream: UnixStream, stop: Stop) -> io::Result<Self> {
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))?;
        Ok(Self { stream, stop, ahead: Box::new([0; AHEAD]), left: 0..0, frame: Vec::new() })
    }

    /// Sends a frame. `body` appends its bytes to the frame.
    pub(super) fn send(
        &mut self,
        header: &[u8],
        body: impl FnOnce(&mut Vec<u8>),
        patience: Duration,
    ) -> Result<(), Failure> {
        let mut frame = std::mem::take(&mut self.frame);
        frame.clear();
        frame.extend(MAGIC);
        frame.extend((header.len() as u32).to_le_bytes());
        frame.extend([0; 8]);
        frame.extend(header);
        let start = frame.len();
        body(&mut frame);
        let length = (frame.len() - start) as u64;
        frame[8..16].copy_from_slice(&length.to_le_bytes());
        let sent = if header.len() > MAX_HEADER || length > MAX_BODY {
            Err(Failure::Protocol(format!(
                "a request of {} + {length} bytes is beyond the limits of {MAX_HEADER} + {MAX_BODY}",
                header.len()
            )))
        } else {
            self.write_all(&frame, patience)
        };
        self.frame = frame;
        sent
    }

    fn write_all(&mut self, mut bytes: &[u8], patience: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(Failure::Ended),
                Ok(count) => bytes = &bytes[count..],
                Err(error) => self.wait_on(&error)?,
            }
            check_patience(start, patience)?;
        }
        Ok(())
    }

    /// Reads the start of a frame and its header into `header`; returns the length of the body.
    pub(super) fn receive(&mut self, header: &mut Vec<u8>, by: Deadline) -> Result<u64, Failure> {
        let mut prefix = [0; 16];
        self.read_exact(&mut prefix, by)?;
        let [m0, m1, m2, m3, h0, h1, h2, h3, body @ ..] = prefix;
        if [m0, m1, m2, m3] != MAGIC {
            let start = String::from_utf8_lossy(&prefix[..4]).into_owned();
            return Err(Failure::Protocol(format!("a frame starts with {start:?}, expected \"MKR1\"")));
        }
        let (length, body) = (u32::from_le_bytes([h0, h1, h2, h3]) as usize, u64::from_le_bytes(body));
        if length > MAX_HEADER || body > MAX_BODY {
            return Err(Failure::Protocol(format!(
                "a frame of {length} + {body} bytes is beyond the limits of {MAX_HEADER} + {MAX_BODY}"
            )));
        }
        header.clear();
        header.resize(length, 0);
        self.read_exact(header, by)?;
        Ok(body)
    }

    /// Fills `target` with the next bytes.
    pub(super) fn read_exact(&mut self, mut target: &mut [u8], by: Deadline) -> Result<(), Failure> {
        while !target.is_empty() {
            if !self.left.is_empty() {
                let count = self.left.len().min(target.len());
                let (now, later) = target.split_at_mut(count);
                now.copy_from_slice(&self.ahead[self.left.start..self.left.start + count]);
                (self.left.start, target) = (self.left.start + count, later);
                continue;
            }
            // Much is read where it belongs, little through the bytes that are read ahead.
            let read = if target.len() >= AHEAD {
                self.stream.read(target)
            } else {
                self.stream.read(&mut self.ahead[..])
            };
            match read {
                Ok(0) => return Err(Failure::Ended),
                Ok(count) if target.len() >= AHEAD => target = &mut target[count..],
                Ok(count) => self.left = 0..count,
                Err(error) => self.wait_on(&error)?,
            }
            by.check()?;
        }
        Ok(())
    }

    /// Passes over bytes.
    pub(super) fn skip(&mut self, mut count: u64, by: Deadline) -> Result<(), Failure> {
        let mut scrap = [0; AHEAD];
        while count > 0 {
            let now = count.min(AHEAD as u64);
            self.read_exact(&mut scrap[..now as usize], by)?;
            count -= now;
        }
        Ok(())
    }

    /// Goes on after an error that only means that nothing has arrived yet.
    fn wait_on(&self, error: &io::Error) -> Result<(), Failure> {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut if self.stop.requested() => Err(Failure::Stopped),
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
            _ => Err(Failure::Ended),
        }
    }

    /// Tells the worker that no request follows.
    pub(super) fn close(&self) {
        // A worker that is gone has closed it already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// The moment by which a whole answer must have come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    start: Instant,
    patience: Duration,
}

impl Deadline {
    pub(super) fn after(patience: Duration) -> Self {
        Self { start: Instant::now(), patience }
    }

    fn check(self) -> Result<(), Failure> {
        check_patience(self.start, self.patience)
    }
}

fn check_patience(start: Instant, patience: Duration) -> Result<(), Failure> {
    if start.elapsed() < patience { Ok(()) } else { Err(Failure::Silent(patience)) }
}
