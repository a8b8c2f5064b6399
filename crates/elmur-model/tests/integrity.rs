//! Damage to checkpoints and snapshots is found, and what belongs to another policy is refused.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::Values;
use elmur_engine::{Pool, Store};
use elmur_model::ends::Encoder;
use elmur_model::session::Session;
use elmur_model::{Checkpoint, Elmur, Fingerprint, PolicyConfig, Snapshot, init};

/// A policy of a few kilobytes.
fn tiny() -> Elmur {
    let mut config = common::small();
    config.observation = vec![Encoder::Vector { dim: 1, bytes: false }];
    (config.d_model, config.heads, config.layers, config.segment_length) = (4, 2, 1, 2);
    config.memory.max_distance = 2;
    config.ffn = elmur_model::elmur::config::Ffn::SwiGlu { d_ff: 2 };
    config
}

fn checkpoint(config: &Elmur) -> Checkpoint {
    let params = init::parameters(config, 1).unwrap();
    Checkpoint { config: PolicyConfig::from(config.clone()), params }
}

fn session(config: &Elmur, params: &Store) -> Session {
    let mut session = Session::new(config, params, 2, &Pool::new(1)).unwrap();
    for t in 0..5 {
        session.act(Values::floats(&[t as f32, 0.5])).unwrap();
    }
    session
}

/// Every bit of `bytes` flipped, one at a time; those that `accepts` believes.
fn believed(bytes: &[u8], accepts: impl Fn(&[u8]) -> bool) -> Vec<usize> {
    let mut damaged = bytes.to_vec();
    let mut found = Vec::new();
    for bit in 0..bytes.len() * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        if accepts(&damaged) {
            found.push(bit);
        }
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
    found
}

#[test]
fn a_flip_of_any_bit_of_a_checkpoint_is_found() {
    let bytes = checkpoint(&tiny()).to_bytes().unwrap();
    assert!(bytes.len() < 10_000, "{} bytes", bytes.len());
    assert!(Checkpoint::from_bytes(&bytes).is_ok());
    assert_eq!(believed(&bytes, |bytes| Checkpoint::from_bytes(bytes).is_ok()), [0usize; 0]);
}

/// The file beside the weights: a flip that is no error leaves the policy what it was.
#[test]
fn a_flip_of_any_bit_of_a_config_is_found_or_changes_nothing() {
    let folder = std::env::temp_dir().join(format!("elmur-integrity-{}", std::process::id()));
    let saved = checkpoint(&tiny());
    saved.save(&folder).unwrap();
    let file = folder.join("config.json");
    let bytes = std::fs::read(&file).unwrap();
    let changed = believed(&bytes, |bytes| {
        std::fs::write(&file, bytes).unwrap();
        Checkpoint::load(&folder).is_ok_and(|loaded| loaded.config != saved.config)
    });
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(changed, [0usize; 0]);
}

#[test]
fn a_flip_of_any_bit_of_a_snapshot_is_found() {
    let config = tiny();
    let mut session = session(&config, &checkpoint(&config).params);
    let bytes = session.snapshot(&[0, 1]).unwrap().to_bytes().unwrap();
    session.restore(&[0, 1], &Snapshot::from_bytes(&bytes).unwrap()).unwrap();
    assert_eq!(believed(&bytes, |bytes| Snapshot::from_bytes(bytes).is_ok()), [0usize; 0]);
}

#[test]
fn damage_to_a_file_is_named_with_the_file_and_a_remedy() {
    let folder = std::env::temp_dir().join(format!("elmur-damaged-{}", std::process::id()));
    checkpoint(&tiny()).save(&folder).unwrap();
    let file = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 4;
    std::fs::write(&file, &bytes).unwrap();
    let error = Checkpoint::load(&folder).unwrap_err().to_string();
    std::fs::remove_dir_all(&folder).unwrap();
    for part in ["model.safetensors", "its checksum does not fit", "copy it again", "an earlier one"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_fingerprint_changes_with_the_configuration_and_with_every_parameter() {
    let config = tiny();
    let policy = checkpoint(&config);
    let fingerprint = policy.fingerprint().unwrap();
    assert_eq!(
        Checkpoint::from_bytes(&policy.to_bytes().unwrap()).unwrap().fingerprint().unwrap(),
        fingerprint
    );
    assert_eq!(fingerprint.to_string().parse::<Fingerprint>().unwrap(), fingerprint);
    assert!("12".parse::<Fingerprint>().is_err() && "+123456789abcdef".parse::<Fingerprint>().is_err());
    for name in policy.params.names() {
        let before = policy.params.get::<f32>(&name).unwrap();
        let mut other = before.clone();
        *other.last_mut().unwrap() += 0.5;
        policy.params.set(&name, &other).unwrap();
        let changed = policy.fingerprint().unwrap();
        assert_eq!(fingerprint.difference(changed), Some("other parameters"), "{name}");
        assert!(!fingerprint.same_parameters(changed));
        policy.params.set(&name, &before).unwrap();
    }
    assert_eq!(policy.fingerprint().unwrap(), fingerprint);
    let mut other = config;
    other.memory.lambda += 0.1;
    let changed = Fingerprint::of(&other, &policy.params).unwrap();
    assert_eq!(fingerprint.difference(changed), Some("another configuration"));
    assert!(fingerprint.same_parameters(changed));
}

#[test]
fn a_snapshot_of_another_policy_is_refused() {
    let config = tiny();
    let params = checkpoint(&config).params;
    let mut own = session(&config, &params);
    let snapshot = own.snapshot(&[0]).unwrap();
    assert_eq!(snapshot.fingerprint(), Some(own.fingerprint().unwrap()));

    let mut other = config.clone();
    other.memory.lambda = 0.9;
    let mut forgetful = session(&other, &params);
    let before = forgetful.snapshot(&[0, 1]).unwrap();
    let error = forgetful.restore(&[0], &snapshot).unwrap_err().to_string();
    assert!(error.contains("a policy with another configuration"), "{error}");
    assert_eq!(forgetful.snapshot(&[0, 1]).unwrap(), before, "a refused snapshot changes nothing");

    let mut strange = session(&config, &init::parameters(&config, 2).unwrap());
    let error = strange.restore(&[0], &snapshot).unwrap_err().to_string();
    assert!(error.contains("a policy with other parameters"), "{error}");
}

#[test]
fn a_session_knows_its_new_parameters_after_a_refresh() {
    let config = tiny();
    let params = checkpoint(&config).params;
    let mut session = session(&config, &params);
    let before = session.snapshot(&[0]).unwrap();
    params.set("head.weight", &[0.25f32; 20]).unwrap();
    session.refresh().unwrap();
    assert!(session.restore(&[0], &before).unwrap_err().to_string().contains("other parameters"));
    let after = session.snapshot(&[0]).unwrap();
    assert_ne!(after.fingerprint(), before.fingerprint());
    session.restore(&[0], &after).unwrap();
}
