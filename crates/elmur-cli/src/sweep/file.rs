//! What a sweep consists of: its file, and the runs that follow from it.
//!
//! ```json
//! {
//!   "name": "popgym-easy",
//!   "tasks": ["popgym-*Easy"],
//!   "policies": ["elmur", "bc-lstm"],
//!   "seeds": [0, 1, 2],
//!   "settings": {"train.batches": 3000},
//!   "per_policy": {"bc-lstm": {"train.lr": 1e-3}},
//!   "per_task": {"popgym-*Pendulum*": {"data.noise": 0.2}},
//!   "begin_with": {"popgym-AutoencodeMedium": "popgym-AutoencodeEasy"},
//!   "cases": [{"name": "as it is"}, {"name": "wide", "settings": {"model.d_model": 128}}],
//!   "evaluate": {"episodes": 100},
//!   "out": "out/popgym-easy"
//! }
//! ```
//!
//! A run is one task, policy, case and seed. Settings of the file are overridden by those of the policy, these by
//! those of the task, these by those of the case. `docs/sweeps.md` explains every key.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use elmur_base::files::read_small;
use elmur_engine::Device;
use elmur_envs::popgym::{Difficulty, Family, Task};
use elmur_envs::{Environment, Registry};
use elmur_model::Checkpoint;
use elmur_train::{Error, PolicyName, Result, RunConfig, overrides};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::written::{Written, WrittenEvaluation};

/// Largest size of a sweep file, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Most runs of a sweep.
const MAX_RUNS: usize = 100_000;
/// Most episodes of an evaluation, as in `elmur eval`.
const MAX_EPISODES: usize = 1 << 24;
/// The policy that a preset has by itself, as the file names it.
pub const OWN_POLICY: &str = "preset";
/// Settings that have a place of their own in the file or on the command line.
const ELSEWHERE: [(&str, &str); 5] = [
    ("policy", "the list `policies`"),
    ("train.seed", "the list `seeds`"),
    ("train.device", "`device`, or --device of `elmur sweep run`"),
    ("train.threads", "--threads of `elmur sweep run`"),
    (BEGIN_WITH, "`begin_with`"),
];

/// The setting that names the weights that a run begins with.
const BEGIN_WITH: &str = "train.begin_with";

/// How every run is evaluated on test episodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluate {
    /// Number of episodes per run and value.
    pub episodes: usize,
    /// A setting of the environment and the values it is tried at; none: the environment of validation.
    pub set: Option<(String, Vec<Value>)>,
    /// What episodes are judged by, as `elmur eval --metric` names it; none: what the run is validated by.
    pub metric: Option<elmur_envs::Metric>,
    /// Whether actions are drawn.
    pub sample: bool,
    /// The device that acts.
    #[serde(skip)]
    pub device: String,
}

/// A column of the table: a policy in a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Name of the policy, or [`OWN_POLICY`].
    pub policy: String,
    /// Name of the case, where the file has cases.
    pub case: Option<String>,
}

/// A run of the sweep.
#[derive(Debug, Clone)]
pub struct PlannedRun {
    /// Number that follows from task, policy, seed, settings and evaluation: runs of the same id are the same run,
    /// also in another sweep.
    pub id: String,
    /// Index of the task in [`Plan::tasks`].
    pub task: usize,
    /// Index of the column in [`Plan::columns`].
    pub column: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Settings that differ from the preset's; in [`BEGIN_WITH`] the name of the folder of the run in
    /// `before`.
    pub settings: Map<String, Value>,
    /// Index in [`Plan::runs`] of the run whose weights this one begins with.
    pub before: Option<usize>,
    /// Name of the run's folder: for people, and unique by the id at its end.
    pub folder: String,
}

/// All runs of a sweep, checked.
#[derive(Debug)]
pub struct Plan {
    /// Name of the sweep.
    pub name: String,
    /// The folder of the sweep.
    pub out: PathBuf,
    /// Presets, in the order of the table's rows.
    pub tasks: Vec<String>,
    /// Policies and cases, in the order of the table's columns.
    pub columns: Vec<Column>,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// The runs: all of the first seed, then all of the second, and so on.
    pub runs: Vec<PlannedRun>,
    /// How runs are evaluated.
    pub evaluate: Evaluate,
    /// The device that trains.
    pub device: String,
    /// Named lists of tasks whose scores are added up.
    pub groups: Vec<(String, Vec<usize>)>,
    /// Columns of numbers from elsewhere: by name, a number per task.
    pub references: Vec<(String, Vec<Option<f64>>)>,
    /// Results of earlier sweeps: a file of `elmur sweep report --state`.
    pub known: Option<PathBuf>,
}

