//! What tests of the command line share.

#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output};

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
