//! Policies that plan, in sessions: plans belong to rows, and are the same whoever acts beside them.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Values, ValuesMut};
use elmur_engine::{Pool, Store};
use elmur_model::baselines::{Tt, TtPlan};
use elmur_model::ends::{Action, Encoder};
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::{PolicyConfig, init, presets};

use common::random;

/// A small Trajectory Transformer whose plans outgrow its window.
fn tt(action: Action) -> PolicyConfig {
    let base = presets::tt(vec![Encoder::Vector { dim: 2, bytes: false }], action);
    let plan = TtPlan { context: 2, beam: 3, expansion: 2, horizon: 4, action_cdf: 0.1 };
    PolicyConfig::Tt(Tt { d_model: 8, heads: 2, layers: 2, window: 4, bins: 5, plan, ..base })
}

/// Random weights that are large enough to prefer something.
fn params(policy: &PolicyConfig) -> Store {
    let params = init::parameters(policy.architecture(), 1).unwrap();
    for name in params.names().into_iter().filter(|name| !name.starts_with("bins")) {
        let numbers = params.get::<f32>(&name).unwrap().len();
        params.set(&name, &random(numbers, numbers as u64)).unwrap();
    }
    params
}

/// The observations, and a return that pays 0.25 per step, of step t of an episode.
fn seen(episode: u64, t: usize) -> (Vec<f32>, f32) {
    (random(2, 1000 * episode + t as u64), 3.0 - 0.25 * t as f32)
}

/// Acts one step in the listed rows, each of which plays (episode, step).
fn act(session: &mut Session, rows: &[usize], at: &[(u64, usize)], discrete: bool) -> Vec<f32> {
    let all: Vec<(Vec<f32>, f32)> = at.iter().map(|(episode, t)| seen(*episode, *t)).collect();
    let observation: Vec<f32> = all.iter().flat_map(|(x, _)| x.clone()).collect();
    let returns: Vec<f32> = all.iter().map(|(_, r)| *r).collect();
    let seen = Seen { observation: Values::floats(&observation), returns: Some(&returns) };
    if discrete {
        let mut actions = vec![0; rows.len()];
        session.select_action(rows, seen, Choose::Sample, ValuesMut::ints(&mut actions)).unwrap();
        return actions.iter().map(|a| *a as f32).collect();
    }
    let mut actions = vec![0.0; 2 * rows.len()];
    session.select_action(rows, seen, Choose::Greedy, ValuesMut::floats(&mut actions)).unwrap();
    actions
}

#[test]
fn plans_do_not_depend_on_who_acts_beside() {
    for action in [Action::Categorical { count: 3 }, Action::Continuous { dim: 2, tanh: false }] {
        let policy = tt(action);
        let discrete = policy.architecture().ends().action.is_discrete();
        let each = if discrete { 1 } else { 2 };
        let params = params(&policy);
        let alone = |episode: u64| -> Vec<f32> {
            let mut session = Session::new(&policy, &params, 1, &Pool::new(1)).unwrap();
            session.reset(&[(0, episode)]).unwrap();
            (0..8).flat_map(|t| act(&mut session, &[0], &[(episode, t)], discrete)).collect()
        };
        let want: Vec<Vec<f32>> = (0..3).map(alone).collect();
        assert_eq!(alone(1), want[1]);
        assert!(want[0] != want[1] && want[1] != want[2], "{want:?}");
        // Three episodes side by side; the second acts in every other call only, and so lags behind.
        let mut session = Session::new(&policy, &params, 3, &Pool::new(2)).unwrap();
        session.reset(&[(0, 0), (1, 1), (2, 2)]).unwrap();
        let mut got = vec![Vec::new(); 3];
        for t in 0..8 {
            let rows: &[usize] = if t % 2 == 0 { &[0, 1, 2] } else { &[2, 0] };
            let at: Vec<_> = rows.iter().map(|row| (*row as u64, got[*row].len() / each)).collect();
            let actions = act(&mut session, rows, &at, discrete);
            for (row, action) in rows.iter().zip(actions.chunks_exact(each)) {
                got[*row].extend_from_slice(action);
            }
        }
        assert_eq!((&got[0], &got[2]), (&want[0], &want[2]));
        assert_eq!(got[1], want[1][..4 * each]);
    }
}

#[test]
fn snapshots_and_resets_bring_plans_back() {
    let policy = tt(Action::Categorical { count: 3 });
    let params = params(&policy);
    let mut session = Session::new(&policy, &params, 2, &Pool::new(1)).unwrap();
    let run = |session: &mut Session, from: usize| -> Vec<f32> {
        (from..from + 6).flat_map(|t| act(session, &[0, 1], &[(0, t), (1, t)], true)).collect()
    };
    session.reset(&[(0, 4), (1, 5)]).unwrap();
    let first = run(&mut session, 0);
    let kept = session.snapshot(&[0, 1]).unwrap();
    let after = run(&mut session, 6);
    session.restore(&[0, 1], &kept).unwrap();
    assert_eq!(run(&mut session, 6), after);
    session.reset(&[(0, 4), (1, 5)]).unwrap();
    assert_eq!(run(&mut session, 0), first);
    // In other rows, the other way around.
    session.restore(&[1, 0], &kept).unwrap();
    let swapped: Vec<f32> =
        (6..12).flat_map(|t| act(&mut session, &[1, 0], &[(0, t), (1, t)], true)).collect();
    assert_eq!(swapped, after);
}

#[test]
fn a_policy_that_is_not_finite_says_so() {
    let policy = tt(Action::Categorical { count: 3 });
    let params = params(&policy);
    params.set("norm.scale", &[f32::NAN; 8]).unwrap();
    let mut session = Session::new(&policy, &params, 1, &Pool::new(1)).unwrap();
    let seen = Seen { observation: Values::floats(&[0.0; 2]), returns: Some(&[0.0]) };
    let error = session.forward(&[0], seen).unwrap_err().to_string();
    assert!(error.contains("plans of finite value"), "{error}");
}