impl Plan {
    /// Reads and checks a sweep file: every setting of every run is applied before anything starts.
    pub fn read(path: &Path, registry: &Registry) -> Result<Self> {
        let text = read_small(path, MAX_FILE)?;
        let value = serde_json::from_str(&text)
            .map_err(|e| Error::file(path, format!("not a sweep: {e} (see docs/sweeps.md)")))?;
        Check { path, registry }.plan(Written::read(path, value)?)
    }

    /// The environment that a run is tested in.
    pub fn environment_of(&self, run: &PlannedRun, registry: &Registry) -> Result<Option<Environment>> {
        let preset = crate::train::config_of(&self.tasks[run.task])?;
        overrides::apply(&preset, &self.changes(run), registry)?.validation_environment(registry)
    }

    /// A run in a few words.
    pub fn label(&self, run: &PlannedRun) -> String {
        let Column { policy, case } = &self.columns[run.column];
        let case = case.as_ref().map(|case| format!(", {case}")).unwrap_or_default();
        format!("{} {policy}{case}, seed {}", self.tasks[run.task], run.seed)
    }

    /// The folder of all runs.
    pub fn runs_folder(&self) -> PathBuf {
        self.out.join("runs")
    }

    /// A file or folder of a run.
    pub fn path_of(&self, run: &PlannedRun, ending: &str) -> PathBuf {
        self.runs_folder().join(format!("{}{ending}", run.folder))
    }

    /// What `elmur train` is told beside the preset: policy and settings.
    pub fn changes(&self, run: &PlannedRun) -> Vec<String> {
        let mut settings = run.settings.clone();
        if let Some(before) = run.before {
            let path = self.path_of(&self.runs[before], "");
            settings.insert(BEGIN_WITH.to_owned(), path.to_string_lossy().into());
        }
        changes(&self.columns[run.column].policy, &settings)
    }

    /// Adds the runs to a list of runs whose weights those begin with, however far back.
    pub fn with_those_before(&self, list: &[usize]) -> Vec<usize> {
        let before = |i: &usize| self.runs[*i].before;
        let all = list.iter().flat_map(|i| std::iter::successors(Some(*i), before));
        all.collect::<BTreeSet<usize>>().into_iter().collect()
    }

    /// The runs whose label contains a pattern, in which `*` stands for anything.
    pub fn only(&self, pattern: &str) -> Vec<usize> {
        let found = |run: &PlannedRun| matches(&format!("*{pattern}*"), &self.label(run));
        (0..self.runs.len()).filter(|i| found(&self.runs[*i])).collect()
    }
}

fn changes(policy: &str, settings: &Map<String, Value>) -> Vec<String> {
    let policy = (policy != OWN_POLICY).then(|| format!("policy={policy}"));
    policy.into_iter().chain(settings.iter().map(|(key, value)| format!("{key}={value}"))).collect()
}

/// Whether a name fits a pattern, in which `*` stands for any characters.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(start) else { return false };
    (0..=name.len()).any(|i| name.is_char_boundary(i) && matches(rest, &name[i..]))
}

/// Turns what is written into what is planned, or refuses it.
struct Check<'a> {
    path: &'a Path,
    registry: &'a Registry,
}

