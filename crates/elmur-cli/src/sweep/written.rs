//! A sweep file as it is written, key by key: `docs/sweeps.md` says what each means.

use std::path::{Path, PathBuf};

use elmur_train::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::file::OWN_POLICY;

/// The device that computes where the file names none.
const CPU: &str = "cpu";

/// A sweep as its file has it.
pub struct Written {
    /// Title of the report.
    pub name: String,
    /// Presets.
    pub tasks: Vec<String>,
    /// `preset`, or names of policies.
    pub policies: Vec<String>,
    /// Seeds of every combination.
    pub seeds: Vec<u64>,
    /// Settings of all runs.
    pub settings: Map<String, Value>,
    /// Settings by policy, with patterns as keys.
    pub per_policy: Map<String, Value>,
    /// Settings by task, with patterns as keys.
    pub per_task: Map<String, Value>,
    /// For tasks, the task whose weights their runs begin with.
    pub begin_with: Map<String, Value>,
    /// Variants of all runs.
    pub cases: Vec<WrittenCase>,
    /// How runs are evaluated.
    pub evaluate: WrittenEvaluation,
    /// The device that trains.
    pub device: String,
    /// Groups of tasks whose scores are added up, with patterns of tasks; none: those of the paper.
    pub groups: Option<Map<String, Value>>,
    /// Columns of numbers from elsewhere, by task.
    pub references: Map<String, Value>,
    /// A file of results that need not be computed again.
    pub known: Option<PathBuf>,
    /// The sweep's folder.
    pub out: PathBuf,
}

/// A variant of all runs.
pub struct WrittenCase {
    /// Name in reports.
    pub name: String,
    /// Settings of the variant.
    pub settings: Map<String, Value>,
}

/// How runs are evaluated, as the file has it.
pub struct WrittenEvaluation {
    /// Test episodes of a run.
    pub episodes: usize,
    /// Lengths of the environment to evaluate at, one row of the report each.
    pub lengths: Vec<u64>,
    /// A setting of the environment with its values, one row each.
    pub set: Map<String, Value>,
    /// What is measured, if it is not the environment's own choice.
    pub metric: Option<elmur_envs::Metric>,
    /// Whether actions are drawn instead of the likeliest being taken.
    pub sample: bool,
    /// The device that acts.
    pub device: String,
}

/// The keys of an object in the file, each taken once.
struct Fields<'a> {
    path: &'a Path,
    /// Where the object is: empty, or a key and a dot.
    place: String,
    fields: Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn new(path: &'a Path, place: &str, value: Value) -> Result<Self> {
        let Value::Object(fields) = value else {
            let place = if place.is_empty() { String::new() } else { format!("`{place}`: ") };
            return Err(Error::file(path, format!("{place}expected an object, {{...}}, got {value}")));
        };
        let place = if place.is_empty() { String::new() } else { format!("{place}.") };
        Ok(Self { path, place, fields })
    }

    /// The value of a key; none where it is left out or null.
    fn optional<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.fields.shift_remove(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let problem = |e| Error::file(self.path, format!("`{}{key}`: {e}, got {value}", self.place));
        serde_json::from_value(value.clone()).map_err(problem)
    }

    fn needed<T: DeserializeOwned>(&mut self, key: &str, expected: &str) -> Result<T> {
        let problem = format!("`{}{key}`: expected {expected}, got nothing", self.place);
        self.optional(key)?.ok_or_else(|| Error::file(self.path, problem))
    }

    /// Refuses keys that nobody took.
    fn end(self, known: &[&str]) -> Result<()> {
        let Some(key) = self.fields.keys().next() else { return Ok(()) };
        let near = elmur_base::did_you_mean(key, known.iter().copied());
        let all = known.join(", ");
        Err(Error::file(
            self.path,
            format!("`{}{key}`: expected one of the keys {all}, got another{near}", self.place),
        ))
    }
}

impl Written {
    /// Reads a sweep; a key that is missing, unknown or of another type is refused by its name.
    pub fn read(path: &Path, value: Value) -> Result<Self> {
        let mut file = Fields::new(path, "", value)?;
        let cases: Vec<Value> = file.optional("cases")?.unwrap_or_default();
        let case = |(i, case): (usize, Value)| {
            let mut case = Fields::new(path, &format!("cases.{i}"), case)?;
            let name = case.needed("name", "a name")?;
            let settings = case.optional("settings")?.unwrap_or_default();
            case.end(&["name", "settings"])?;
            Ok(WrittenCase { name, settings })
        };
        let written = Self {
            name: file.needed("name", "a name")?,
            tasks: file.needed("tasks", "a list of presets")?,
            policies: file.optional("policies")?.unwrap_or_else(|| vec![OWN_POLICY.to_owned()]),
            seeds: file.optional("seeds")?.unwrap_or_else(|| vec![0]),
            settings: file.optional("settings")?.unwrap_or_default(),
            per_policy: file.optional("per_policy")?.unwrap_or_default(),
            per_task: file.optional("per_task")?.unwrap_or_default(),
            begin_with: file.optional("begin_with")?.unwrap_or_default(),
            cases: cases.into_iter().enumerate().map(case).collect::<Result<_>>()?,
            evaluate: WrittenEvaluation::read(path, file.optional("evaluate")?)?,
            device: file.optional("device")?.unwrap_or_else(|| CPU.to_owned()),
            groups: file.optional("groups")?,
            references: file.optional("references")?.unwrap_or_default(),
            known: file.optional("known")?,
            out: file.needed("out", "a folder")?,
        };
        file.end(&[
            "name",
            "tasks",
            "policies",
            "seeds",
            "settings",
            "per_policy",
            "per_task",
            "begin_with",
            "cases",
            "evaluate",
            "device",
            "groups",
            "references",
            "known",
            "out",
        ])?;
        Ok(written)
    }
}

impl WrittenEvaluation {
    fn read(path: &Path, value: Option<Value>) -> Result<Self> {
        let mut fields = Fields::new(path, "evaluate", value.unwrap_or_else(|| Map::new().into()))?;
        let written = Self {
            episodes: fields.optional("episodes")?.unwrap_or(100),
            lengths: fields.optional("lengths")?.unwrap_or_default(),
            set: fields.optional("set")?.unwrap_or_default(),
            metric: fields.optional("metric")?,
            sample: fields.optional("sample")?.unwrap_or(false),
            device: fields.optional("device")?.unwrap_or_else(|| CPU.to_owned()),
        };
        fields.end(&["episodes", "lengths", "set", "metric", "sample", "device"])?;
        Ok(written)
    }
}
