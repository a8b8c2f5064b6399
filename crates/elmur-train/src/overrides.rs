//! Dotted overrides: `train.lr=1e-3 model.memory.gradient='{"through":3}'`.
//!
//! `policy=NAME` chooses a policy. A value is read as JSON where it is JSON and as a word otherwise. Keys
//! must exist; a misspelt one is answered with the nearest.

use elmur_base::describe::describe_all;
use elmur_base::{Description, did_you_mean};
use elmur_envs::{EnvSpec, Registry};
use serde_json::{Map, Value};

use crate::config::{RunConfig, below_model};
use crate::error::{Error, Result};

/// Whether any override sets encoders or the head; they are then not derived from the spaces of the
/// environment or the data.
pub fn names_ends(overrides: &[impl AsRef<str>]) -> bool {
    let ends = ["model=", "model.observation", "model.action=", "model.action."];
    overrides.iter().any(|text| ends.iter().any(|end| text.as_ref().starts_with(end)))
}

/// The config with every `key=value` applied in order, checked, with a value for every setting of its
/// environment. `env=NAME`, `data.file=PATH` and the environment's own settings come first; then
/// `policy=NAME`, which is no key of the config but replaces the policy and its training
/// ([`RunConfig::with_policy`]); then what changes single settings. Encoders and head follow from the
/// environment's spaces, so that changed wrappers need no other change, unless an override names them
/// ([`names_ends`]).
pub fn apply(config: &RunConfig, overrides: &[impl AsRef<str>], registry: &Registry) -> Result<RunConfig> {
    let mut tree = serde_json::to_value(config).map_err(|e| Error::config("config", "a tree", e))?;
    let texts = || overrides.iter().map(AsRef::as_ref);
    let turn = |text: &&str| match text.split_once('=') {
        // Policies take their form from the environment or the data.
        Some(("env" | "data.file", _)) => 0,
        Some((key, _)) if key.starts_with("env.") && !key.starts_with("env.wrappers") => 1,
        Some((POLICY, _)) => 2,
        _ => 3,
    };
    for text in (0..4).flat_map(|now| texts().filter(move |text| turn(text) == now)) {
        let Some((key, value)) = text.split_once('=') else {
            return Err(Error::config(text, "KEY=VALUE, such as train.lr=1e-3", text));
        };
        if key == POLICY {
            let config: RunConfig =
                serde_json::from_value(tree).map_err(|e| Error::config("config", "a run's config", e))?;
            let config = config.with_policy(value, registry)?;
            tree = serde_json::to_value(config).map_err(|e| Error::config("config", "a tree", e))?;
            continue;
        }
        let mut value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        let key = SHORT.iter().find(|(short, _)| *short == key).map_or(key, |(_, key)| key);
        if key == "env"
            && let Value::String(name) = &value
        {
            // Written out, so that settings can follow: env=tmaze env.length=90.
            value = serde_json::to_value(EnvSpec::new(name)).unwrap_or(value);
        }
        *entry(&mut tree, key)? = value;
        if key == "env" {
            // Another environment has other settings and another target; those that are given come after it.
            *entry(&mut tree, "eval.settings")? = Value::Object(Map::new());
            *entry(&mut tree, "eval.target")? = Value::Null;
        }
        // After each, so that the message names the override that does not fit.
        if let Err(error) = serde_json::from_value::<RunConfig>(tree.clone()) {
            let other_kind = key == "model.kind" && !error.to_string().contains("is not one of");
            let problem = if other_kind {
                "an architecture has settings of its own; choose it with policy=NAME (see `elmur presets`)"
                    .to_owned()
            } else {
                plain(&error.to_string(), key)
            };
            return Err(Error::Override { key: key.to_owned(), problem, text: text.to_owned() });
        }
    }
    let mut config: RunConfig =
        serde_json::from_value(tree).map_err(|e| Error::config("config", "a run's config", e))?;
    config.complete(registry, names_ends(overrides))?;
    Ok(config)
}

/// The key that names a policy.
pub const POLICY: &str = "policy";

/// The policy that overrides name with `policy=NAME`; the last one, if there are several.
pub fn named_policy(overrides: &[impl AsRef<str>]) -> Option<&str> {
    let name = |text: &'_ str| -> bool { text.split_once('=').is_some_and(|(key, _)| key == POLICY) };
    let last = overrides.iter().map(AsRef::as_ref).rfind(|text| name(text))?;
    Some(&last[POLICY.len() + 1..])
}

/// Keys that have a shorter form, for the command line.
const SHORT: [(&str, &str); 1] = [("eval.length", "eval.settings.length")];

