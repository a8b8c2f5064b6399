//! The client against a recorded session of a robot simulator's worker, and against frames that are not what
//! they should be.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use elmur_base::{Row, Stop, ValuesMut, Widths};
use elmur_rng::Rng;
use serde_json::{Value, json};

use super::client::Client;
use super::frame::{Failure, MAX_BODY, MAX_HEADER};
use super::interface::{Dtype, Part, channels_first};

/// A session with the worker of RememberColor3 in MIKASA-Robo, frames back to back: a hello, then request and
/// answer in turn.
const TRANSCRIPT: &[u8] = include_bytes!("../../tests/worker/mikasa-transcript.bin");
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone)]
struct Frame {
    header: Value,
    body: Vec<u8>,
    bytes: Vec<u8>,
}

fn frames() -> Vec<Frame> {
    let (mut rest, mut frames) = (TRANSCRIPT, Vec::new());
    while !rest.is_empty() {
        let head = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
        let body = u64::from_le_bytes(rest[8..16].try_into().unwrap()) as usize;
        let (frame, later) = rest.split_at(16 + head + body);
        let header = serde_json::from_slice(&frame[16..16 + head]).unwrap();
        frames.push(Frame { header, body: frame[16 + head..].to_vec(), bytes: frame.to_vec() });
        rest = later;
    }
    frames
}

fn frame(header: &Value, body: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let lengths = [&(header.len() as u32).to_le_bytes()[..], &(body.len() as u64).to_le_bytes()].concat();
    [b"MKR1", &lengths[..], header.as_bytes(), body].concat()
}

fn part(name: &str, dtype: Dtype, shape: &[usize]) -> Part {
    Part { name: name.to_owned(), dtype, shape: shape.to_vec(), channels_last: false }
}

fn pair() -> (Client, UnixStream) {
    let (own, other) = UnixStream::pair().unwrap();
    (Client::new(own, Stop::default()).unwrap(), other)
}

/// What the client makes of these bytes, after which the worker ends: hello, then the answer to one request.
fn told(bytes: &[u8], parts: &[Part]) -> Result<Row, Failure> {
    let (mut client, mut other) = pair();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || {
        // A client that has heard enough hangs up.
        let _ = other.write_all(&bytes);
        let _ = other.shutdown(std::net::Shutdown::Write);
        let _ = other.read(&mut [0; 4096]);
    });
    let result = (|| {
        client.hello("mikasa-env", PATIENCE)?;
        client.send("reset", "", |_| {}, PATIENCE)?;
        let mut row = Row::zeros(Widths { floats: 60, ints: 4, bytes: 24 }, 1);
        client.receive(PATIENCE, parts, &mut row.as_mut())?;
        Ok(row)
    })();
    drop(client);
    writer.join().unwrap();
    result
}

fn problem(result: Result<Row, Failure>) -> String {
    match result {
        Err(Failure::Protocol(problem)) => problem,
        other => panic!("expected a breach of the protocol, got {other:?}"),
    }
}

#[test]
fn a_recorded_session_is_understood_to_its_end() {
    let frames = frames();
    assert_eq!(frames.len(), 145);
    let recorded = frames.clone();
    let (mut client, mut other) = pair();
    // The worker checks every request against the recorded one, and answers as recorded.
    let worker = std::thread::spawn(move || {
        other.write_all(&recorded[0].bytes).unwrap();
        for turn in recorded[1..].chunks(2) {
            let mut prefix = [0; 16];
            other.read_exact(&mut prefix).unwrap();
            assert_eq!(&prefix[..4], b"MKR1");
            let head = u32::from_le_bytes(prefix[4..8].try_into().unwrap()) as usize;
            let body = u64::from_le_bytes(prefix[8..].try_into().unwrap()) as usize;
            let mut rest = vec![0; head + body];
            other.read_exact(&mut rest).unwrap();
            assert_eq!(serde_json::from_slice::<Value>(&rest[..head]).unwrap(), turn[0].header);
            assert_eq!(rest[head..], turn[0].body);
            other.write_all(&turn[1].bytes).unwrap();
        }
    });
    client.hello("mikasa-env", PATIENCE).unwrap();
    let (state, action) = (
        [part("state", Dtype::F32, &[35]), part("joints", Dtype::F32, &[25])],
        part("action", Dtype::F32, &[8]),
    );
    let (mut refused, mut steps, mut rewards, mut solved, mut last) =
        (Vec::new(), 0, 0.0, false, Row::default());
    for turn in frames[1..].chunks(2) {
        let mut fields = turn[0].header.as_object().unwrap().clone();
        fields.remove("id");
        let command = fields.remove("cmd").unwrap();
        let fields = Value::Object(fields).to_string();
        let send = |bytes: &mut Vec<u8>| bytes.extend(&turn[0].body);
        client.send(command.as_str().unwrap(), &fields[1..fields.len() - 1], send, PATIENCE).unwrap();
        let parts: &[Part] = match command.as_str().unwrap() {
            "reset" | "step" => &state,
            "oracle" => std::slice::from_ref(&action),
            _ => &[],
        };
        last = Row::zeros(Widths { floats: 60, ..Widths::default() }, 1);
        match client.receive(PATIENCE, parts, &mut last.as_mut()) {
            Ok(answer) => {
                steps += usize::from(answer.reward.is_some());
                rewards += answer.reward.unwrap_or(0.0);
                solved |= answer.success == Some(true);
                assert_eq!(
                    answer.done == Some(true),
                    steps == 60 && answer.reward.is_some(),
                    "at step {steps}"
                );
            }
            Err(Failure::Refused { kind, .. }) => refused.push(kind),
            Err(other) => panic!("{other:?}"),
        }
    }
    worker.join().unwrap();
    assert_eq!(refused[..2], ["no_env", "unknown_task"]);
    assert!(
        refused.contains(&"bad_request".to_owned()) && refused.contains(&"episode_over".to_owned()),
        "{refused:?}"
    );
    assert_eq!(
        (steps, solved, client.waiting()),
        (61, true, 0),
        "an episode of 60 steps and one of the next"
    );
    assert!((rewards - 35.840_585_836).abs() < 1e-6, "{rewards}");
    assert_eq!(last.floats, [0.0; 60], "quit has no arrays");
}

