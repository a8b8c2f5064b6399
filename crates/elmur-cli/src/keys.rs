//! Settings by key: what there is, what each does, and the page about them.

use elmur_base::describe::{describe_all, description_of};
use elmur_base::{Describe, Description};
use elmur_envs::{Registry, Wrappers};
use elmur_train::{Error, Result, RunConfig, overrides};
use serde_json::{Value, json};

use crate::say;

/// A key of a config with its value and what it does.
pub struct Key {
    /// Dotted key.
    pub key: String,
    /// Value of the key in the config; none where it is left out and has its default.
    pub value: Option<Value>,
    /// What the setting of this key does.
    pub text: String,
}

/// A mistake in an option or a setting.
pub fn config(key: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Error {
    Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
}

/// Splits `KEY=V1,V2` of `--set`; values are JSON where they are JSON, else words. A JSON object is one value.
pub fn setting(text: &str) -> Result<(&str, Vec<Value>)> {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    match text.split_once('=') {
        Some((key, object)) if value(object).is_object() => Ok((key, vec![value(object)])),
        Some((key, values)) => Ok((key, values.split(',').map(value).collect())),
        None => Err(config("set", "KEY=VALUE, such as length=90", text)),
    }
}

/// Every key of a config that can be changed, with its value and its description.
pub fn keys_of(run: &RunConfig, registry: &Registry) -> Result<Vec<Key>> {
    let tree = json!(run);
    let value_of = |key: &str| {
        key.split('.').try_fold(&tree, |at, part| match at {
            Value::Array(items) => part.parse().ok().and_then(|i: usize| items.get(i)),
            other => other.get(part),
        })
    };
    // Kinds of policies have settings of the same name.
    let is_of_run = |description: &Description| match &description.when {
        Some((key, value)) => value_of(key).and_then(Value::as_str) == Some(value),
        None => true,
    };
    let all: Vec<Description> = descriptions(run, registry)?.into_iter().filter(is_of_run).collect();
    let mut keys = Vec::new();
    for key in overrides::keys(run) {
        let value = value_of(&key);
        let leaf = match value {
            Some(Value::Object(fields)) => fields.is_empty(),
            Some(Value::Array(items)) => items.is_empty(),
            _ => true,
        };
        if leaf {
            let text = description_of(&all, &key).map(sentence).unwrap_or_default();
            keys.push(Key { value: value.cloned(), key, text });
        }
    }
    Ok(keys)
}

/// The description of a setting, with its choices.
fn sentence(description: &Description) -> String {
    let Description { text, choices, .. } = description;
    let names: Vec<&str> = choices.iter().map(|(name, _)| name.as_str()).collect();
    if names.is_empty() { text.clone() } else { format!("{text} One of: {}.", names.join(", ")) }
}

/// Descriptions of a config's settings, those of its environment included.
fn descriptions(run: &RunConfig, registry: &Registry) -> Result<Vec<Description>> {
    let mut all = Vec::new();
    Wrappers::describe("env.wrappers", &mut |description| all.push(description));
    all.push(Description::new("env", "name", "Name of the environment.", Vec::new()));
    if let Some(environment) = run.environment(registry)? {
        for setting in environment.settings() {
            all.push(Description::new("env", setting.key, setting.text, Vec::new()));
            let text = format!("Value of env.{} in validation.", setting.key);
            all.push(Description::new("eval.settings", setting.key, &text, Vec::new()));
        }
    }
    all.extend(describe_all::<RunConfig>());
    Ok(all)
}

/// Prints every key with its value and its description.
pub fn list(run: &RunConfig, registry: &Registry, as_json: bool) -> Result<()> {
    for Key { key, value, text } in keys_of(run, registry)? {
        if as_json {
            say(&json!({"key": key, "value": value, "description": text}).to_string());
        } else {
            let shown = value.map_or_else(|| "(default)".to_owned(), |value| value.to_string());
            say(&format!("{:<48} {text}", format!("{key}={shown}")));
        }
    }
    Ok(())
}

/// The page about configuration, made of the same descriptions as `elmur inspect --keys`.
#[cfg(test)]
fn page(registry: &Registry) -> Result<String> {
    let mut page = include_str!("configuration.md").to_owned();
    let mut all = Vec::new();
    all.push(Description::new("env", "name", "Name of the environment.", Vec::new()));
    let families = [
        ("tmaze", "tmaze"),
        ("popgym-PositionOnlyPendulumEasy", "POPGym"),
        ("mikasa-RememberColor3", "MIKASA-Robo"),
        ("mikasa-RotateLenientPos", "MIKASA-Robo"),
        ("python:ID", "Python"),
    ];
    // Settings that several families share are one line.
    let mut settings: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for (name, shown) in families {
        for setting in registry.settings(name) {
            match settings.iter_mut().find(|(key, text, _)| (*key, *text) == (setting.key, setting.text)) {
                Some((.., names)) if names.contains(&shown) => {}
                Some((.., names)) => names.push(shown),
                None => settings.push((setting.key, setting.text, vec![shown])),
            }
        }
    }
    for (key, text, names) in settings {
        let text = format!("{}: {text}", names.join(", "));
        all.push(Description::new("env", key, &text, Vec::new()));
    }
    Wrappers::describe("env.wrappers", &mut |description| all.push(description));
    all.extend(describe_all::<RunConfig>().into_iter().filter(|d| d.key.contains('.')));
    for group in ["env", "data", "train", "eval", "model"] {
        page.push_str(&format!("\n## {group}\n\n| key | where | what it does |\n|---|---|---|\n"));
        for description in all.iter().filter(|d| d.key.split('.').next() == Some(group)) {
            let place = description.when.as_ref().map(|(key, value)| format!("`{key}={value}`"));
            let text = sentence(description).replace('|', "\\|");
            page.push_str(&format!("| `{}` | {} | {text} |\n", description.key, place.unwrap_or_default()));
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_every_preset_has_a_description() {
        let registry = Registry::builtin();
        for name in RunConfig::preset_names()
            .iter()
            .filter(|name| !name.starts_with("popgym-") || name.contains("CountRecallEasy"))
        {
            for key in keys_of(&RunConfig::preset(name).unwrap(), &registry).unwrap() {
                assert!(key.text.split(' ').count() >= 3, "{name}: `{}`: {:?}", key.key, key.text);
            }
        }
    }

    #[test]
    fn the_page_about_configuration_is_made_of_these_descriptions() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        let page = page(&Registry::builtin()).unwrap();
        if std::env::var_os("ELMUR_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page,
            "docs/configuration.md is not what the settings say; write it anew with \
             ELMUR_WRITE_DOCS=1 cargo test -p elmur-cli --lib configuration"
        );
    }
}
