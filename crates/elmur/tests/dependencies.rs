//! What someone who depends on the library pulls in.

#![allow(clippy::unwrap_used)]

use std::process::Command;

/// Names of all crates that `package` depends on, at any depth.
fn dependencies(package: &str) -> Vec<String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo)
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn the_library_pulls_in_no_command_line_and_no_pictures() {
    let foreign =
        ["clap", "clap_complete", "signal-hook", "gemm", "tiny-skia", "ttf-parser", "notosans", "elmur-plot"];
    for package in ["elmur", "elmur-model"] {
        let all = dependencies(package);
        assert!(all.iter().any(|name| name == "elmur-engine"), "{all:?}");
        for name in foreign {
            assert!(!all.iter().any(|found| found == name), "{package} depends on {name}");
        }
    }
    // The model alone acts; it needs no environments, datasets or trainers either.
    for name in ["elmur-envs", "elmur-data", "elmur-train", "memmap2", "flate2"] {
        assert!(!dependencies("elmur-model").iter().any(|found| found == name), "{name}");
    }
}