#[test]
fn arrays_are_put_where_they_belong_and_others_passed_over() {
    let hello = frames()[0].bytes.clone();
    let arrays = json!([
        {"name": "note", "dtype": "f32", "shape": [1500]},
        {"name": "joints", "dtype": "f32", "shape": [2]},
        {"name": "camera", "dtype": "u8", "shape": [2, 2, 3]},
        {"name": "cue", "dtype": "i64", "shape": [1]},
        {"name": "after", "dtype": "u8", "shape": [2]},
    ]);
    let numbers: Vec<u8> = [f32::NAN.to_le_bytes(); 1500].concat();
    let joints = [0.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat();
    let camera: Vec<u8> = (0..12).collect();
    let body = [&numbers[..], &joints, &camera, &3i64.to_le_bytes(), &[9, 9]].concat();
    let parts = [
        part("joints", Dtype::F32, &[2]),
        Part { channels_last: true, ..part("camera", Dtype::U8, &[2, 2, 3]) },
        part("cue", Dtype::I64, &[1]),
    ];
    let bytes = [hello, frame(&json!({"id": 1, "ok": true, "arrays": arrays}), &body)].concat();
    let row = told(&bytes, &parts).unwrap();
    assert_eq!((&row.floats[..3], &row.ints[..2]), (&[0.5, -2.0, 0.0][..], &[3, 0][..]));
    assert_eq!(row.bytes[..12], [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11], "channels first");
}

#[test]
fn images_are_turned_to_channels_first() {
    let (height, width, channels) = (5, 4, 6);
    let image: Vec<u8> = (0..height * width * channels).map(|i| (i * 7 % 251) as u8).collect();
    let mut turned = vec![0; image.len()];
    channels_first(&image, channels, &mut turned);
    for (y, x, c) in [(0, 0, 0), (4, 3, 5), (2, 1, 3)] {
        assert_eq!(turned[(c * height + y) * width + x], image[(y * width + x) * channels + c]);
    }
    channels_first(&[], 0, &mut []);
}

#[test]
fn frames_that_break_the_protocol_are_refused_for_what_is_wrong() {
    let hello = frames()[0].bytes.clone();
    let ask = |bytes: &[u8]| told(&[&hello[..], bytes].concat(), &[part("joints", Dtype::F32, &[2])]);
    let answer = |header: Value, body: &[u8]| problem(ask(&frame(&header, body)));
    let other_version = frame(&json!({"hello": "mikasa-env", "protocol": 2}), &[]);
    assert!(problem(told(&other_version, &[])).contains("got \"mikasa-env\" with protocol 2"));
    let other_name = frame(&json!({"hello": "web-server", "protocol": 1}), &[]);
    assert!(problem(told(&other_name, &[])).contains("\"web-server\""));
    assert!(problem(ask(b"HTTP/1.1 400 Bad Request")).contains("starts with \"HTTP\""));
    let lengths = |head: u32, body: u64| [&b"MKR1"[..], &head.to_le_bytes(), &body.to_le_bytes()].concat();
    for huge in [lengths(MAX_HEADER as u32 + 1, 0), lengths(2, MAX_BODY + 1), lengths(u32::MAX, u64::MAX)] {
        assert!(problem(ask(&huge)).contains("beyond the limits"));
    }
    assert!(problem(ask(&[&lengths(3, 0)[..], b"[1]"].concat())).contains("not what it should be"));
    assert!(answer(json!({"id": 1}), &[]).contains("neither ok nor an error"));
    assert!(answer(json!({"id": 7, "ok": true}), &[]).contains("expected 1"));
    let joints = |shape: Value, dtype: &str| json!({"id": 1, "ok": true, "arrays": [{"name": "joints", "dtype": dtype, "shape": shape}]});
    assert!(answer(json!({"id": 1, "ok": true}), &[]).contains("lacks the array \"joints\" f32 [2]"));
    assert!(answer(joints(json!([3]), "f32"), &[0; 12]).contains("got \"joints\" f32 [3]"));
    assert!(answer(joints(json!([1]), "i64"), &[0; 8]).contains("got \"joints\" i64 [1]"));
    assert!(answer(joints(json!([-1]), "f32"), &[]).contains("not what it should be"));
    assert!(answer(joints(json!([2]), "f64"), &[0; 16]).contains("not what it should be"));
    let enormous = joints(json!([1u64 << 40, 1u64 << 40]), "f32");
    assert!(answer(enormous, &[0; 8]).contains("longer than its frame"));
    assert!(answer(joints(json!([2]), "f32"), &[0; 4]).contains("longer than its frame"));
    assert!(answer(joints(json!([2]), "f32"), &[0; 9]).contains("1 bytes of an answer belong to no array"));
    let infinite = [f32::INFINITY.to_le_bytes(), [0; 4]].concat();
    assert!(answer(joints(json!([2]), "f32"), &infinite).contains("finite"));
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    assert!(
        problem(ask(&[&lengths(10_000, 0)[..], deep.as_bytes()].concat())).contains("not what it should be")
    );
    let said = json!({"id": 1, "ok": false, "error": {"kind": "internal", "message": "x".repeat(9000)}});
    match ask(&frame(&said, &[])) {
        Err(Failure::Refused { kind, message }) => {
            assert_eq!((kind.as_str(), message.len()), ("internal", 2000))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_session_that_is_cut_or_altered_anywhere_ends_with_an_answer_or_an_error() {
    let frames = frames();
    // Hello, and the answer to the first reset with its id as if it were the first request.
    let mut reset = frames[10].header.clone();
    reset["id"] = 1.into();
    let numbers = &frames[10].body;
    let whole = [&frames[0].bytes[..], &frame(&reset, numbers)].concat();
    let parts = [part("state", Dtype::F32, &[35]), part("joints", Dtype::F32, &[25])];
    assert_eq!(
        told(&whole, &parts).unwrap().floats[59],
        f32::from_le_bytes(numbers[236..].try_into().unwrap())
    );
    for cut in 0..whole.len() {
        assert!(matches!(told(&whole[..cut], &parts), Err(Failure::Ended)), "cut at {cut}");
    }
    let mut rng = Rng::new(3, 0);
    let (mut fine, mut broken) = (0, 0);
    for _ in 0..3000 {
        let mut bytes = whole.clone();
        for _ in 0..=rng.below(3) {
            let at = rng.below(bytes.len() as u32) as usize;
            match rng.below(3) {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes[at] = rng.below(256) as u8,
                _ => drop(bytes.drain(at..(at + 4).min(bytes.len()))),
            }
        }
        match told(&bytes, &parts) {
            Ok(_) => fine += 1,
            Err(_) => broken += 1,
        }
    }
    assert!(fine > 100 && broken > 1000, "{fine} {broken}");
}

#[test]
fn silence_and_drops_end_when_patience_does_and_a_stop_ends_them_at_once() {
    let (mut client, mut other) = pair();
    let mut wait = |time: u64| client.hello("mikasa-env", Duration::from_millis(time)).unwrap_err();
    assert!(matches!(wait(120), Failure::Silent(_)), "nothing came");
    let dripping = std::thread::spawn(move || {
        // One byte now and then is no answer either.
        for byte in frames()[0].bytes.iter().take(60) {
            std::thread::sleep(Duration::from_millis(20));
            if other.write_all(&[*byte]).is_err() {
                break;
            }
        }
    });
    let start = Instant::now();
    assert!(matches!(wait(200), Failure::Silent(_)));
    assert!(start.elapsed() < Duration::from_secs(60));
    drop(client);
    dripping.join().unwrap();

    let (own, _other) = UnixStream::pair().unwrap();
    let stop = Stop::default();
    let mut client = Client::new(own, stop.clone()).unwrap();
    stop.request(2);
    assert!(matches!(client.hello("mikasa-env", PATIENCE), Err(Failure::Stopped)));
    // A worker that does not read: a request that fits no buffer waits for it.
    let (mut client, _other) = pair();
    let much = |body: &mut Vec<u8>| body.extend(vec![0; 8 << 20]);
    assert!(matches!(client.send("step", "", much, Duration::from_millis(120)), Err(Failure::Silent(_))));
    let more = |body: &mut Vec<u8>| body.extend(vec![0; (64 << 20) + 1]);
    assert!(matches!(client.send("step", "", more, PATIENCE), Err(Failure::Protocol(_))));
    let mut none = ValuesMut::default();
    let (mut client, other) = pair();
    drop(other);
    assert!(matches!(client.receive(PATIENCE, &[], &mut none), Err(Failure::Ended)));
}
