//! From settings to what a run needs: devices opened, demonstrations played or read, episodes held out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::files::read_small;
use elmur_base::{FieldMut, Leaf, Stop};
use elmur_data::collect::{Demonstrations, noted_settings};
use elmur_data::{Dataset, Limits, ObservationKey, Part, Source, Stream, split, wrap};
use elmur_engine::{Device, Store};
use elmur_envs::{EnvSpec, Environment, Registry, Wrappers};
use elmur_model::ends::Encoder;
use elmur_model::window::{Begin, training_graph};
use elmur_model::{Checkpoint, init};
use serde_json::Value;

use crate::config::{Judge, RunConfig, below_model};
use crate::error::{Error, Result};
use crate::faster::faster_device;
use crate::folder::{MAX_SMALL, RunFolder};

/// Name of whichever device acts faster.
pub(crate) const AUTO: &str = "auto";

/// Most bytes of pictures that demonstrations played for a run may have: they are kept in memory.
const MOST_PIXELS: u64 = 4 << 30;

/// The devices of a run, open.
#[derive(Debug, Clone)]
pub struct Devices {
    /// The device that trains.
    pub train: Device,
    /// The device that evaluates meanwhile; none: the one that trains.
    pub eval: Option<Device>,
}

impl Devices {
    /// Opens the devices that a config names.
    pub fn open(config: &RunConfig) -> Result<Self> {
        let t = &config.train;
        let open =
            |key: &str, name: &str| match Device::open(name, t.threads.unwrap_or(0), t.precision.into()) {
                // A device that this build or machine lacks is as much a mistake in the config as an unknown
                // name.
                Err(elmur_engine::Error::Device { expected, got }) => Err(Error::config(key, expected, got)),
                opened => Ok(opened?),
            };
        let train = open("train.device", &t.device)?;
        let eval = match config.eval.device.as_deref() {
            Some(AUTO) => Self::faster_for(config, &train)?,
            Some(name) if name != t.device => Some(open("eval.device", name)?),
            _ => None,
        };
        Ok(Self { train, eval })
    }

    /// The device that acts faster than the one that trains, if there is one: the CPU beside a GPU, or a GPU
    /// beside the CPU.
    fn faster_for(config: &RunConfig, train: &Device) -> Result<Option<Device>> {
        let (t, policy) = (&config.train, &config.model);
        let other = if train.is_cpu() { "cuda" } else { "cpu" };
        // Without a GPU there is nothing to choose.
        let Ok(other) = Device::open(other, t.threads.unwrap_or(0), t.precision.into()) else {
            return Ok(None);
        };
        let params = init::parameters(policy.architecture(), t.seed)?;
        let devices = [train.another()?, other];
        let chosen = faster_device(policy, &params, config.eval.episodes, t.threads, &devices)?;
        Ok(chosen.filter(|chosen| chosen.is_cpu() != train.is_cpu()).cloned())
    }

    /// Opens the same devices with queues of their own, so that a second run can compute at the same time.
    pub fn another(&self) -> Result<Self> {
        let eval = self.eval.as_ref().map(Device::another).transpose()?;
        Ok(Self { train: self.train.another()?, eval })
    }
}

/// Everything that a run needs besides devices and a folder.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The settings, with encoders and head that fit the data, with what policies are judged on and, for
    /// policies with return tokens, with the return that they are asked for.
    pub config: RunConfig,
    /// The episodes to learn from.
    pub data: Arc<dyn Source>,
    /// Fresh episodes to learn from instead, played without end (`data.stream`).
    pub stream: Option<Stream>,
    /// Recorded episodes that policies are judged on, if they are judged on data.
    pub held_out: Option<Arc<dyn Source>>,
    /// The environment that policies are judged in, if they are not judged on data.
    pub validation: Option<Environment>,
    /// The weights that a new run begins with instead of fresh ones ([`Prepared::read_first_weights`]).
    pub first_weights: Option<Store>,
    /// What a user should know about the choices that were made.
    pub notes: Vec<String>,
}

