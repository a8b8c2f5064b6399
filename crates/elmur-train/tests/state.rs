//! The state of a training: damage is found, and it belongs to the weights it was saved beside.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use elmur_engine::Pool;
use elmur_model::tensors;
use elmur_train::{RunConfig, Trainer, overrides};

/// A run of a few kilobytes.
fn tiny() -> RunConfig {
    let all = [
        "model.d_model=4",
        "model.layers=1",
        "model.memory.max_distance=2",
        "model.ffn={\"swi_glu\":{\"d_ff\":2}}",
        "model.segment_length=3",
        "env.length=9",
        "data.episodes=8",
        "train.batch=2",
    ];
    let all = all.map(str::to_owned);
    overrides::apply(&RunConfig::preset("tmaze-quick").unwrap(), &all, &elmur_envs::Registry::builtin())
        .unwrap()
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("elmur-state-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

#[test]
fn a_flip_of_any_bit_of_a_training_state_is_found() {
    let config = tiny();
    let dataset = config.prepare(&elmur_envs::Registry::builtin(), true).unwrap().data;
    let mut trainer = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
    trainer.step().unwrap();
    let folder = folder("flips");
    trainer.save(&folder).unwrap();
    trainer.load(&folder).unwrap();
    let file = folder.join("state.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.len() < 20_000, "{} bytes", bytes.len());
    let mut damaged = bytes.clone();
    for bit in 0..bytes.len() * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(tensors::parse_own(&damaged).is_err(), "bit {} of byte {}", bit % 8, bit / 8);
        // The trainer reads the file no other way; some of them through it too.
        if bit % 997 == 0 {
            std::fs::write(&file, &damaged).unwrap();
            let error = trainer.load(&folder).unwrap_err().to_string();
            assert!(error.contains("state.safetensors"), "{error}");
        }
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!(trainer.batches(), 1, "a refused state changes nothing");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_training_state_of_other_weights_is_refused() {
    let config = tiny();
    let dataset = config.prepare(&elmur_envs::Registry::builtin(), true).unwrap().data;
    let mut trainer = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
    let (early, late) = (folder("early"), folder("late"));
    trainer.save(&early).unwrap();
    trainer.step().unwrap();
    trainer.save(&late).unwrap();
    std::fs::copy(early.join("state.safetensors"), late.join("state.safetensors")).unwrap();
    let error = trainer.load(&late).unwrap_err().to_string();
    assert!(error.contains("state.safetensors") && error.contains("beside other weights"), "{error}");
    assert!(error.contains("take both from one checkpoint"), "{error}");
    trainer.load(&early).unwrap();
    assert_eq!(trainer.batches(), 0);
    [early, late].iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
}