impl Check<'_> {
    fn mistake(&self, key: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
        Error::file(self.path, format!("`{key}`: expected {expected}, got {got}"))
    }

    fn plan(&self, written: Written) -> Result<Plan> {
        if written.name.trim().is_empty() || written.out.as_os_str().is_empty() {
            let key = if written.name.trim().is_empty() { "name" } else { "out" };
            return Err(self.mistake(key, "a name", "nothing"));
        }
        let tasks = self.tasks(&written.tasks)?;
        let policies = self.policies(&written.policies)?;
        self.check_list("seeds", &written.seeds)?;
        if let Some(seed) = written.seeds.iter().find(|seed| **seed > u64::from(u32::MAX)) {
            return Err(self.mistake("seeds", "numbers below 2^32", seed));
        }
        Device::check_name(&written.device)
            .map_err(|_| self.mistake("device", "cpu, cuda or cuda:N", &written.device))?;
        let evaluate = self.evaluate(&written.evaluate)?;
        let unchanged = Map::new();
        let cases: Vec<(Option<String>, &Map<String, Value>)> = match &written.cases[..] {
            [] => vec![(None, &unchanged)],
            cases => cases.iter().map(|case| (Some(case.name.clone()), &case.settings)).collect(),
        };
        let names = cases.iter().map(|(name, _)| name.as_deref().unwrap_or_default());
        self.check_list("cases", &names.collect::<Vec<_>>())?;
        let count = tasks.len() * policies.len() * cases.len() * written.seeds.len();
        if count > MAX_RUNS {
            return Err(self.mistake("tasks", format!("at most {MAX_RUNS} runs in all"), count));
        }
        self.check_patterns("per_task", &written.per_task, &tasks)?;
        self.check_patterns("per_policy", &written.per_policy, &policies)?;
        let columns: Vec<Column> = policies
            .iter()
            .flat_map(|policy| {
                cases.iter().map(|(case, _)| Column { policy: policy.clone(), case: case.clone() })
            })
            .collect();
        let before = self.before(&written.begin_with, &tasks)?;
        let (mut settings, mut configs) = (Vec::new(), Vec::new());
        let is_involved = |t: usize| before[t].is_some() || before.contains(&Some(t));
        for (t, task) in tasks.iter().enumerate() {
            for (c, column) in columns.iter().enumerate() {
                let (name, case) = &cases[c % cases.len()];
                let mut merged = Merged::default();
                merged.add("settings", &written.settings);
                merged.add_matching("per_policy", &written.per_policy, &column.policy);
                merged.add_matching("per_task", &written.per_task, task);
                merged.add(&format!("cases.{}", name.as_deref().unwrap_or_default()), case);
                let config = self.check_run(task, column, &merged, &evaluate)?;
                // Of up to 100,000 configs those are kept whose weights are compared.
                configs.push(is_involved(t).then_some(config));
                settings.push(merged.values);
            }
        }
        for (i, config) in configs.iter().enumerate() {
            let Some(before) = before[i / columns.len()] else { continue };
            let other = &configs[before * columns.len() + i % columns.len()];
            let (Some(config), Some(other)) = (config, other) else { continue };
            let params = elmur_model::init::parameters(other.model.architecture(), 0)?;
            let theirs = Checkpoint { config: other.model.clone(), params };
            config.weights_of(theirs, &tasks[before]).map_err(|error| {
                let task = &tasks[i / columns.len()];
                Error::file(self.path, format!("`begin_with`: {task}: {error}"))
            })?;
        }
        let seeds = &written.seeds;
        let runs = Runs { tasks: &tasks, columns: &columns, seeds, settings, before, evaluate: &evaluate };
        let runs: Vec<PlannedRun> = (0..count).map(|i| runs.planned(i)).collect();
        let mut ids: Vec<(&str, usize)> = runs.iter().enumerate().map(|(i, run)| (&*run.id, i)).collect();
        ids.sort_unstable();
        let twice = ids.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| (pair[0].1, pair[1].1));
        let groups = self.groups(written.groups.as_ref(), &tasks)?;
        let references = self.references(&written.references, &tasks)?;
        let Written { name, seeds, device, known, out, .. } = written;
        let plan =
            Plan { name, out, tasks, columns, seeds, runs, evaluate, device, groups, references, known };
        match twice {
            Some((a, b)) => Err(self.mistake(
                "cases",
                "runs that differ in their settings",
                format!(
                    "the same run twice: {} and {}",
                    plan.label(&plan.runs[a]),
                    plan.label(&plan.runs[b])
                ),
            )),
            None => Ok(plan),
        }
    }

    /// Refuses a list that is empty or has something twice.
    fn check_list<T: PartialEq + std::fmt::Debug>(&self, key: &str, items: &[T]) -> Result<()> {
        if items.is_empty() {
            return Err(self.mistake(key, "at least one", "an empty list"));
        }
        match items.iter().enumerate().find(|(i, item)| items[..*i].contains(item)) {
            Some((_, item)) => Err(self.mistake(key, "everything once", format!("{item:?} twice"))),
            None => Ok(()),
        }
    }

    /// Presets by name or pattern, and config files.
    fn tasks(&self, written: &[String]) -> Result<Vec<String>> {
        let names = RunConfig::preset_names();
        let mut tasks = Vec::new();
        for task in written {
            if !task.contains('*') {
                // Says what is wrong with a name.
                crate::train::config_of(task).map_err(|e| Error::file(self.path, format!("`tasks`: {e}")))?;
                tasks.push(task.clone());
                continue;
            }
            let before = tasks.len();
            tasks.extend(names.iter().filter(|name| matches(task, name)).cloned());
            if tasks.len() == before {
                let expected = "a pattern that fits a preset (see `elmur presets`), such as popgym-*Easy";
                return Err(self.mistake("tasks", expected, task));
            }
        }
        self.check_list("tasks", &tasks)?;
        Ok(tasks)
    }

    fn policies(&self, written: &[String]) -> Result<Vec<String>> {
        let name = |policy: &String| match policy.as_str() {
            OWN_POLICY => Ok(OWN_POLICY.to_owned()),
            name => PolicyName::find(name).map(PolicyName::name).map_err(|error| match error {
                Error::Config { expected, got, .. } => {
                    self.mistake("policies", format!("`{OWN_POLICY}` or {expected}"), got)
                }
                error => error,
            }),
        };
        let policies: Vec<String> = written.iter().map(name).collect::<Result<_>>()?;
        self.check_list("policies", &policies)?;
        Ok(policies)
    }

    fn evaluate(&self, written: &WrittenEvaluation) -> Result<Evaluate> {
        let WrittenEvaluation { episodes, lengths, set, metric, sample, device } = written;
        if !(1..=MAX_EPISODES).contains(episodes) {
            return Err(self.mistake("evaluate.episodes", format!("1 to {MAX_EPISODES}"), episodes));
        }
        Device::check_name(device)
            .map_err(|_| self.mistake("evaluate.device", "cpu, cuda or cuda:N", device))?;
        let set = match (set.len(), lengths.is_empty()) {
            (0, true) => None,
            (0, false) => {
                Some(("length".to_owned(), lengths.iter().map(|length| (*length).into()).collect()))
            }
            (1, true) => set.iter().next().map(|(key, values)| match values {
                Value::Array(values) => (key.clone(), values.clone()),
                one => (key.clone(), vec![one.clone()]),
            }),
            _ => {
                let expected = "one setting with its values, or `lengths`";
                return Err(self.mistake("evaluate.set", expected, "several"));
            }
        };
        if let Some((key, values)) = &set {
            self.check_list(&format!("evaluate.set.{key}"), values)?;
            if let Some(value) = values.iter().find(|value| value.to_string().contains(',')) {
                let expected = "numbers and words without commas";
                return Err(self.mistake(&format!("evaluate.set.{key}"), expected, value));
            }
        }
        Ok(Evaluate { episodes: *episodes, set, metric: *metric, sample: *sample, device: device.clone() })
    }

    /// Every key must fit one of the names, and have settings.
    fn check_patterns(&self, key: &str, patterns: &Map<String, Value>, names: &[String]) -> Result<()> {
        for (pattern, settings) in patterns {
            if !names.iter().any(|name| matches(pattern, name)) {
                let expected = format!("names or patterns of the sweep's own: {}", names.join(", "));
                return Err(self.mistake(key, expected, pattern));
            }
            if !settings.is_object() {
                let expected = "settings such as {\"train.batches\": 3000}";
                return Err(self.mistake(&format!("{key}.{pattern}"), expected, settings));
            }
        }
        Ok(())
    }

    /// Applies the settings of a run and checks that it can be trained and has an environment to be tested in.
    fn check_run(&self, task: &str, column: &Column, settings: &Merged, how: &Evaluate) -> Result<RunConfig> {
        if let Some((key, place)) = ELSEWHERE.iter().find(|(key, _)| settings.values.contains_key(*key)) {
            let at = settings.origin(key);
            return Err(self.mistake(&format!("{at}.{key}"), format!("{place} instead"), "a setting"));
        }
        let Column { policy, case } = column;
        let named = |error: Error| {
            let text = error.to_string();
            let quoted = |key: &&String| text.contains(&format!("`{key}`"));
            let key = settings.values.keys().find(quoted);
            let at = key.map(|key| format!(" (in `{}`)", settings.origin(key))).unwrap_or_default();
            let case = case.as_ref().map(|case| format!(", case {case}")).unwrap_or_default();
            Error::file(self.path, format!("{task} with policy {policy}{case}: {text}{at}"))
        };
        let config = crate::train::config_of(task)
            .and_then(|preset| overrides::apply(&preset, &changes(policy, &settings.values), self.registry))
            .map_err(named)?;
        let Some(env) = config.validation_environment(self.registry).map_err(named)? else {
            return Err(self.mistake("tasks", "presets with an environment to be tested in", task));
        };
        self.check_values(&env, how)?;
        Ok(config)
    }

    /// For every task the one whose weights it begins with.
    fn before(&self, written: &Map<String, Value>, tasks: &[String]) -> Result<Vec<Option<usize>>> {
        let mut before = vec![None; tasks.len()];
        for (task, other) in written {
            let place = |name: &str| tasks.iter().position(|task| task == name);
            let Some(i) = place(task) else {
                return Err(self.mistake("begin_with", "tasks of the sweep", task));
            };
            let Some(other) = other.as_str().and_then(place) else {
                return Err(self.mistake(&format!("begin_with.{task}"), "another task of the sweep", other));
            };
            before[i] = Some(other);
        }
        let next = |i: &usize| before[*i];
        // A task may lead into a circle that it is no part of.
        let leads_to_itself =
            |i: &usize| std::iter::successors(next(i), next).take(tasks.len()).any(|j| j == *i);
        let round = (0..tasks.len()).find(leads_to_itself);
        match round {
            Some(i) => {
                let got = format!("one that begins with {} itself", tasks[i]);
                Err(self.mistake(&format!("begin_with.{}", tasks[i]), "another task of the sweep", got))
            }
            None => Ok(before),
        }
    }

    fn check_values(&self, env: &Environment, how: &Evaluate) -> Result<()> {
        let Some((key, values)) = &how.set else { return Ok(()) };
        for value in values {
            env.with(key, value.clone()).map_err(|e| {
                let problem = format!("`evaluate.set.{key}`: {}: {e}", env.name());
                Error::file(self.path, problem)
            })?;
        }
        Ok(())
    }

    /// The groups of the file, else those of POPGym's difficulties and families; those with fewer than two tasks
    /// are left out.
    fn groups(
        &self,
        written: Option<&Map<String, Value>>,
        tasks: &[String],
    ) -> Result<Vec<(String, Vec<usize>)>> {
        let members = |fits: &dyn Fn(&str) -> bool| -> Vec<usize> {
            (0..tasks.len()).filter(|i| fits(&tasks[*i])).collect()
        };
        let mut groups = Vec::new();
        match written {
            Some(written) => {
                for (name, patterns) in written {
                    let key = format!("groups.{name}");
                    let list = patterns.as_array().map(|all| all.iter().map(Value::as_str));
                    let Some(list) = list.and_then(Iterator::collect::<Option<Vec<&str>>>) else {
                        return Err(self.mistake(&key, "a list of tasks or patterns", patterns));
                    };
                    for pattern in &list {
                        if !tasks.iter().any(|task| matches(pattern, task)) {
                            return Err(self.mistake(&key, "tasks of the sweep", pattern));
                        }
                    }
                    groups.push((
                        name.clone(),
                        members(&|task| list.iter().any(|pattern| matches(pattern, task))),
                    ));
                }
            }
            None => {
                let of = |task: &str| Task::find(task.trim_end_matches("-compat"));
                for difficulty in Difficulty::ALL {
                    let name = format!("all {}", difficulty.name());
                    let fits = |task: &str| of(task).is_some_and(|task| task.difficulty == difficulty);
                    groups.push((name, members(&fits)));
                }
                for family in Family::ALL {
                    let fits = |task: &str| of(task).is_some_and(|task| task.family == family);
                    groups.push((family.name().to_owned(), members(&fits)));
                }
                groups.push(("all tasks".to_owned(), members(&|task| of(task).is_some())));
            }
        }
        groups.retain(|(_, tasks)| tasks.len() > 1);
        Ok(groups)
    }

    fn references(
        &self,
        written: &Map<String, Value>,
        tasks: &[String],
    ) -> Result<Vec<(String, Vec<Option<f64>>)>> {
        let mut columns = Vec::new();
        for (name, numbers) in written {
            let key = format!("references.{name}");
            let Some(numbers) = numbers.as_object() else {
                return Err(self.mistake(&key, "numbers by task, such as {\"tmaze\": 0.5}", numbers));
            };
            for (task, number) in numbers {
                if !number.is_number() {
                    return Err(self.mistake(&format!("{key}.{task}"), "a number", number));
                }
                if !tasks.contains(task) && crate::train::config_of(task).is_err() {
                    return Err(self.mistake(&key, "names of presets", task));
                }
            }
            let of = |task: &String| numbers.get(task).and_then(Value::as_f64);
            columns.push((name.clone(), tasks.iter().map(of).collect()));
        }
        Ok(columns)
    }
}