impl RunConfig {
    /// Reads the config of a run from a JSON file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_small(path, MAX_SMALL)?;
        let mut tree: Value =
            serde_json::from_str(&text).map_err(|e| Error::file(path, format!("not JSON: {e}")))?;
        modernise(&mut tree);
        serde_json::from_value(tree).map_err(|e| Error::file(path, format!("not a run's config: {e}")))
    }

    /// The weights that the run begins with if these are not fresh ones (`train.begin_with`).
    pub fn first_weights(&self) -> Result<Option<Store>> {
        Ok(self.noted_weights()?.map(|(weights, _)| weights))
    }

    /// [`RunConfig::first_weights`], with a note of what is left out.
    fn noted_weights(&self) -> Result<Option<(Store, Option<String>)>> {
        let Some(folder) = self.first_checkpoint()? else { return Ok(None) };
        self.weights_of(Checkpoint::load(&folder)?, &folder.display().to_string()).map(Some)
    }

    /// Another policy's parameters as those of this run's policy, which must have the same by names and shapes, or see
    /// one of the observations that the other sees ([`Checkpoint::seeing_only`]); and a note of what is left out then.
    /// Errors call the other policy `whose`.
    pub fn weights_of(&self, theirs: Checkpoint, whose: &str) -> Result<(Store, Option<String>)> {
        let ours = self.model.architecture().ends().observation;
        let seen = theirs.config.architecture().ends().observation;
        if seen.len() <= ours.len() {
            self.check_weights(&theirs.params, whose)?;
            return Ok((theirs.params, None));
        }
        let (seen, alone) = (described(seen), described(ours));
        let fewer = match ours {
            [ours] => theirs.seeing_only(ours)?,
            _ => None,
        };
        let Some(weights) = fewer else {
            let expected = "a policy of the same observations, or one that sees plain numbers beside the only one of \
                            this run, which is a vector or a residual_image";
            let got = format!("{seen} in {whose}; the run sees {alone}");
            return Err(Error::config("train.begin_with", expected, got));
        };
        self.check_weights(&weights, whose)?;
        let note = format!(
            "begins with the weights of a policy that sees {seen}; of these it sees {alone} alone, and the others \
             count as 0"
        );
        Ok((weights, Some(note)))
    }

    /// The checkpoint that the run begins with (`train.begin_with`); an error if there is none.
    pub fn first_checkpoint(&self) -> Result<Option<PathBuf>> {
        let Some(path) = &self.train.begin_with else { return Ok(None) };
        let folder = if RunFolder::is_run(path) { RunFolder::open(path)?.best() } else { path.clone() };
        if folder.is_dir() {
            return Ok(Some(folder));
        }
        let got = format!("{}, where none is", path.display());
        Err(Error::config("train.begin_with", "a run with a checkpoint, or a checkpoint", got))
    }

    /// Refuses weights, which errors call `whose`, that are not those of this run's policy by names and shapes.
    fn check_weights(&self, theirs: &Store, whose: &str) -> Result<()> {
        let ours = init::parameters(self.model.architecture(), self.train.seed)?;
        let names: BTreeSet<String> = ours.names().into_iter().chain(theirs.names()).collect();
        let shape = |store: &Store, name: &str| store.ty(name).ok().map(|ty| ty.shape);
        let Some(name) = names.iter().find(|name| shape(&ours, name) != shape(theirs, name)) else {
            return Ok(());
        };
        let shown = |store| shape(store, name).map_or("none".to_owned(), |shape| format!("{shape:?}"));
        let expected = format!("weights of a policy with the run's parameters: `{name}` {}", shown(&ours));
        Err(Error::config("train.begin_with", expected, format!("`{name}` {} in {whose}", shown(theirs))))
    }

    /// Plays or reads the demonstrations that the config names and finds out what policies are judged on.
    /// `keep_ends`: do not derive encoders and head from the data.
    pub fn prepare(&self, registry: &Registry, keep_ends: bool) -> Result<Prepared> {
        self.prepare_watched(registry, keep_ends, &Stop::default(), &mut |_| {})
    }

    /// Like [`RunConfig::prepare`], and calls `progress` with the number of episodes played so far; `stop` ends
    /// it.
    pub fn prepare_watched(
        &self,
        registry: &Registry,
        keep_ends: bool,
        stop: &Stop,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Prepared> {
        self.validate()?;
        let environment = self.environment(registry)?;
        let Some(file) = &self.data.file else {
            let Some(environment) = environment else {
                let expected =
                    "a dataset (--data PATH): there is no environment whose player could demonstrate";
                return Err(Error::config("data.file", expected, "null"));
            };
            let data = self.play(&environment, stop, progress)?;
            let mut prepared = Prepared::new(self.clone(), data, registry, keep_ends)?;
            prepared.stream = prepared.config.stream(registry, &*prepared.data)?;
            return Ok(prepared);
        };
        // Arrays do not tell their spaces: they are the environment's, if they fit. Who wants to be judged in
        // the environment says that they must.
        let known = environment.as_ref().map(|environment| environment.plain().spaces().clone());
        if !file.exists() {
            let problem = "no such dataset; say with --data PATH where the data lie, or collect some with `elmur collect`";
            return Err(Error::file(file, problem));
        }
        let (selection, limits) = (self.data.selection(), Limits::default());
        let open = |known| elmur_data::open_selected(file, known, &selection, &limits);
        let (mut config, mut note, mut refused) = (self.clone(), None, None);
        let mut data = match open(known.as_ref()) {
            Err(error) if known.is_some() => {
                let must_fit = self.eval.on == Some(Judge::Env);
                match open(None) {
                    Err(_) if must_fit => return Err(error.into()),
                    data => {
                        refused = must_fit.then_some(error);
                        data?
                    }
                }
            }
            opened => opened?,
        };
        if let Some((environment, changes)) = as_shown(environment.as_ref(), registry, &*data)
            && let Ok(fitting) = open(Some(environment.plain().spaces()))
            && fitting.spaces().observation == environment.plain().spaces().observation
        {
            (data, refused) = (fitting, None);
            config.env = Some(environment.spec().clone());
            config.complete(registry, keep_ends)?;
            note = Some(format!("the data show what the environment shows with {changes}, which it now has"));
        }
        if let Some(error) = refused {
            return Err(error.into());
        }
        let mut prepared = Prepared::new(config, data, registry, keep_ends)?;
        prepared.notes.splice(0..0, note);
        Ok(prepared)
    }

    /// Demonstrations without end, where they are asked for. They begin behind those of `data.episodes`.
    fn stream(&self, registry: &Registry, data: &dyn Source) -> Result<Option<Stream>> {
        let Some(environment) = self.environment(registry)?.filter(|_| self.data.stream) else {
            return Ok(None);
        };
        let window = self.model.architecture().window();
        let crops = |episode: usize| data.steps(episode).div_ceil(self.crop().max(1));
        let crops: usize = (0..data.episodes()).map(crops).sum();
        // Where the CPU trains, its cores are busy.
        let threads = if self.train.device == "cpu" { 1 } else { self.train.threads.unwrap_or(0) };
        Ok(Some(Stream {
            environment,
            seed: self.data.seed,
            first: self.data.episodes as u64,
            noise: self.data.noise,
            ties: self.data.ties,
            length: self.crop(),
            lead: window.lead,
            anywhere: window.anywhere,
            crops_per_episode: crops / data.episodes().max(1),
            longest: (0..data.episodes()).map(|episode| data.steps(episode)).max().unwrap_or(0),
            own: None,
            threads,
        }))
    }

    /// Demonstrations by the environment's player.
    fn play(
        &self,
        environment: &Environment,
        stop: &Stop,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Arc<dyn Source>> {
        // Pictures of thousands of episodes are kept on disk, not in memory.
        let pixels = environment.plain().spaces().observation.widths().bytes as u64;
        let steps = environment.facts().max_steps.unwrap_or(0).saturating_mul(self.data.episodes as u64);
        if steps.saturating_mul(pixels) > MOST_PIXELS {
            let (name, episodes) = (environment.name(), self.data.episodes);
            let known = environment.settings();
            let own = |(key, value): &(&String, &Value)| {
                known
                    .iter()
                    .any(|known| known.key == **key && known.shapes_episodes && known.default != **value)
            };
            let own = environment.spec().settings.iter().filter(own);
            let settings: String = own.map(|(key, value)| format!(" --set {key}={value}")).collect();
            let expected = format!(
                "recorded demonstrations: `elmur collect {name} --episodes {episodes}{settings} --out FILE`, then \
                 --data FILE; or fewer of them (data.episodes), at most {} GB of pictures",
                MOST_PIXELS >> 30
            );
            let got = format!("none, and {episodes} episodes to be kept in memory");
            return Err(Error::config("data.file", expected, got));
        }
        let demonstrations = Demonstrations {
            environment,
            episodes: 0..self.data.episodes,
            seed: self.data.seed,
            noise: self.data.noise,
            threads: self.train.threads.unwrap_or(0),
            stop: stop.clone(),
        };
        let mut episodes = Vec::with_capacity(self.data.episodes.min(1 << 20));
        demonstrations.collect(|episode| {
            episodes.push(episode);
            progress(episodes.len());
            if stop.requested() { Err(elmur_data::Error::Stopped) } else { Ok(()) }
        })?;
        let spaces = environment.plain().spaces().clone();
        Ok(Arc::new(Dataset::from_episodes(spaces, demonstrations.metadata(), episodes)?))
    }
}

impl Prepared {
    /// Reads the weights that a new run begins with, before anything is written: they may lie where it will. Notes what
    /// of the other policy is left out.
    pub fn read_first_weights(&mut self) -> Result<()> {
        if let Some((weights, note)) = self.config.noted_weights()? {
            self.notes.extend(note);
            self.first_weights = Some(weights);
        }
        Ok(())
    }

    /// A run on the given episodes, wherever they come from. `keep_ends`: do not derive encoders and head
    /// from them.
    ///
    /// Policies are judged as `eval.on` says. Without it: in the config's environment if the data say that
    /// they were recorded there and it can be played here, else on episodes that are held out.
    pub fn new(
        mut config: RunConfig,
        data: Arc<dyn Source>,
        registry: &Registry,
        keep_ends: bool,
    ) -> Result<Self> {
        config.validate()?;
        // The run is found again from anywhere, so what it begins with must be too.
        if let Some(path) = &mut config.train.begin_with {
            *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone());
        }
        let mut notes = Vec::new();
        if data.torn_bytes() > 0 {
            let bytes = data.torn_bytes();
            notes.push(format!("the data end in a torn record: {bytes} bytes are not read"));
        }
        let mut environment = config.environment(registry)?;
        if let (Some(environment), Some(recorded)) = (&environment, data.metadata().get("env"))
            && recorded != environment.name()
        {
            let name = environment.name();
            notes.push(format!(
                "the data were recorded in {recorded}, and the run is of {name}: is that meant?"
            ));
        }
        match as_recorded(environment.as_ref(), registry, &*data) {
            Ok(recorded) => {
                if let Some((spec, changes)) = recorded.taken {
                    config.env = Some(spec);
                    config.complete(registry, keep_ends)?;
                    environment = config.environment(registry)?;
                    notes.push(format!(
                        "the data were recorded with {changes}, which the environment now has too (eval.settings.KEY \
                         chooses what policies are judged with)"
                    ));
                }
                if !recorded.left.is_empty() {
                    notes.push(format!(
                        "the data were recorded with {}, and the run's environment has other values of its own",
                        recorded.left
                    ));
                }
            }
            Err(error) => notes.push(format!(
                "the environment cannot have the settings that the data were recorded with, and keeps its own: {error}"
            )),
        }
        let recorded_there = environment.as_ref().is_some_and(|environment| {
            data.metadata().get("env").is_some_and(|name| name == environment.name())
        });
        let missing = environment.as_ref().and_then(|environment| environment.available().err());
        let on = match (config.eval.on, missing) {
            (Some(Judge::Env), Some(error)) => return Err(error.into()),
            (None, Some(error)) if recorded_there => {
                notes.push(format!("judged on data: {error}"));
                Judge::Data
            }
            (on, _) => on.unwrap_or(if recorded_there { Judge::Env } else { Judge::Data }),
        };
        config.eval.on = Some(on);
        let data = match &environment {
            Some(environment)
                if !environment.spec().wrappers.is_none()
                    && *data.spaces() == *environment.plain().spaces() =>
            {
                wrap(&data, environment.spec().wrappers)?
            }
            _ => data,
        };
        match (&environment, on) {
            (Some(environment), Judge::Env) => config.env = Some(environment.spec().clone()),
            (None, Judge::Env) => {
                return Err(Error::config("env", "an environment, for eval.on=env", "null"));
            }
            (_, Judge::Data) => {
                if !keep_ends {
                    config.model.fit_to(data.spaces()).map_err(below_model)?;
                }
                let ends = config.model.architecture().ends();
                let mut by_error = data.episodes() < 2;
                if let Some(environment) = &environment
                    && ends.check(environment.spaces(), "environment").is_err()
                {
                    notes.push(format!(
                        "the data show {}, {} shows {}: the run is without environment (data.keys says what is read and \
                         in which order, env.KEY=VALUE changes what an environment shows)",
                        data.spaces().observation,
                        environment.name(),
                        environment.spaces().observation
                    ));
                    config.env = None;
                    by_error |= !ends.action.is_discrete();
                }
                if let Some(environment) = environment.filter(|_| by_error)
                    && config.eval.target.take().is_some()
                {
                    notes.push(format!(
                        "the target of {} is none for errors; with env=null, eval.target=X sets one",
                        environment.name()
                    ));
                }
            }
        }
        let architecture = config.model.architecture();
        architecture.ends().check(data.spaces(), "dataset")?;
        if !has_imitated(&*data)? {
            return Err(Error::config("data", "at least one action to imitate", "none in all episodes"));
        }
        let settings = config.train.program_settings(None);
        training_graph(architecture, &settings, Begin::Fresh)?;
        check_hidden(&config)?;
        let (data, held_out, validation) = match on {
            Judge::Env => (data, None, config.validation_environment(registry)?),
            Judge::Data if data.episodes() < 2 => {
                notes
                    .push("a single episode leaves none to judge on: judged by its training loss".to_owned());
                (data, None, None)
            }
            Judge::Data => {
                // At least one episode, however few there are.
                let share = config.data.held_out.max(1.0 / data.episodes() as f64);
                let (train, held_out) = split(&data, share, u64::from(config.data.seed))?;
                notes.push(format!(
                    "judged on {} held-out episodes of {} (data.held_out, eval.on)",
                    held_out.episodes(),
                    train.episodes() + held_out.episodes()
                ));
                (train, Some(held_out), None)
            }
        };
        if let Some(validation) = &validation {
            architecture.ends().check(validation.spaces(), "environment")?;
        }
        if !config.model.architecture().aims_at_return() {
            if config.eval.target_return.is_some() {
                let kind = config.model.kind();
                notes.push(format!(
                    "a policy of kind {kind} does not aim at a given return: eval.target_return has no effect"
                ));
            }
        } else if config.eval.target_return.is_none() {
            let best = data.summary()?.returns.max;
            config.eval.target_return = Some(best);
            // Sums of 0 and 1 are whole numbers.
            let is_success = |spec: &EnvSpec| spec.settings.get("reward").is_some_and(|r| r == "success");
            if best.fract() != 0.0 && config.env.as_ref().is_some_and(is_success) {
                notes.push(format!(
                    "policies are asked for the data's best return, {best:.3}, but the data's rewards are others than \
                     the environment's, which are 0 and 1: env.reward=dense gives it such rewards, eval.target_return=X \
                     asks for another return"
                ));
            }
        }
        Ok(Self { config, data, stream: None, held_out, validation, first_weights: None, notes })
    }
}

