//! The client of one worker: hello, requests, answers.

use std::time::Duration;

use elmur_base::{Leaf, Space, Stop, Values, ValuesMut};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::frame::{Connection, Deadline, Failure};
use super::interface::{Dtype, Interface, Part, channels_first};

/// Version of the protocol.
pub(super) const PROTOCOL: u64 = 1;

/// What an answer says besides its arrays. Workers may say more.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    id: Option<u64>,
    ok: bool,
    error: Option<Refusal>,
    arrays: Vec<Part>,
    /// Reward of a step.
    pub(super) reward: Option<f64>,
    /// Whether the task has ended.
    pub(super) terminated: Option<bool>,
    /// Whether the episode was cut off.
    pub(super) truncated: Option<bool>,
    /// Whether the episode ends here.
    pub(super) done: Option<bool>,
    /// Whether the task is solved in this step, where the environment says so.
    pub(super) success: Option<bool>,
    /// Whether the next action has any effect.
    pub(super) uses_action: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    message: String,
}

/// Longest message of a worker that is passed on.
const MESSAGE: usize = 2000;

/// The client's side of a conversation.
#[derive(Debug)]
pub(super) struct Client {
    connection: Connection,
    /// Number of the newest request.
    sent: u64,
    /// Number of the newest request that was answered.
    answered: u64,
    /// Header of the newest answer.
    header: Vec<u8>,
    /// An image as it came.
    image: Vec<u8>,
}

impl Client {
    pub(super) fn new(stream: std::os::unix::net::UnixStream, stop: Stop) -> std::io::Result<Self> {
        let connection = Connection::new(stream, stop)?;
        Ok(Self { connection, sent: 0, answered: 0, header: Vec::new(), image: Vec::new() })
    }

    /// Waits for the worker's first words and checks its protocol; `name` is what it must call itself.
    pub(super) fn hello(&mut self, name: &str, patience: Duration) -> Result<(), Failure> {
        let by = Deadline::after(patience);
        let body = self.connection.receive(&mut self.header, by)?;
        let hello: Map<String, Value> = self.parse()?;
        let told = hello.get("hello").and_then(Value::as_str);
        let version = hello.get("protocol").and_then(Value::as_u64);
        if told != Some(name) || version != Some(PROTOCOL) || body != 0 {
            let show = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
            return Err(Failure::Protocol(format!(
                "expected the hello of {name:?} with protocol {PROTOCOL}, got {:?} with protocol {}",
                shortened(&show(told.map(str::to_owned))),
                show(version.map(|version| version.to_string()))
            )));
        }
        Ok(())
    }

    /// Sends a request: a command with `fields`, JSON members without braces, and arrays.
    pub(super) fn send(
        &mut self,
        command: &str,
        fields: &str,
        body: impl FnOnce(&mut Vec<u8>),
        patience: Duration,
    ) -> Result<(), Failure> {
        self.sent += 1;
        let comma = if fields.is_empty() { "" } else { "," };
        let header = format!("{{\"id\":{},\"cmd\":\"{command}\"{comma}{fields}}}", self.sent);
        self.connection.send(header.as_bytes(), body, patience)
    }

    /// Number of requests that were not answered yet.
    pub(super) fn waiting(&self) -> u64 {
        self.sent - self.answered
    }

    /// The answer to the oldest request that was not answered yet, without arrays, as it came.
    pub(super) fn receive_fields(&mut self, patience: Duration) -> Result<Map<String, Value>, Failure> {
        self.receive(patience, &[], &mut ValuesMut::default())?;
        self.parse()
    }

    /// The answer to the oldest request that was not answered yet. Its arrays must begin with `parts` in this
    /// order, which are written to `target`; others may stand between them.
    pub(super) fn receive(
        &mut self,
        patience: Duration,
        parts: &[Part],
        target: &mut ValuesMut<'_>,
    ) -> Result<Answer, Failure> {
        let by = Deadline::after(patience);
        let mut left = self.connection.receive(&mut self.header, by)?;
        let answer: Answer = self.parse()?;
        if !answer.ok {
            let Some(Refusal { kind, message }) = answer.error else {
                return Err(Failure::Protocol("an answer is neither ok nor an error".to_owned()));
            };
            if left > 0 || answer.id != Some(self.answered + 1) {
                return Err(Failure::Protocol(format!("{}: {}", shortened(&kind), shortened(&message))));
            }
            self.answered += 1;
            return Err(Failure::Refused { kind: shortened(&kind), message: shortened(&message) });
        }
        if answer.id != Some(self.answered + 1) {
            let (got, expected) = (answer.id, self.answered + 1);
            return Err(Failure::Protocol(format!("an answer has the id {got:?}, expected {expected}")));
        }
        let mut missing = parts.iter().peekable();
        let (mut floats, mut ints, mut bytes) = (0, 0, 0);
        for array in &answer.arrays {
            let length = array.bytes().filter(|length| *length <= left).ok_or_else(|| {
                Failure::Protocol(format!("array {} is longer than its frame", array.describe()))
            })?;
            left -= length;
            let Some(part) = missing.next_if(|part| part.name == array.name) else {
                self.connection.skip(length, by)?;
                continue;
            };
            if (array.dtype, &array.shape) != (part.dtype, &part.shape) {
                let (expected, got) = (part.describe(), array.describe());
                return Err(Failure::Protocol(format!("expected array {expected}, got {got}")));
            }
            let count = array.shape.iter().product();
            match part.dtype {
                Dtype::F32 => self.floats(next(target.floats, &mut floats, count)?, part, by)?,
                Dtype::I64 => self.ints(next(target.ints, &mut ints, count)?, part, by)?,
                Dtype::U8 => self.bytes(next(target.bytes, &mut bytes, count)?, part, by)?,
            }
        }
        if let Some(part) = missing.next() {
            return Err(Failure::Protocol(format!("an answer lacks the array {}", part.describe())));
        }
        if left > 0 {
            return Err(Failure::Protocol(format!("{left} bytes of an answer belong to no array")));
        }
        self.answered += 1;
        Ok(answer)
    }

