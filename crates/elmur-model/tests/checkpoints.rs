//! Checkpoints on disk: round trips, damage, and weights of the published code.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use elmur_base::Values;
use elmur_engine::{DType, Pool};
use elmur_model::elmur::config::*;
use elmur_model::elmur::published;
use elmur_model::session::Session;
use elmur_model::tensors::{self, TensorData};
use elmur_model::window::{Begin, WindowProgram, evaluation_graph};
use elmur_model::{Checkpoint, Elmur, PolicyConfig, init, presets};

/// A folder that is removed when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("elmur-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn quick() -> Checkpoint {
    let config = presets::model("tmaze-quick").unwrap();
    let params = init::parameters(config.architecture(), 5).unwrap();
    Checkpoint { config, params }
}

fn outputs(checkpoint: &Checkpoint) -> Vec<f32> {
    let mut session = Session::new(&checkpoint.config, &checkpoint.params, 1, &Pool::new(1)).unwrap();
    (0..25).flat_map(|t| session.act(Values::floats(&[0.1, t as f32, -1.0, 0.5])).unwrap().to_vec()).collect()
}

#[test]
fn a_checkpoint_acts_as_before_it_was_saved() {
    let folder = Folder::new("round-trip");
    let checkpoint = quick();
    checkpoint.save(&folder.0).unwrap();
    let loaded = Checkpoint::load(&folder.0).unwrap();
    assert_eq!(loaded.config, checkpoint.config);
    assert_eq!(outputs(&loaded), outputs(&checkpoint));
    let files: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(files.len(), 2, "nothing left aside: {files:?}");
}

fn error_after(folder: &Path, damage: impl FnOnce(&Path)) -> String {
    quick().save(folder).unwrap();
    damage(folder);
    Checkpoint::load(folder).unwrap_err().to_string()
}

#[test]
fn damage_is_named() {
    let folder = Folder::new("damage");
    let weights = |folder: &Path| folder.join("model.safetensors");
    let change = |change: &dyn Fn(&mut tensors::Tensors)| {
        error_after(&folder.0, |f| {
            let mut all = tensors::read(&weights(f)).unwrap();
            change(&mut all);
            std::fs::write(weights(f), tensors::serialise(&all).unwrap()).unwrap();
        })
    };
    let error = change(&|all| drop(all.remove("u")));
    assert!(error.ends_with("no tensor `u`; its config.json asks for one of shape [2, 16]"), "{error}");
    let error = change(&|all| {
        let u = all.remove("u").unwrap();
        all.insert("w".into(), u.clone());
        all.insert("u".into(), u);
    });
    assert!(error.ends_with("tensor `w` is not part of the model in its config.json"), "{error}");
    let error = change(&|all| all.get_mut("u").unwrap().shape = vec![16, 2]);
    assert!(error.ends_with("`u` has shape [16, 2], its config.json asks for [2, 16]"), "{error}");
    let error = change(&|all| all.get_mut("u").unwrap().data = TensorData::F64(vec![0.0; 32]));
    assert!(error.ends_with("`u` does not hold 32-bit floats"), "{error}");
    let error = change(&|all| {
        if let TensorData::F32(x) = &mut all.get_mut("u").unwrap().data {
            x[3] = f32::NAN;
        }
    });
    assert!(error.ends_with("`u` is NaN at element 3; expected finite numbers"), "{error}");

    let error = error_after(&folder.0, |f| {
        let bytes = std::fs::read(weights(f)).unwrap();
        std::fs::write(weights(f), &bytes[..bytes.len() / 2]).unwrap();
    });
    assert!(error.contains("not a valid safetensors file"), "{error}");
    let error = error_after(&folder.0, |f| std::fs::remove_file(weights(f)).unwrap());
    assert!(error.contains("model.safetensors"), "{error}");
    let edit = |from: &str, to: &str| {
        error_after(&folder.0, |f| {
            let text = std::fs::read_to_string(f.join("config.json")).unwrap();
            assert!(text.contains(from));
            std::fs::write(f.join("config.json"), text.replacen(from, to, 1)).unwrap();
        })
    };
    let error = edit("\"heads\": 2", "\"heads\": 3");
    assert!(error.ends_with("config `heads`: expected a divisor of d_model = 32, got 3"), "{error}");
    let error = edit("\"heads\"", "\"haeds\"");
    assert!(error.contains("unknown field `haeds`"), "{error}");
    let error = edit("\"layers\": 2", "\"layers\": 900000000000");
    assert!(error.contains("expected 1 to 1024"), "{error}");
    // Sizes far beyond the weights are found before anything is allocated for them.
    let error = edit("\"d_model\": 32", "\"d_model\": 1048576");
    assert!(error.contains("config `d_model`: expected at most 2147483648 numbers in one tensor"), "{error}");
    let error = edit("\"segment_length\": 10", "\"segment_length\": 1048577");
    assert!(error.contains("config `segment_length`"), "{error}");
    let error = edit("\"d_model\": 32", "\"d_model\": 8192");
    assert!(error.contains("its config.json asks for"), "{error}");
}