/// Refuses to hide what is not there (`data.hide`), and to hide only a part of what is beside pictures.
pub(crate) fn check_hidden(config: &RunConfig) -> Result<()> {
    if config.data.hide == 0.0 {
        return Ok(());
    }
    let seen = config.model.architecture().ends().observation;
    let (pictures, others): (Vec<_>, Vec<_>) = seen.iter().partition(|encoder| encoder.is_image());
    let are_numbers = others.iter().all(|encoder| matches!(encoder, Encoder::Vector { .. }));
    if config.train.standardize {
        let expected =
            "0, or train.standardize=false: what is hidden is 0, which standardized numbers may be far from";
        return Err(Error::config("data.hide", expected, config.data.hide));
    }
    if !pictures.is_empty() && !others.is_empty() && are_numbers {
        return Ok(());
    }
    let expected =
        "0, or pictures with numbers beside them and nothing else (data.keys chooses what a policy sees)";
    let got = format!("{} with {}", config.data.hide, described(seen));
    Err(Error::config("data.hide", expected, got))
}

/// Encoders by their names in configs.
fn described(encoders: &[Encoder]) -> String {
    let name = |encoder: &Encoder| match serde_json::to_value(encoder) {
        Ok(Value::Object(fields)) => fields.keys().next().cloned().unwrap_or_default(),
        _ => String::new(),
    };
    encoders
        .iter()
        .map(|encoder| format!("{} {:?}", name(encoder), encoder.shape()))
        .collect::<Vec<_>>()
        .join(" and ")
}

