//! `elmur eval`: how well checkpoints act on episodes that no choice has seen, or predict recorded actions.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use elmur_base::{Spaces, Statistics, Stop};
use elmur_data::{Limits, Selection, Source, Subset};
use elmur_engine::{Device, Precision};
use elmur_envs::{EnvSpec, Environment, Metric};
use elmur_model::session::Weights;
use elmur_model::{Checkpoint, checkpoint};
use elmur_train::{
    Error, Evaluation, Measure, OfflineEvaluation, Outcome, Result, RunConfig, RunFolder, Score, Seeds,
    evaluate, evaluate_offline, faster_device,
};
use serde_json::{Value, json};

use crate::device::DeviceArgs;
use crate::progress::Bar;
use crate::train::checkpoint_of;
use crate::{Context, say};

/// Options of `elmur eval`.
#[derive(clap::Args)]
pub struct Args {
    /// Runs or checkpoints. Several count as runs of one experiment: mean and standard error are taken across
    /// them.
    #[arg(required = true)]
    checkpoints: Vec<PathBuf>,
    /// Evaluate in this environment; default: the environment the run was trained in. If it is that one, it has the
    /// run's settings, else their defaults (--set).
    #[arg(long)]
    env: Option<String>,
    /// Evaluate on the recorded episodes of this dataset instead: accuracy of discrete actions, mean squared
    /// error of continuous ones.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["env", "set", "lengths", "sample", "plot", "metric", "target_return"])]
    data: Option<PathBuf>,
    /// Evaluate at these values of a setting of the environment: KEY=V1,V2. Give it once per setting; one of
    /// them may have several values.
    #[arg(long, value_name = "KEY=VALUES", conflicts_with = "lengths")]
    set: Vec<String>,
    /// T-Maze: evaluate at these episode lengths, such as 9,30,900 (as --set length=9,30,900); default: that of
    /// the run's validation.
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<u64>,
    /// Act out this many episodes per run; default: 100. With --data: judge the first N episodes; default:
    /// all.
    #[arg(long, value_name = "N", value_parser = crate::count(1 << 24))]
    episodes: Option<usize>,
    /// Judge all runs by this measure; default: that of the runs' validation if they agree, else that of the
    /// environment.
    #[arg(long, value_enum)]
    metric: Option<MetricName>,
    /// Ask policies with return tokens for this return; default: what the run's validation asks for
    /// (eval.target_return), else the return of a very good episode. Other policies do not read it.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = finite)]
    target_return: Option<f64>,
    /// Act out the test episodes of this run number first: checkpoint i of the list has those of run N + i.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "data")]
    first_run: u32,
    /// Draw actions from the policy's probabilities instead of taking the likeliest.
    #[arg(long)]
    sample: bool,
    /// Use this many threads; 0: as many as are granted. Results do not depend on it, but for the last bits where a GPU
    /// acts beside simulators.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Keep the weights of linear layers as f32 or, on a CPU, as bf16 while the policy acts.
    #[arg(long, default_value = "f32", value_parser = crate::weights, conflicts_with = "data")]
    weights: Weights,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON lines: one object per checkpoint and value, then one per value with the mean over all
    /// checkpoints.
    #[arg(long)]
    json: bool,
    /// Draw the score by episode length: write PATH.svg and PATH.png.
    #[arg(long, value_name = "PATH")]
    plot: Option<PathBuf>,
    /// Stop when the process that started this one has ended.
    #[arg(long)]
    die_with_parent: bool,
}

/// What episodes are judged by, as --metric names it.
#[derive(Clone, Copy, clap::ValueEnum)]
enum MetricName {
    /// Mean sum of an episode's rewards.
    Return,
    /// Share of episodes that solved the task.
    Success,
}

impl From<MetricName> for Metric {
    fn from(name: MetricName) -> Self {
        match name {
            MetricName::Return => Metric::Return,
            MetricName::Success => Metric::Success,
        }
    }
}