#[test]
fn weights_of_one_kind_of_policy_are_refused_by_another() {
    let folder = Folder::new("kinds");
    let error = error_after(&folder.0, |f| {
        let other = presets::model("tmaze-bc-lstm").unwrap();
        std::fs::write(f.join("config.json"), serde_json::to_string(&other).unwrap()).unwrap();
    });
    let expected = "weights of a policy of kind elmur; its config.json asks for one of kind bc_lstm";
    assert!(error.ends_with(expected), "{error}");
}

fn elmur(name: &str) -> Elmur {
    presets::model(name).unwrap().elmur("test").unwrap().clone()
}

/// Parameter counts of the published code (its own count for the paper's models).
#[test]
fn published_parameter_counts() {
    let count = |name: &str| published::parameter_count(&elmur(name));
    assert_eq!(count("tmaze"), 2_111_740);
    assert_eq!(count("remember-color"), 8_954_728);
    assert_eq!(count("take-it-back"), 581_320);
    assert!((3_680_000..3_700_000).contains(&count("popgym-autoencode-easy")));
    // Ours leave out the action and return embeddings that observation-only tokens never use: 5 x 128 + 2 x
    // 128.
    assert_eq!(
        Checkpoint::parameter_count(&presets::model("tmaze").unwrap()).unwrap(),
        2_111_740 - 640 - 256
    );
}

/// Weights under published names act like the published code: one segment against the golden trace.
#[test]
fn published_weights_are_imported() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tmaze-small.safetensors");
    let mut config = elmur("tmaze");
    (config.d_model, config.heads, config.layers, config.segment_length) = (16, 2, 2, 4);
    config.memory.max_distance = 32;
    config.memory.lambda = 0.05;
    config.compat = Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true };
    config.ffn = Ffn::Moe {
        experts: 2,
        routed_d_ff: 8,
        shared_experts: 2,
        shared_d_ff: 24,
        top_k: 3,
        balance: 0.1,
        dropout: 0.0,
    };
    let checkpoint = Checkpoint::import(&PolicyConfig::from(config.clone()), &path).unwrap();
    let golden = tensors::read(&path).unwrap();
    let built = evaluation_graph(&config, 3, DType::F32, Begin::Continue).unwrap();
    let state = elmur_engine::Store::new();
    state.declare_states(&built.graph).unwrap();
    let narrow = |name: &str| golden[name].to_f64().iter().map(|x| *x as f32).collect::<Vec<_>>();
    for i in 0..2 {
        state.set(&format!("memory.{i}"), &narrow(&format!("init/memory.{i}"))).unwrap();
        state.set(&format!("anchors.{i}"), &[-1i64; 6]).unwrap();
    }
    let stores = [&state, &checkpoint.params];
    let mut program = WindowProgram::new(&built, &config, &Pool::new(1), &stores).unwrap();
    program.program.set("observation", &narrow("input/observations")[..48]).unwrap();
    program.run(0).unwrap();
    for (got, want) in program.program.get::<f32>("logits").unwrap().iter().zip(narrow("eval/logits.0")) {
        assert!((got - want).abs() < 1e-4, "{got} {want}");
    }

    config.layers = 3;
    let error = Checkpoint::import(&PolicyConfig::from(config.clone()), &path).unwrap_err().to_string();
    assert!(
        error.contains("expected a tensor `layers.2.self_attention.qkv_net.weight`, got none"),
        "{error}"
    );
    config.layers = 1;
    let error = Checkpoint::import(&PolicyConfig::from(config.clone()), &path).unwrap_err().to_string();
    assert!(error.contains("expected only tensors that this config has, got `param/layers.1."), "{error}");
}