/// What the runs of a sweep are made of. They are numbered by seed, then task, then column.
struct Runs<'a> {
    tasks: &'a [String],
    columns: &'a [Column],
    seeds: &'a [u64],
    /// By task and column.
    settings: Vec<Map<String, Value>>,
    /// By task: the one whose weights it begins with.
    before: Vec<Option<usize>>,
    evaluate: &'a Evaluate,
}

impl Runs<'_> {
    fn planned(&self, i: usize) -> PlannedRun {
        let each = self.settings.len();
        let (seed, task, column) =
            (self.seeds[i / each], i % each / self.columns.len(), i % self.columns.len());
        let mut settings = self.settings[i % each].clone();
        let before = self.before[task].map(|other| i / each * each + other * self.columns.len() + column);
        if let Some(before) = before {
            settings.insert(BEGIN_WITH.to_owned(), self.planned(before).folder.into());
        }
        let (name, Column { policy, case }) = (&self.tasks[task], &self.columns[column]);
        let id = id_of(name, policy, seed, &settings, self.evaluate);
        let case = case.as_ref().map(|case| format!("-{}", plain(case))).unwrap_or_default();
        let folder = format!("{}-{policy}{case}-seed-{seed}-{id}", plain(name));
        PlannedRun { id, task, column, seed, settings, before, folder }
    }
}

