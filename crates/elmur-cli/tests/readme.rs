//! Every command of the README is run, in the order of the README. (The Rust examples are doctests of
//! the crate `elmur`.)

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::Command;

#[test]
fn every_command_of_the_readme_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let folder = std::env::temp_dir().join(format!("elmur-readme-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("crates")).unwrap();
    std::fs::create_dir_all(folder.join("runs")).unwrap();
    std::fs::create_dir_all(folder.join("examples")).unwrap();
    for file in ["runs/sweep-example.json", "examples/recall.py"] {
        std::fs::copy(root.join(file), folder.join(file)).unwrap();
    }
    let has_gymnasium = common::has_gymnasium();
    let blocks = readme.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let mut count = 0;
    for line in blocks.flat_map(str::lines) {
        let command = line.split('#').next().unwrap().trim();
        // Examples are run by their own tests.
        if command.starts_with("cargo run --release --example ") {
            continue;
        }
        if command.contains("python:") && !has_gymnasium {
            continue;
        }
        let Some(args) = command.strip_prefix("cargo run --release -- ") else {
            assert_eq!(command, "cargo test --workspace", "a command this test does not know");
            continue;
        };
        let mut args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        // The shell would expand this; and a debug build need not walk a million steps: the release build
        // does that in CI.
        if let Some(at) = args.iter().position(|a| a.contains('*')) {
            let (pattern, models) = (args.remove(at), "crates/elmur-model/tests/golden/");
            let one = if pattern.starts_with(models) { "tmaze-small" } else { "popgym-BattleshipEasy" };
            args.push(root.join(pattern.replace('*', one)).to_str().unwrap().to_owned());
        }
        // Files of the repository, which the test's folder lacks.
        for arg in args.iter_mut().filter(|arg| arg.starts_with("crates/")) {
            *arg = root.join(&*arg).to_str().unwrap().to_owned();
        }
        if args == ["demo"] {
            args.extend(["--longest", "900"].map(str::to_owned));
        }
        let output =
            Command::new(env!("CARGO_BIN_EXE_elmur")).args(&args).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        count += 1;
    }
    assert!(count >= 8, "{count} commands");
    std::fs::remove_dir_all(&folder).unwrap();
}