    fn floats(&mut self, target: &mut [f32], part: &Part, by: Deadline) -> Result<(), Failure> {
        self.connection.read_exact(bytemuck::cast_slice_mut(target), by)?;
        if cfg!(target_endian = "big") {
            target.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits().swap_bytes()));
        }
        match target.iter().find(|x| !x.is_finite()) {
            None => Ok(()),
            Some(x) => {
                Err(Failure::Protocol(format!("array {}: expected finite numbers, got {x}", part.describe())))
            }
        }
    }

    fn ints(&mut self, target: &mut [i32], part: &Part, by: Deadline) -> Result<(), Failure> {
        for number in target {
            let mut bytes = [0; 8];
            self.connection.read_exact(&mut bytes, by)?;
            let wide = i64::from_le_bytes(bytes);
            *number = i32::try_from(wide).map_err(|_| {
                Failure::Protocol(format!("array {}: {wide} is beyond 32 bits", part.describe()))
            })?;
        }
        Ok(())
    }

    fn bytes(&mut self, target: &mut [u8], part: &Part, by: Deadline) -> Result<(), Failure> {
        if !part.channels_last {
            return self.connection.read_exact(target, by);
        }
        self.image.resize(target.len(), 0);
        self.connection.read_exact(&mut self.image, by)?;
        channels_first(&self.image, part.shape.last().copied().unwrap_or(1), target);
        Ok(())
    }

    fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Failure> {
        let problem =
            |cause: String| Failure::Protocol(format!("a header is not what it should be: {cause}"));
        if self.header.first() != Some(&b'{') {
            return Err(problem("expected a JSON object".to_owned()));
        }
        serde_json::from_slice(&self.header).map_err(|error| problem(error.to_string()))
    }

    /// Asks the worker to end, without waiting.
    pub(super) fn quit(&mut self) {
        // A worker that cannot be asked any more is killed later.
        let _ = self.send("quit", "", |_| {}, Duration::ZERO);
        self.connection.close();
    }
}

fn next<'a, T>(target: &'a mut [T], at: &mut usize, count: usize) -> Result<&'a mut [T], Failure> {
    let start = *at;
    *at += count;
    let problem = || Failure::Protocol("an answer has more numbers than its space".to_owned());
    target.get_mut(start..*at).ok_or_else(problem)
}

fn shortened(text: &str) -> String {
    text.chars().take(MESSAGE).collect()
}

/// Appends the numbers of an action to a body, array by array.
pub(super) fn append_action(interface: &Interface, action: Values<'_>, body: &mut Vec<u8>) {
    let (mut floats, mut ints, mut bytes) = (action.floats.iter(), action.ints.iter(), action.bytes.iter());
    for part in &interface.action {
        let count: usize = part.shape.iter().product();
        match part.dtype {
            Dtype::F32 => floats.by_ref().take(count).for_each(|x| body.extend(x.to_le_bytes())),
            Dtype::I64 => ints.by_ref().take(count).for_each(|i| body.extend(i64::from(*i).to_le_bytes())),
            Dtype::U8 => body.extend(bytes.by_ref().take(count)),
        }
    }
}

/// The member `arrays` of a request that carries an action.
pub(super) fn action_arrays(interface: &Interface) -> String {
    let array = |part: &Part| {
        serde_json::json!({"name": part.name, "dtype": part.dtype.name(), "shape": part.shape}).to_string()
    };
    let arrays: Vec<String> = interface.action.iter().map(array).collect();
    format!("\"arrays\":[{}]", arrays.join(","))
}

/// The first integer that is not one of its space, and how many choices there are.
pub(super) fn out_of_range(space: &Space, ints: &[i32]) -> Option<(i32, usize)> {
    let mut ints = ints.iter();
    for leaf in space.leaves() {
        let Leaf::Ints(sizes) = leaf else { continue };
        for (size, value) in sizes.iter().zip(&mut ints) {
            if !usize::try_from(*value).is_ok_and(|value| value < *size) {
                return Some((*value, *size));
            }
        }
    }
    None
}
