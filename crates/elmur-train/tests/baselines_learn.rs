//! Every baseline learns what it can learn, and no more. T-Maze shows the hint at the first step only: policies
//! whose memory or window reaches back to it solve the maze, the others turn at random. Episodes of a judgement
//! are never those of the training data.

#![allow(clippy::unwrap_used, clippy::panic)]

use elmur_base::{Statistics, Stop};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Metric, Registry};
use elmur_model::Checkpoint;
use elmur_train::{Evaluation, RunConfig, Seeds, Trainer, evaluate, overrides};

/// Steps of the longest episodes that policies are trained on.
const LENGTH: u64 = 9;

/// Small sizes of the four transformers.
const TRANSFORMER: [&str; 6] = [
    "model.d_model=32",
    "model.heads=2",
    "model.d_head=16",
    "model.layers=2",
    "model.dropout=0",
    "model.attention_dropout=0",
];

/// Crops of nine steps in three segments of three: at the fork the hint lies two segments back.
const SEGMENTS: [&str; 2] = ["model.window=3", "train.segments=3"];

/// A preset with changes, trained to its end.
fn trained(preset: &str, changes: &[&str]) -> Checkpoint {
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    let registry = Registry::builtin();
    let run = overrides::apply(&RunConfig::preset(preset).unwrap(), &changes, &registry).unwrap();
    let prepared = run.prepare(&registry, false).unwrap();
    let mut trainer = Trainer::new(&prepared.config, &prepared.data, &Pool::new(1)).unwrap();
    for _ in 0..run.train.batches.unwrap() {
        trainer.step().unwrap();
    }
    trainer.checkpoint()
}

/// A policy of T-Maze, trained on demonstrations of 3 to [`LENGTH`] steps.
fn maze_policy(policy: &str, changes: &[&str]) -> Checkpoint {
    let (policy, length) = (format!("policy={policy}"), format!("env.length={LENGTH}"));
    let window = format!("model.window={LENGTH}");
    let shared = [
        &policy,
        &length,
        &window,
        "data.episodes=400",
        "train.batch=32",
        "train.epochs=null",
        "train.batches=200",
        "train.lr=3e-3",
        "train.schedule.warmup=10",
    ];
    trained("tmaze", &[&shared[..], changes].concat())
}

/// Return or success in this many test episodes.
fn judged(policy: &Checkpoint, env: &EnvSpec, metric: Metric, episodes: usize) -> Statistics {
    let env = Registry::builtin().find(env).unwrap();
    let what =
        Evaluation { episodes, seeds: Seeds::Test(0), threads: Some(1), ..Evaluation::of(policy, &env) };
    evaluate(&what, &Stop::default(), &|_| {}).unwrap().score(metric)
}

/// The share of 60 mazes of exactly this length that a policy solves.
fn success(policy: &Checkpoint, length: u64) -> f64 {
    judged(policy, &EnvSpec::new("tmaze").with("length", length), Metric::Success, 60).mean
}

fn solves(policy: &Checkpoint, length: u64) {
    let share = success(policy, length);
    assert!(share >= 0.95, "{share} of the mazes of {length} steps");
}

/// Half of the mazes are solved by turning to either side; three standard deviations are 0.2.
fn is_at_chance(policy: &Checkpoint, length: u64) {
    let share = success(policy, length);
    assert!((0.3..=0.7).contains(&share), "{share} of the mazes of {length} steps");
}

#[test]
fn bc_lstm_carries_the_hint() {
    let policy = maze_policy("bc-lstm", &["model.d_model=32", "model.hidden=32", "train.lr=1e-2"]);
    solves(&policy, LENGTH);
}

#[test]
fn bc_mlp_turns_at_random() {
    let policy = maze_policy("bc-mlp", &["model.d_model=32", "model.hidden=[32]"]);
    is_at_chance(&policy, LENGTH);
}

#[test]
fn dmamba_carries_the_hint() {
    let policy = maze_policy("dmamba", &["model.d_model=32", "model.layers=1", "model.dropout=0"]);
    solves(&policy, LENGTH);
}

/// The hint reaches the fork by two updates of the memory, which gradients through the segments teach.
#[test]
fn rate_hands_the_hint_on_in_its_memory() {
    let memory = [
        "model.memory_tokens=3",
        "model.valve_heads=2",
        "model.cache_tokens=0",
        "model.unroll=3",
        "train.batches=400",
    ];
    solves(&maze_policy("rate", &[&TRANSFORMER[..], &SEGMENTS, &memory].concat()), LENGTH);
}

#[test]
fn rmt_hands_the_hint_on_in_its_memory() {
    let memory = ["model.memory_tokens=3", "model.unroll=3", "train.batches=400"];
    solves(&maze_policy("rmt", &[&TRANSFORMER[..], &SEGMENTS, &memory].concat()), LENGTH);
}

#[test]
fn trxl_finds_the_hint_in_its_cache() {
    let policy = maze_policy("trxl", &[&TRANSFORMER[..], &SEGMENTS, &["model.cache_tokens=27"]].concat());
    solves(&policy, LENGTH);
}

/// The window of nine steps holds the hint at the fork of a maze of nine, and lost it in one of fifteen.
#[test]
fn dt_sees_the_hint_inside_its_window_only() {
    let policy = maze_policy("dt", &TRANSFORMER);
    solves(&policy, LENGTH);
    is_at_chance(&policy, 15);
}

/// The Bellman error and the penalty together choose actions that keep the pole up to the end.
#[test]
fn cql_balances_the_pole() {
    let changes = [
        "policy=cql",
        "model.d_model=32",
        "model.hidden=[64,64]",
        "data.episodes=60",
        "train.batch=32",
        "train.epochs=null",
        "train.batches=300",
        "train.lr=1e-3",
        "train.standardize=true",
    ];
    let returns = judged(&trained("cartpole", &changes), &EnvSpec::new("cartpole"), Metric::Return, 20);
    assert!(returns.mean >= 480.0, "{returns:?}");
}
