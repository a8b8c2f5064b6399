//! Every setting of every policy says what it does.

#![allow(clippy::unwrap_used)]

mod common;

use elmur_base::{Description, describe_all};
use elmur_model::elmur::config::*;
use elmur_model::ends::*;
use elmur_model::{PolicyConfig, presets};
use serde_json::Value;

/// Dotted keys of everything in a JSON value that is neither an object nor a list of objects.
fn leaves(key: &str, value: &Value, out: &mut Vec<String>) {
    let below = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| leaves(&below(name), value, out)),
        Value::Array(list) if list.iter().any(|x| x.is_object()) => {
            list.iter().enumerate().for_each(|(i, value)| leaves(&below(&i.to_string()), value, out));
        }
        _ => out.push(key.to_owned()),
    }
}

fn policies() -> Vec<PolicyConfig> {
    let mut all: Vec<PolicyConfig> = presets::all().into_iter().map(|(_, policy)| policy).collect();
    let small = common::small();
    for observation in [
        Encoder::Categorical { sizes: vec![3, 4], encoding: CategoricalEncoding::OneHot },
        Encoder::Image { channels: 3, height: 8, width: 8, bytes: true },
        Encoder::Vector { dim: 7, bytes: true },
    ] {
        let mut config = small.clone();
        config.observation.push(observation);
        all.push(config.into());
    }
    for action in [
        Action::Categorical { count: 4 },
        Action::MultiCategorical { sizes: vec![2, 3] },
        Action::Continuous { dim: 2, tanh: true },
    ] {
        all.push(Elmur { action, ..small.clone() }.into());
    }
    for ffn in [Ffn::SwiGlu { d_ff: 8 }, Ffn::Gelu { d_ff: 8 }] {
        all.push(Elmur { ffn, ..small.clone() }.into());
    }
    let mut dmamba = presets::dmamba(small.observation.clone(), small.action.clone(), 10);
    dmamba.compat.flat_mamba_init = true;
    all.push(PolicyConfig::DMamba(dmamba));
    let action = Action::Continuous { dim: 2, tanh: false };
    all.push(PolicyConfig::Diffusion(presets::diffusion(small.observation.clone(), action.clone())));
    all.push(PolicyConfig::Diffusion(presets::diffusion_mlp(small.observation.clone(), action)));
    let mut config = small;
    config.memory.init = MemoryInit::Learned;
    config.memory.gradient = MemoryGradient::Through(3);
    all.push(config.into());
    all
}

#[test]
fn every_setting_of_every_policy_has_a_description() {
    let all = describe_all::<PolicyConfig>();
    for policy in policies() {
        let mut keys = Vec::new();
        leaves("", &serde_json::to_value(&policy).unwrap(), &mut keys);
        assert!(keys.len() >= 8);
        for key in keys {
            let kind = |d: &&Description| d.when.as_ref().is_none_or(|(_, kind)| kind == policy.kind());
            let found: Vec<&Description> = all.iter().filter(|d| d.is_of(&key)).filter(kind).collect();
            assert_eq!(found.len(), 1, "{key} of {}: {found:?}", policy.kind());
            let words = found[0].text.split_whitespace().count();
            assert!(words >= 4, "{key}: `{}`", found[0].text);
            for (name, text) in &found[0].choices {
                assert!(text.split_whitespace().count() >= 2, "{key} = {name}: `{text}`");
            }
        }
    }
}

#[test]
fn settings_that_are_a_choice_list_what_can_be_chosen() {
    let all = describe_all::<PolicyConfig>();
    let choices = |key: &str| {
        let found = all.iter().find(|d| d.is_of(key)).unwrap();
        found.choices.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>()
    };
    let kinds = choices("kind");
    assert_eq!(kinds[0], "elmur");
    assert!(["bc_lstm", "bc_mlp", "cql"].iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
    assert_eq!(choices("ffn"), ["moe", "swi_glu", "gelu"]);
    assert_eq!(choices("memory.replacement"), ["lru", "all"]);
    assert_eq!(choices("memory.gradient"), ["detached", "through"]);
    assert_eq!(choices("observation"), ["vector", "categorical", "image", "residual_image"]);
    assert_eq!(choices("observation.0.categorical.encoding"), ["one_hot", "embedding", "raw"]);
}

/// Files from before `replacement` had a name for it said `lru: true` or `lru: false`.
#[test]
fn the_flag_lru_of_earlier_files_is_read_as_a_replacement() {
    for (flag, expected) in [(true, Replacement::Lru), (false, Replacement::All)] {
        let mut config = common::small();
        config.memory.replacement = expected;
        let mut value = serde_json::to_value(&config).unwrap();
        let memory = value["memory"].as_object_mut().unwrap();
        let name = memory.remove("replacement").unwrap();
        assert_eq!(name, if flag { "lru" } else { "all" });
        memory.insert("lru".to_owned(), flag.into());
        assert_eq!(serde_json::from_value::<Elmur>(value.clone()).unwrap(), config);
        value["memory"]["lru"] = "fifo".into();
        let error = serde_json::from_value::<Elmur>(value).unwrap_err().to_string();
        assert!(error.contains("fifo") && error.contains("`lru` or `all`"), "{error}");
    }
}

#[test]
fn settings_that_have_no_effect_together_are_refused() {
    let mut config = common::small();
    config.memory.replacement = Replacement::All;
    config.validate().unwrap();
    config.memory.slots_per_write = 2;
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("memory.slots_per_write") && error.contains("replacement = all"), "{error}");
}