impl RunConfig {
    /// Checks the config and fills in what follows from other settings: every setting of the environment, and
    /// encoders and head from its spaces, unless these are to be kept.
    pub fn complete(&mut self, registry: &Registry, keep_ends: bool) -> Result<()> {
        if let Some(environment) = self.environment(registry)? {
            self.env = Some(environment.spec().clone());
            if !keep_ends {
                self.model.fit_to(environment.spaces()).map_err(below_model)?;
            }
            // Encoders that were chosen for recordings are compared with these, which may show something else.
            if !(keep_ends && self.data.file.is_some()) {
                self.model.architecture().ends().check(environment.spaces(), "environment")?;
            }
        }
        self.validation_environment(registry)?;
        self.validate()
    }
}

/// Rewords serde's error message about the value of `key` without the names of Rust's types.
fn plain(problem: &str, key: &str) -> String {
    let words = [
        ("usize", "a whole number"),
        ("u64", "a whole number"),
        ("u32", "a whole number"),
        ("f64", "a number"),
    ];
    let mut text = problem.to_owned();
    for (name, word) in words {
        text = text.replace(&format!("expected {name}"), &format!("expected {word}"));
    }
    for variant in ["newtype", "struct", "tuple"] {
        let alone = format!("invalid type: unit variant, expected {variant} variant");
        let with_value = "expected a name with its value, as in {\"NAME\":VALUE}, got the name alone";
        text = text.replace(&alone, with_value);
    }
    if let Some((before, after)) = text.split_once("expected struct ") {
        let rest = after.trim_start_matches(|c: char| c.is_alphanumeric());
        text = format!("{before}expected settings below it, as in {key}.NAME=VALUE{rest}");
    }
    text
}

fn entry<'a>(tree: &'a mut Value, key: &str) -> Result<&'a mut Value> {
    let mut all = left_out(tree);
    if all.iter().any(|known| known == key) {
        let parents = key.split('.').rev().skip(1).collect::<Vec<_>>();
        let parent = parents.iter().rev().fold(&mut *tree, |place, part| {
            if place.get(part).is_none() {
                place[*part] = Value::Object(Map::new());
            }
            &mut place[*part]
        });
        parent[key.rsplit('.').next().unwrap_or(key)] = Value::Null;
    }
    paths(tree, "", &mut all);
    // Settings of environments are known to the registry, which refuses those that do not exist.
    if let Some((parent @ ("env" | "eval.settings"), name)) = key.rsplit_once('.') {
        let parent = parent.split('.').try_fold(&mut *tree, |place, part| place.get_mut(part));
        if let Some(Value::Object(settings)) = parent {
            settings.entry(name).or_insert(Value::Null);
        }
    }
    let mut place = tree;
    for part in key.split('.') {
        let next = match place {
            Value::Object(map) => map.get_mut(part),
            Value::Array(items) => part.parse().ok().and_then(|i: usize| items.get_mut(i)),
            _ => None,
        };
        place = next.ok_or_else(|| {
            let hint = did_you_mean(key, all.iter().map(String::as_str).chain([POLICY]));
            Error::UnknownKey { key: key.to_owned(), hint }
        })?;
    }
    Ok(place)
}

/// Keys of the policy's settings that files leave out where they have their defaults.
fn left_out(tree: &Value) -> Vec<String> {
    let at = |key: &str| key.split('.').try_fold(tree, |place, part| place.get(part));
    let all = describe_all::<RunConfig>();
    let own = |description: &&Description| {
        let of_kind = |(key, value): &(String, String)| at(key).and_then(Value::as_str) == Some(value);
        description.when.as_ref().is_some_and(of_kind)
    };
    let own: Vec<&str> = all.iter().filter(own).map(|description| description.key.as_str()).collect();
    let holds = |key: &str| own.iter().any(|other| other.starts_with(&format!("{key}.")));
    let in_struct = |key: &str| matches!(key.rsplit_once('.'), Some(("model" | "model.compat", _)));
    let keys = own.iter().filter(|key| in_struct(key) && at(key).is_none() && !holds(key));
    keys.map(|key| (*key).to_owned()).collect()
}

/// Every key of the config, with dots, also of settings that files leave out where they have their defaults.
pub fn keys(config: &RunConfig) -> Vec<String> {
    let mut all = Vec::new();
    if let Ok(tree) = serde_json::to_value(config) {
        paths(&tree, "", &mut all);
        all.extend(left_out(&tree));
    }
    all
}