/// What the data say of the environment that they were recorded in, where it differs from the run's.
#[derive(Default)]
struct Recorded {
    /// The environment with what is taken over, and what that is; none: it stays as it is.
    taken: Option<(EnvSpec, String)>,
    /// What is not taken over.
    left: String,
}

/// The settings that the data were recorded with, by what they say: all of them where the environment would show
/// something else without, and otherwise those that the run has left at their defaults. Settings that the environment
/// cannot have are an error.
fn as_recorded(
    environment: Option<&Environment>,
    registry: &Registry,
    data: &dyn Source,
) -> Result<Recorded> {
    let Some(environment) = environment else { return Ok(Recorded::default()) };
    let notes = data.metadata();
    let fits = |environment: &Environment| {
        data.spaces() == environment.spaces() || data.spaces() == environment.plain().spaces()
    };
    if notes.get("env").is_none_or(|name| name != environment.name()) {
        return Ok(Recorded::default());
    }
    let mut wrapped = environment.spec().clone();
    let mut changes = Vec::new();
    if let Some(names) = notes.get("wrappers") {
        let names: Vec<&str> = names.split(", ").collect();
        let wrappers = Wrappers::named(&names)?;
        if wrappers != wrapped.wrappers {
            changes.push(format!("wrappers {}", names.join(" and ")));
            wrapped = wrapped.with_wrappers(wrappers);
        }
    }
    // An observation that a setting adds may not be read (`data.keys`).
    let read = ObservationKey::of(notes, &data.spaces().observation);
    let named = ObservationKey::are_noted(notes);
    let adds_observation = |key: &str| {
        let with = environment.with(key, true);
        with.is_ok_and(|with| with.facts().observations.iter().any(|shown| shown.name == key))
    };
    let own = &environment.spec().settings;
    let differing: Vec<(&str, Value)> = noted_settings(environment, notes)
        .into_iter()
        .map(|(key, value)| {
            let unread =
                named && value == true && read.iter().all(|shown| shown.name != key) && adds_observation(key);
            (key, if unread { Value::Bool(false) } else { value })
        })
        .filter(|(key, value)| own.get(*key) != Some(value))
        .collect();
    let shown = |(key, value): &(&str, Value)| format!("{key}={value}");
    let with = |spec: EnvSpec, settings: &[(&str, Value)]| {
        settings.iter().fold(spec, |spec, (key, value)| spec.with(*key, value.clone()))
    };
    let found = registry.find(&with(wrapped, &differing))?;
    let alike = fits(environment) && found.facts().thinning == environment.facts().thinning;
    if !alike {
        changes.extend(differing.iter().map(shown));
        let taken = (fits(&found) && !changes.is_empty()).then(|| (found.spec().clone(), changes.join(", ")));
        return Ok(Recorded { taken, ..Recorded::default() });
    }
    let known = environment.settings();
    let is_default = |key: &str| known.iter().any(|s| s.key == key && own.get(key) == Some(&s.default));
    let (free, chosen): (Vec<_>, Vec<_>) = differing.into_iter().partition(|(key, _)| is_default(key));
    let list = |settings: &[(&str, Value)]| settings.iter().map(shown).collect::<Vec<_>>().join(", ");
    let taken = match free.is_empty() {
        true => None,
        false => Some((registry.find(&with(environment.spec().clone(), &free))?.spec().clone(), list(&free))),
    };
    Ok(Recorded { taken, left: list(&chosen) })
}