/// Parses a finite number.
fn finite(text: &str) -> Result<f64, String> {
    let number = text.parse::<f32>().ok().filter(|number| number.is_finite());
    number.and(text.parse().ok()).ok_or_else(|| "expected a finite number, such as 1 or -0.5".to_owned())
}

/// Number of episodes per run without --episodes.
const EPISODES: usize = 100;

/// A checkpoint, and the config of its run if it lies in one.
pub struct Policy {
    path: PathBuf,
    /// The policy and its parameters.
    pub checkpoint: Checkpoint,
    run: Option<RunConfig>,
}

impl Policy {
    /// The return that the policy's validation asked for, in the environment it was trained in.
    pub fn target_return(&self, env: &Environment) -> Option<f64> {
        let run = self.run.as_ref()?;
        run.eval.target_return.filter(|_| run.env.as_ref().is_some_and(|trained| trained.name == env.name()))
    }

    /// Whether the policy aims at the return that it is asked for.
    fn aims_at_return(&self) -> bool {
        self.checkpoint.config.architecture().aims_at_return()
    }
}

/// Runs `elmur eval`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    if args.die_with_parent {
        crate::signals::stop_with_parent(&context.stop);
    }
    let mut policies: Vec<Policy> = args.checkpoints.iter().map(|path| load(path)).collect::<Result<_>>()?;
    let device = match args.device.name() {
        "auto" => faster(args, &policies)?,
        _ => args.device.open(args.threads)?,
    };
    if !device.is_cpu() {
        for policy in &mut policies {
            let params = policy.checkpoint.params.to(&device).map_err(elmur_model::Error::from)?;
            policy.checkpoint.params = params;
        }
    }
    match &args.data {
        Some(data) => on_data(args, &policies, data, &device, context),
        None => in_environment(args, &policies, &device, context),
    }
}

/// The device that is faster for the first policy; the CPU where there is no GPU.
fn faster(args: &Args, policies: &[Policy]) -> Result<Device> {
    let cpu = Device::open("cpu", args.threads, Precision::default())?;
    let (Some(policy), Ok(gpu)) =
        (policies.first(), Device::open("cuda", args.threads, args.device.precision()?))
    else {
        return Ok(cpu);
    };
    let (threads, devices) = ((args.threads > 0).then_some(args.threads), [cpu, gpu]);
    let Checkpoint { config, params, .. } = &policy.checkpoint;
    let chosen = faster_device(config, params, args.episodes.unwrap_or(100), threads, &devices)?;
    let chosen = chosen.unwrap_or(&devices[0]).clone();
    crate::note(&format!(
        "acting on the {}, which is faster here",
        if chosen.is_cpu() { "CPU" } else { "GPU" }
    ));
    Ok(chosen)
}

/// Loads a checkpoint, or the best one of a run.
pub fn load(path: &Path) -> Result<Policy> {
    if !path.exists() {
        let problem = "no such run or checkpoint; train one with `elmur train`, or see `elmur demo`";
        return Err(Error::file(path, problem));
    }
    if !RunFolder::is_run(path) && !checkpoint::is_checkpoint(path) {
        let parent = path.parent().unwrap_or(Path::new("."));
        let problem = if RunFolder::is_run(parent) || checkpoint::is_checkpoint(parent) {
            format!("a part of {0}; give that folder: elmur eval {0}", parent.display())
        } else {
            "neither a run nor a checkpoint; train one with `elmur train`, or see `elmur demo`".to_owned()
        };
        return Err(Error::file(path, problem));
    }
    let (path, run) = checkpoint_of(path);
    if let Some(run) = run.as_ref().filter(|_| !path.exists()) {
        return Err(no_checkpoint(&path, run));
    }
    let checkpoint = Checkpoint::load(&path)?;
    // Folders for a hub have the settings beside the checkpoint.
    let settings = path.join(crate::export::SETTINGS);
    let run = match run {
        Some(run) => run.config().ok(),
        None => settings.is_file().then(|| RunConfig::read(&settings)).transpose()?,
    };
    Ok(Policy { path, checkpoint, run })
}