fn paths(tree: &Value, prefix: &str, all: &mut Vec<String>) {
    let mut visit = |name: &str, value: &Value| {
        let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        paths(value, &path, all);
        all.push(path);
    };
    match tree {
        Value::Object(map) => map.iter().for_each(|(name, value)| visit(name, value)),
        Value::Array(items) => items.iter().enumerate().for_each(|(i, value)| visit(&i.to_string(), value)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elmur_model::elmur::config::MemoryGradient;
    use elmur_model::ends::Encoder;

    fn change(overrides: &[&str]) -> Result<RunConfig> {
        apply(&RunConfig::preset("tmaze-quick").unwrap(), overrides, &Registry::builtin())
    }

    #[test]
    fn values_are_set_by_dotted_key() {
        let config = change(&[
            "train.lr=0.5",
            "model.layers=3",
            "model.memory.gradient={\"through\":3}",
            "train.schedule.decay=linear",
            "env.length=90",
            "train.betas.1=0.9",
        ])
        .unwrap();
        let model = config.model.elmur("test").unwrap();
        assert_eq!((config.train.lr, model.layers), (0.5, 3));
        assert_eq!(config.env.as_ref().unwrap().settings["length"], 90);
        assert_eq!(model.memory.gradient, MemoryGradient::Through(3));
        assert_eq!(config.train.betas.1, 0.9);
    }

    #[test]
    fn a_value_for_a_group_of_settings_is_refused_without_the_name_of_a_type() {
        let error = change(&["train.schedule=cosine"]).unwrap_err().to_string();
        let expected = "config `train.schedule`: invalid type: string \"cosine\", expected settings below it, as in \
                        train.schedule.NAME=VALUE (given: train.schedule=cosine)";
        assert_eq!(error, expected);
    }

    #[test]
    fn changed_wrappers_change_the_encoders() {
        let config = change(&["env.wrappers.first_step=true", "env.wrappers.previous_action=true"]).unwrap();
        let encoders = config.model.architecture().ends().observation;
        assert_eq!(encoders.len(), 3, "{encoders:?}");
        assert_eq!(encoders[0], Encoder::Vector { dim: 4, bytes: false });
        assert!(matches!(&encoders[2], Encoder::Categorical { sizes, .. } if sizes == &[2]));
        // An encoder that is named is kept.
        let error = change(&["model.observation.0.vector.dim=3"]).unwrap_err().to_string();
        assert!(error.contains("observations like the policy's"), "{error}");
    }

    #[test]
    fn settings_and_wrappers_follow_the_name_of_another_environment() {
        let other = ["env=cartpole", "env=tmaze", "env.length=90", "env.wrappers.first_step=true"];
        let env = change(&other).unwrap().env.unwrap();
        assert_eq!((env.name.as_str(), &env.settings["length"]), ("tmaze", &90.into()));
        assert_eq!(env.wrappers.names(), ["first_step"]);
        let error = change(&["env=cartpole", "env.length=90"]).unwrap_err().to_string();
        assert!(error.contains("cartpole has none"), "{error}");
    }

    #[test]
    fn mistakes_are_named_with_a_remedy() {
        let message = |o: &str| change(&[o]).unwrap_err().to_string();
        assert!(message("train.lrr=1").contains("did you mean `train.lr`"), "{}", message("train.lrr=1"));
        assert!(message("model.layer=1").contains("did you mean `model.layers`"));
        assert!(
            message("lambda=0.1").contains("did you mean `model.memory.lambda`"),
            "{}",
            message("lambda=0.1")
        );
        assert!(message("zzzzzz.qqqq=1").ends_with("no such key"));
        assert!(message("train.lr").contains("KEY=VALUE"));
        assert!(message("train.lr=fast").contains("train.lr"), "{}", message("train.lr=fast"));
        assert!(message("model.heads=3").contains("model"), "{}", message("model.heads=3"));
        assert!(message("env.length=2").contains("at least 3"), "{}", message("env.length=2"));
        assert!(message("train.segments=0").contains("train.segments"));
        assert!(message("model.kind=dt").contains("policy=NAME"), "{}", message("model.kind=dt"));
        assert!(message("env.lenght=9").contains("did you mean `length`"), "{}", message("env.lenght=9"));
        assert!(message("eval.length=2").contains("eval.settings.length"), "{}", message("eval.length=2"));
        assert!(message("model.layers=0").contains("`model.layers`"), "{}", message("model.layers=0"));
        assert_eq!(
            change(&["eval.target=0.5", "env=cartpole", "eval.settings={}"]).unwrap().eval.target,
            Some(0.5)
        );
        assert!(message("env.length=0").contains("at least 3"), "{}", message("env.length=0"));
        let pole = change(&["env=cartpole"]).unwrap();
        assert!(pole.env.unwrap().settings.is_empty() && pole.eval.settings.is_empty());
        assert!(message("model.kind=bc-lstm").contains("did you mean `bc_lstm`"));
        let error = message("model.memory.gradient=through");
        assert!(error.contains("expected a name with its value, as in {\"NAME\":VALUE}"), "{error}");
    }
}