/// Settings from several places of the file, later ones over earlier ones.
#[derive(Default)]
struct Merged {
    values: Map<String, Value>,
    origins: Map<String, Value>,
}

impl Merged {
    fn add(&mut self, place: &str, settings: &Map<String, Value>) {
        for (key, value) in settings {
            self.values.insert(key.clone(), value.clone());
            self.origins.insert(key.clone(), place.into());
        }
    }

    fn add_matching(&mut self, place: &str, patterns: &Map<String, Value>, name: &str) {
        for (pattern, settings) in patterns.iter().filter(|(pattern, _)| matches(pattern, name)) {
            if let Some(settings) = settings.as_object() {
                self.add(&format!("{place}.{pattern}"), settings);
            }
        }
    }

    fn origin(&self, key: &str) -> &str {
        self.origins.get(key).and_then(Value::as_str).unwrap_or_default()
    }
}

/// A run's id: FNV-1a of what decides its result, as JSON with sorted settings. Where it computes is not part of it.
fn id_of(task: &str, policy: &str, seed: u64, settings: &Map<String, Value>, how: &Evaluate) -> String {
    let mut settings: Vec<_> = settings.iter().filter(|(key, _)| *key != "eval.device").collect();
    settings.sort_by_key(|(key, _)| *key);
    let text = json!([task, policy, seed, settings, how]).to_string();
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// A name as part of a file's name.
fn plain(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = name.chars().map(|c| if fits(c) { c } else { '-' }).take(60).collect();
    name.trim_matches(['-', '.']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, fits) in [
            ("popgym-*Easy", "popgym-AutoencodeEasy", true),
            ("popgym-*Easy", "popgym-AutoencodeEasy-compat", false),
            ("*Pendulum*", "popgym-PositionOnlyPendulumHard", true),
            ("tmaze", "tmaze-quick", false),
            ("*a*b", "aab", true),
            ("*é*", "caféine", true),
            ("", "", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn ids_follow_from_what_decides_a_result_alone() {
        let how = Evaluate { episodes: 10, set: None, metric: None, sample: false, device: "cpu".to_owned() };
        let map = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        let (a, b) = (
            map(r#"{"train.lr": 1e-3, "train.batches": 9}"#),
            map(r#"{"train.batches": 9, "train.lr": 1e-3}"#),
        );
        let id = id_of("tmaze", "dt", 0, &a, &how);
        assert_eq!(id, id_of("tmaze", "dt", 0, &b, &Evaluate { device: "cuda".to_owned(), ..how.clone() }));
        assert_ne!(id, id_of("tmaze", "dt", 1, &a, &how));
        assert_ne!(id, id_of("tmaze", "dt", 0, &map(r#"{"train.lr": 1e-3}"#), &how));
        assert_ne!(id, id_of("tmaze", "dt", 0, &a, &Evaluate { episodes: 11, ..how.clone() }));
        // Results in repositories are found again by these numbers.
        assert_eq!(id_of("tmaze", "dt", 0, &Map::new(), &how), "fc7804e25f4225be");
    }

    #[test]
    fn names_of_cases_become_names_of_files() {
        assert_eq!(plain("no start flag / λ=0.5"), "no-start-flag-----0.5");
        assert_eq!(plain("../.."), "");
    }
}