/// A run that has not come to a checkpoint.
pub fn no_checkpoint(path: &Path, run: &RunFolder) -> Error {
    let run = run.path().display();
    Error::file(path, format!("no checkpoint yet; go on with: elmur train --resume {run}"))
}

/// One line per dataset: how well recorded actions are predicted.
fn on_data(args: &Args, policies: &[Policy], path: &Path, device: &Device, context: &Context) -> Result<()> {
    let stop = &context.stop;
    let mut opened = Vec::new();
    let mut scores = Vec::new();
    for policy in policies {
        let data = {
            let _watch = crate::signals::EndAtOnce::new(stop);
            let data = for_policy(&open_for(path, policy, context, &mut opened)?, policy)?;
            match args.episodes {
                Some(most) if most < data.episodes() => Arc::new(Subset::new(&data, (0..most).collect())?),
                _ => data,
            }
        };
        let bar = Mutex::new(Bar::new("evaluating", 0, 1000));
        let what = OfflineEvaluation {
            policy: &policy.checkpoint.config,
            params: &policy.checkpoint.params,
            data: &*data,
            device,
        };
        let outcome = evaluate_offline(&what, stop, &mut |share| {
            if let Ok(mut bar) = bar.lock() {
                bar.update((1000.0 * share) as u64, "parts", "");
            }
        });
        if let Ok(bar) = bar.lock() {
            bar.finish();
        }
        let outcome = outcome?;
        let Score { measure, value } = outcome.score;
        if args.json {
            let row = json!({
                "checkpoint": policy.path.display().to_string(), "data": path.display().to_string(),
                "measure": measure.key(), "score": value.mean, "sem": value.sem, "episodes": outcome.episodes,
                "actions": outcome.actions,
            });
            say(&row.to_string());
        }
        scores.push((outcome.score, outcome.episodes));
    }
    let (all, over) = over_runs(&scores.iter().map(|(score, _)| *score).collect::<Vec<_>>());
    let (runs, episodes) = (scores.len(), scores[0].1);
    if args.json {
        let row = json!({
            "data": path.display().to_string(), "runs": runs, "episodes": episodes, "measure": all.measure.key(),
            "score": all.value.mean, "sem": all.value.sem, "sem_over": over,
        });
        say(&row.to_string());
    } else {
        let plural = if runs == 1 { "" } else { "s" };
        say(&format!("{}: {all} ({runs} run{plural} x {episodes} episodes, ± over {over})", path.display()));
    }
    Ok(())
}

/// Opens data with the spaces of a policy, else with those of its run's environment, else with spaces
/// inferred from the data: some formats do not record how many choices there were, and few recordings show
/// them all.
/// `opened` keeps what was opened for other policies of the same spaces.
fn open_for(
    path: &Path,
    policy: &Policy,
    context: &Context,
    opened: &mut Vec<(Spaces, Arc<dyn Source>)>,
) -> Result<Arc<dyn Source>> {
    let own = policy.checkpoint.config.architecture().ends().spaces();
    if let Some((_, data)) = opened.iter().find(|(spaces, _)| *spaces == own) {
        return Ok(Arc::clone(data));
    }
    let env = policy.run.as_ref().and_then(|run| run.env.as_ref());
    let env = env.and_then(|env| context.registry.find(env).ok());
    let known = [Some(own.clone()), env.map(|env| env.plain().spaces().clone())];
    // A policy sees what it learnt from; which episodes those were does not matter here.
    let selection = policy.run.as_ref().map(|run| run.data.selection()).unwrap_or_default();
    let selection = Selection { mask: None, ..selection };
    let open = |known| elmur_data::open_selected(path, known, &selection, &Limits::default());
    let data = match known.iter().flatten().find_map(|spaces| open(Some(spaces)).ok()) {
        Some(data) => data,
        None => open(None)?,
    };
    opened.push((own, Arc::clone(&data)));
    Ok(data)
}

