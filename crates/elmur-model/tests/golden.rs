//! Traces of the published code, replayed.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;

use elmur_engine::{DType, Pool};
use elmur_model::golden::verify;

fn cases() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    cases.sort();
    assert!(cases.len() >= 3);
    cases
}

#[test]
fn float64_matches_to_1e_9() {
    for case in cases() {
        let report = verify(&case, DType::F64, &Pool::new(1)).unwrap();
        assert!(report.within(1e-9, DType::F64), "{}: {report:?}", case.display());
    }
}

#[test]
fn float32_matches_to_2e_4() {
    for case in cases() {
        let report = verify(&case, DType::F32, &Pool::new(1)).unwrap();
        assert!(report.within(2e-4, DType::F32), "{}: {report:?}", case.display());
    }
}