/// The environment that shows what data show which say nothing of its settings: observations that settings of the same
/// names add, pictures of another `size`; and what differs.
fn as_shown(
    environment: Option<&Environment>,
    registry: &Registry,
    data: &dyn Source,
) -> Option<(Environment, String)> {
    let (environment, notes) = (environment?, data.metadata());
    let seen = &data.spaces().observation;
    let is_other = notes.get("env").is_some_and(|name| name != environment.name());
    if is_other
        || [environment.spaces(), environment.plain().spaces()]
            .iter()
            .any(|spaces| spaces.observation == *seen)
        || as_recorded(Some(environment), registry, data).is_ok_and(|recorded| recorded.taken.is_some())
    {
        return None;
    }
    let read = ObservationKey::of(notes, seen);
    let is_shown = |name: &str| environment.facts().observations.iter().any(|shown| shown.name == name);
    // Arrays that are read without an environment's spaces are numbers, whatever their type.
    let side = seen.leaves().iter().find_map(|leaf| match *leaf {
        Leaf::Bytes { shape: &[_, height, width] } | Leaf::Floats { shape: &[_, height, width], .. } => {
            (height == width).then_some(height)
        }
        _ => None,
    });
    let mut spec = environment.spec().clone();
    let mut changes = Vec::new();
    for setting in environment.settings() {
        let key = setting.key;
        let is_read = read.iter().any(|shown| shown.name == key);
        let wanted = match (&setting.default, side) {
            (Value::Bool(_), _) if is_read || is_shown(key) => Value::Bool(is_read),
            (Value::Number(_), Some(side)) if key == "size" => Value::from(side),
            _ => continue,
        };
        if *spec.settings.get(key).unwrap_or(&setting.default) != wanted {
            changes.push(format!("{key}={wanted}"));
            spec = spec.with(key, wanted);
        }
    }
    let shown = registry.find(&spec).ok().filter(|_| !changes.is_empty())?;
    Some((shown, changes.join(", ")))
}

/// Whether any action of the data is to be imitated.
fn has_imitated(data: &dyn Source) -> Result<bool> {
    for episode in 0..data.episodes() {
        let outline = data.outline(episode);
        if !outline.marked {
            return Ok(true);
        }
        let mut marks = vec![false; outline.steps];
        data.read(Part::Imitate, episode, 0..outline.steps, FieldMut::Bool(&mut marks))?;
        if marks.contains(&true) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Earlier configs have every setting of every environment, with these values where they mean nothing.
fn modernise(config: &mut Value) {
    let Some(env) = config.get_mut("env").and_then(Value::as_object_mut) else { return };
    if !env.contains_key("length") || !env.contains_key("version") {
        return;
    }
    if env.get("length").is_some_and(|length| *length == 0) {
        env.remove("length");
    }
    let popgym = env.get("name").and_then(Value::as_str).is_some_and(|name| name.starts_with("popgym-"));
    if !popgym {
        env.remove("version");
    }
}