/// The data as a policy sees them: with the wrappers of its run, if they were recorded without.
fn for_policy(data: &Arc<dyn Source>, policy: &Policy) -> Result<Arc<dyn Source>> {
    let ends = policy.checkpoint.config.architecture().ends();
    let wrappers = policy.run.as_ref().and_then(|run| run.env.as_ref()).map(|env| env.wrappers);
    match wrappers {
        Some(wrappers) if ends.check(data.spaces(), "dataset").is_err() => {
            Ok(elmur_data::wrap(data, wrappers)?)
        }
        _ => Ok(data.clone()),
    }
}

/// The score over all runs, and what its spread is over: of a single run the spread between episodes is all
/// there is.
fn over_runs(scores: &[Score]) -> (Score, &'static str) {
    match scores {
        [one] => (*one, "episodes"),
        _ => {
            let value = Statistics::of(scores.iter().map(|score| score.value.mean));
            (Score { measure: scores[0].measure, value }, "runs")
        }
    }
}

/// The environment to act in: the named one, else the one of the policy's run, with some settings changed. Where
/// both are the same it has the settings of the run.
pub fn environment_of(
    env: Option<&str>,
    set: &[String],
    policy: &Policy,
    context: &Context,
) -> Result<Environment> {
    let registry = &context.registry;
    let of_run = match &policy.run {
        Some(run) => run.validation_environment(registry)?,
        None => None,
    };
    let settings = set.iter().map(|text| crate::keys::setting(text)).collect::<Result<Vec<_>>>()?;
    // Of several values the first: each is tried later.
    let settings = settings.into_iter().filter_map(|(key, values)| Some((key, values.into_iter().next()?)));
    let spec = match (env, of_run) {
        (Some(name), Some(of_run)) if registry.resolve(name).as_deref() == Some(of_run.name()) => {
            of_run.spec().clone()
        }
        (Some(name), of_run) => {
            let wrappers = of_run.map(|env| env.spec().wrappers).unwrap_or_default();
            EnvSpec::new(name).with_wrappers(wrappers)
        }
        (None, Some(environment)) => environment.spec().clone(),
        (None, None) => {
            let expected =
                "--env NAME, or --data PATH of `elmur eval`: this policy was not trained in an environment";
            return Err(crate::keys::config("env", expected, "none"));
        }
    };
    let environment = registry.find(&settings.fold(spec, |spec, (key, value)| spec.with(key, value)))?;
    environment.available()?;
    Ok(environment)
}

/// The setting that varies and its values; none where only the environment as it is counts.
fn varied(args: &Args, first: &Environment) -> Result<Option<(String, Vec<Value>)>> {
    let mut settings = args.set.iter().map(|text| crate::keys::setting(text)).collect::<Result<Vec<_>>>()?;
    if settings.len() > 1 {
        settings.retain(|(_, values)| values.len() > 1);
    }
    if let [(first, _), (second, _), ..] = &settings[..] {
        let expected = format!("several values of one setting, not of {first} too");
        return Err(crate::keys::config(*second, expected, "several"));
    }
    // What changes nothing in an episode is no condition of the result.
    let is_technical =
        |key: &str| first.settings().iter().any(|known| known.key == key && !known.shapes_episodes);
    if let Some((key, values)) = settings.pop().filter(|(key, values)| values.len() > 1 || !is_technical(key))
    {
        return Ok(Some((key.to_owned(), values)));
    }
    let own = first.spec().settings.get("length");
    if own.is_none() && (!args.lengths.is_empty() || args.plot.is_some()) {
        let expected = "an environment with a setting `length` for --lengths and --plot";
        return Err(crate::keys::config("lengths", expected, first.name()));
    }
    let lengths: Vec<Value> = args.lengths.iter().map(|length| (*length).into()).collect();
    let values = |own: &Value| if lengths.is_empty() { vec![own.clone()] } else { lengths.clone() };
    Ok(own.map(|own| ("length".to_owned(), values(own))))
}

