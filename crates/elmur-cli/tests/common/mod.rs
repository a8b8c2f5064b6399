//! What tests of the command line share.

#![allow(dead_code, clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A folder that is gone when the test has passed.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("elmur-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// Runs the program.
pub fn elmur(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elmur")).args(args).output().unwrap()
}

/// Everything it said.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What it printed; it must succeed.
pub fn fine(args: &[&str]) -> String {
    let output = elmur(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A mistake: exit 2, one line that contains `part`.
pub fn mistake(args: &[&str], part: &str) {
    let output = elmur(args);
    let message = text(&output);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("error: ") && message.contains(part), "{args:?}: {message}");
}

/// Settings of a tiny policy and a few batches.
pub const SMALL: [&str; 6] = [
    "model.d_model=16",
    "model.segment_length=3",
    "train.batch=8",
    "train.epochs=0",
    "train.batches=6",
    "eval.episodes=10",
];

/// Arguments that train a tiny policy in a T-Maze of nine steps.
pub fn tiny<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let maze = ["env.length=9", "data.episodes=100", "eval.length=9"];
    [&["train", "tmaze-quick"], &SMALL[..], &maze, more, &["--out", out]].concat()
}

/// A refusal: exit code 2 and a message that contains every one of `parts`, and no panic.
pub fn refused(args: &[&str], parts: &[&str]) -> String {
    let output = elmur(args);
    let message = text(&output);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert!(message.contains("error: ") && !message.contains("panicked"), "{args:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{args:?}: no {part:?} in {message}");
    }
    message
}

/// The program, started as from a terminal: tests that run in the background of a shell, or under `nohup`, ignore
/// signals, and the program goes on to ignore what was ignored at its start.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elmur"));
    #[cfg(unix)]
    // SAFETY: between fork and exec only `signal` is called, which may be.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, || {
            for ignored in [libc::SIGHUP, libc::SIGINT] {
                libc::signal(ignored, libc::SIG_DFL);
            }
            Ok(())
        });
    }
    command
}

/// Starts the program; what it says is read when it has ended.
pub fn start(args: &[&str]) -> Child {
    let mut command = program();
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Sends a signal by name.
pub fn signal(child: &Child, name: &str) {
    let done = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status().unwrap();
    assert!(done.success());
}

/// What a process that ends within `seconds` said; one that does not is killed.
pub fn ended(mut child: Child, seconds: u64) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(seconds) {
            child.kill().unwrap();
            panic!("no end after {seconds} s: {}", text(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Waits until a file has at least `bytes` bytes, for ten minutes: a simulator on a busy machine takes one to start.
pub fn until(path: impl AsRef<Path>, bytes: u64) {
    let begin = Instant::now();
    while !std::fs::metadata(&path).is_ok_and(|about| about.len() >= bytes) {
        assert!(begin.elapsed() < Duration::from_secs(600), "{} never came", path.as_ref().display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A child that is killed if the test ends before it.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The names of a folder's entries, in order.
pub fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Flips a bit in the middle of a file.
pub fn flip(path: impl AsRef<Path>) {
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&path, bytes).unwrap();
}

/// Model, state and progress of a checkpoint.
pub fn checkpoint(run: &str, number: u64) -> Vec<Vec<u8>> {
    let folder = Path::new(run).join(format!("checkpoints/{number:08}"));
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    ["model.safetensors", "state.safetensors", "progress.json"].map(read).into()
}

/// Rows of JSON lines; every line must be one.
pub fn rows(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// An array of an `.npz` file.
pub struct Array {
    name: &'static str,
    descr: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Array {
    /// An array of 64-bit integers.
    pub fn ints(name: &'static str, shape: &[usize], numbers: &[i64]) -> Self {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { name, descr: "<i8", shape: shape.to_vec(), bytes }
    }

    /// An array of 32-bit floats.
    pub fn floats(name: &'static str, shape: &[usize], numbers: &[f32]) -> Self {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { name, descr: "<f4", shape: shape.to_vec(), bytes }
    }

    fn npy(&self) -> Vec<u8> {
        let axes: String = self.shape.iter().map(|n| format!("{n}, ")).collect();
        let mut header =
            format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({axes}), }}", self.descr);
        header.push_str(&" ".repeat((10 + header.len() + 1).next_multiple_of(64) - 11 - header.len()));
        header.push('\n');
        let length = (header.len() as u16).to_le_bytes();
        [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), &self.bytes].concat()
    }
}

/// Writes an `.npz` file as numpy's `savez` does: a zip archive of stored members.
pub fn save_npz(path: impl AsRef<Path>, arrays: &[Array]) {
    let members: Vec<_> = arrays.iter().map(|array| (array.name, array.npy())).collect();
    let members: Vec<_> =
        members.iter().map(|(name, bytes)| (*name, 0, &bytes[..], bytes.len() as u32)).collect();
    std::fs::write(path, zip(&members)).unwrap();
}

/// A zip archive of members: name, method, packed bytes and the size that the unpacked ones are said to have.
pub fn zip(members: &[(&str, u16, &[u8], u32)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, method, packed, size) in members {
        let name = format!("{name}.npy");
        let mut about = Vec::new();
        // Needed version, flags, method, time and date.
        [20, 0, *method, 0, 0].iter().for_each(|n: &u16| about.extend(n.to_le_bytes()));
        [crc32(packed), packed.len() as u32, *size].iter().for_each(|n| about.extend(n.to_le_bytes()));
        about.extend((name.len() as u16).to_le_bytes());
        about.extend([0; 2]);
        directory.extend(*b"PK\x01\x02\x14\x00");
        directory.extend(&about);
        // Comment, disk, attributes.
        directory.extend([0; 10]);
        directory.extend((file.len() as u32).to_le_bytes());
        directory.extend(name.as_bytes());
        file.extend(*b"PK\x03\x04");
        file.extend(&about);
        file.extend(name.as_bytes());
        file.extend_from_slice(packed);
    }
    let (at, length, count) = (file.len() as u32, directory.len() as u32, members.len() as u16);
    file.extend(&directory);
    file.extend(*b"PK\x05\x06\x00\x00\x00\x00");
    [count, count].iter().for_each(|n| file.extend(n.to_le_bytes()));
    [length, at].iter().for_each(|n| file.extend(n.to_le_bytes()));
    file.extend([0; 2]);
    file
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

/// Whether there is a Python with Gymnasium; says so where there is none.
pub fn has_gymnasium() -> bool {
    let python = std::env::var_os("ELMUR_PYTHON").unwrap_or_else(|| "python3".into());
    let found = Command::new(&python).args(["-c", "import numpy, gymnasium"]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {python:?} has no gymnasium; name one that has it in ELMUR_PYTHON");
    }
    found
}