fn in_environment(args: &Args, policies: &[Policy], device: &Device, context: &Context) -> Result<()> {
    let environments: Vec<Environment> = policies
        .iter()
        .map(|policy| environment_of(args.env.as_deref(), &args.set, policy, context))
        .collect::<Result<_>>()?;
    let first = &environments[0];
    if let Some(other) = environments.iter().position(|env| env.name() != first.name()) {
        let got = format!("{} of {}", environments[other].name(), policies[other].path.display());
        let expected = format!("one environment for all, here {}; evaluate others apart", first.name());
        return Err(crate::keys::config("env", expected, got));
    }
    let varied = varied(args, first)?;
    let cases: Vec<Option<(&str, Value)>> = match &varied {
        Some((key, values)) => values.iter().map(|value| Some((key.as_str(), value.clone()))).collect(),
        None => vec![None],
    };
    let at = |env: &Environment, case: &Option<(&str, Value)>| match case {
        Some((key, value)) => env.with(key, value.clone()),
        None => Ok(env.clone()),
    };
    // All values are checked before the first is tried.
    cases.iter().try_for_each(|case| at(first, case).map(drop))?;
    if args.target_return.is_some() && !policies.iter().any(Policy::aims_at_return) {
        let kind = policies[0].checkpoint.config.kind();
        crate::note(&format!(
            "a policy of kind {kind} does not aim at a given return: --target-return has no effect"
        ));
    }
    let episodes = args.episodes.unwrap_or(EPISODES);
    let mut judge = Judge::new(args, policies, first);
    let mut points = Vec::new();
    for case in &cases {
        let mut scores = Vec::new();
        let mut returns = Vec::new();
        for (run, (policy, env)) in policies.iter().zip(&environments).enumerate() {
            let env = at(env, case)?;
            let what = Evaluation {
                policy: &policy.checkpoint.config,
                params: &policy.checkpoint.params,
                env: &env,
                episodes,
                seeds: Seeds::Test(args.first_run.wrapping_add(run as u32)),
                target_return: args.target_return.or(policy.target_return(&env)),
                sample: args.sample,
                threads: (args.threads > 0).then_some(args.threads),
                device,
                weights: args.weights,
            };
            let outcome = with_bar(&label(&env, case), &what, &context.stop)?;
            let score = judge.score(&outcome, &env)?;
            if args.json {
                let mut row = row(policy, &env, case, &outcome, &score);
                if let Some(asked) = what.asked_return()? {
                    row["target_return"] = asked.into();
                }
                say(&row.to_string());
            }
            scores.push(score);
            returns.push(outcome.returns().mean);
        }
        let (score, over) = over_runs(&scores);
        let good = first.facts().good_return;
        if args.json {
            let mut row = json!({
                "env": first.name(), "runs": scores.len(), "episodes": episodes, "measure": score.measure.key(),
                "score": score.value.mean, "sem": score.value.sem, "sem_over": over, "good_return": good,
            });
            put(&mut row, case);
            say(&row.to_string());
        } else {
            let mut more = String::new();
            if score.measure != Measure::Return {
                more = format!("; return {:.3}", Statistics::of(returns.iter().copied()).mean);
            } else if let Some(good) = good {
                more = format!("; good play: {good:.3}");
            }
            let (name, runs) = (label(first, case), scores.len());
            let plural = if runs == 1 { "" } else { "s" };
            say(&format!("{name}: {score} ({runs} run{plural} x {episodes} episodes, ± over {over}{more})"));
        }
        if let Some(length) = case.as_ref().and_then(|(_, value)| value.as_u64()) {
            points.push((length, score.value.mean, score.value.sem));
        }
    }
    if let Some(path) = &args.plot {
        let curve = elmur_plot::Curve { name: "elmur".to_owned(), points };
        crate::plot::make_folder(path)?;
        elmur_plot::success_by_length(path, "Score by episode length", &[curve], &[])
            .map_err(|e| crate::plot::plot_error(path, e))?;
    }
    Ok(())
}

/// The one metric by which all runs are judged.
struct Judge {
    metric: Metric,
    /// Whether scores by the metric were given already, or the user asked for it.
    settled: bool,
}

impl Judge {
    fn new(args: &Args, policies: &[Policy], env: &Environment) -> Self {
        let of_env = env.facts().metric;
        let of_run = |policy: &Policy| policy.run.as_ref().and_then(|run| run.eval.metric).unwrap_or(of_env);
        let agreed =
            policies.first().map(of_run).filter(|first| policies.iter().all(|p| of_run(p) == *first));
        if args.metric.is_none() && agreed.is_none() {
            let name = Measure::from(of_env).name();
            crate::note(&format!(
                "the runs were validated by different measures; all are judged by {name} here (see --metric)"
            ));
        }
        let asked = args.metric.map(Metric::from);
        Self { metric: asked.or(agreed).unwrap_or(of_env), settled: asked.is_some() }
    }

    /// The score of a run. Where episodes do not tell whether they solved the task, the first run settles
    /// that all are judged by their returns.
    fn score(&mut self, outcome: &Outcome, env: &Environment) -> Result<Score> {
        let metric = outcome.metric(self.metric);
        if metric != self.metric && self.settled {
            let expected = "an environment that tells of every episode whether it solved the task; judge by \
                            returns with --metric return";
            return Err(crate::keys::config("metric", expected, env.name()));
        }
        (self.metric, self.settled) = (metric, true);
        Ok(Score { measure: metric.into(), value: outcome.score(metric) })
    }
}

fn row(
    policy: &Policy,
    env: &Environment,
    case: &Option<(&str, Value)>,
    outcome: &Outcome,
    score: &Score,
) -> Value {
    let steps = Statistics::of(outcome.episodes.iter().map(|episode| episode.steps as f64));
    let mut row = json!({
        "checkpoint": policy.path.display().to_string(), "env": env.name(), "episodes": score.value.count,
        "measure": score.measure.key(), "score": score.value.mean, "sem": score.value.sem,
        "return": outcome.returns().mean, "success_rate": outcome.success_rate().map(|rate| rate.mean),
        "steps": steps.mean,
    });
    let trained = policy.run.as_ref().and_then(|run| run.env.as_ref());
    if let Some((key, _)) = case {
        row[format!("train_{key}")] = trained.and_then(|env| env.settings.get(*key)).cloned().into();
    }
    put(&mut row, case);
    row
}

fn put(row: &mut Value, case: &Option<(&str, Value)>) {
    if let Some((key, value)) = case {
        row[*key] = value.clone();
    }
}

/// An environment in a few words.
fn label(env: &Environment, case: &Option<(&str, Value)>) -> String {
    match case {
        Some(("length", length)) => format!("{} T = {length}", env.name()),
        Some((key, value)) => format!("{} {key} = {value}", env.name()),
        None => env.name().to_owned(),
    }
}

/// Evaluates with a progress bar.
pub fn with_bar(label: &str, what: &Evaluation<'_>, stop: &Stop) -> Result<Outcome> {
    let total = what.episodes as u64;
    let bar = Mutex::new(Bar::new(label, 0, total));
    let outcome = evaluate(what, stop, &|part| {
        if let Ok(mut bar) = bar.lock() {
            bar.update((part * total as f64) as u64, "episodes", "");
        }
    });
    if let Ok(bar) = bar.lock() {
        bar.finish();
    }
    outcome
}
