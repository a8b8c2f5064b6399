//! Acting step by step against whole segments, and what must hold of sessions.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::Values;
use elmur_engine::{Pool, Store};
use elmur_model::elmur::config::*;
use elmur_model::ends::*;
use elmur_model::session::{Seen, Session, Weights};
use elmur_model::tensors::TensorData;
use elmur_model::{Elmur, Snapshot, init};

use common::{random, small};

fn params(config: &Elmur, seed: u64) -> Store {
    init::parameters(config, seed).unwrap()
}

const B: usize = 3;

const ALL: [usize; B] = [0, 1, 2];

fn floats(data: &[f32]) -> Values<'_> {
    Values::floats(data)
}

/// Outputs of `steps` steps of one row, alone in row `row` of a session, from a given seed.
fn outputs_of(session: &mut Session, steps: std::ops::Range<usize>, rows: &[usize; B]) -> Vec<Vec<f32>> {
    // Row b sees observation number steps + its own offset.
    steps
        .map(|t| {
            let observation: Vec<f32> =
                rows.iter().flat_map(|offset| random(3, (t + offset) as u64)).collect();
            session.act(floats(&observation)).unwrap().to_vec()
        })
        .collect()
}

#[test]
fn rows_reset_at_different_times_do_not_disturb_each_other() {
    let config = small();
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let undisturbed = outputs_of(&mut session, 0..30, &[0, 100, 200]);

    // Row 1 starts anew at steps 5 and 13; rows 0 and 2 must give the very same bits as before.
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let mut outputs = outputs_of(&mut session, 0..5, &[0, 100, 200]);
    session.reset(&[(1, 77)]).unwrap();
    outputs.extend(outputs_of(&mut session, 5..13, &[0, 100, 200]));
    session.reset(&[(1, 2)]).unwrap();
    outputs.extend(outputs_of(&mut session, 13..30, &[0, 87, 200]));
    assert_eq!(session.times(), [30, 17, 30]);
    for (t, (a, b)) in undisturbed.iter().zip(&outputs).enumerate() {
        assert_eq!((&a[..5], &a[10..]), (&b[..5], &b[10..]), "rows 0 and 2 at step {t}");
    }
    // Row 1 after its last reset saw at step 13 + i what it first saw at step i, from the same seed: the same
    // bits.
    for i in 0..17 {
        assert_eq!(undisturbed[i][5..10], outputs[13 + i][5..10], "row 1, {i} steps after its reset");
    }
}

#[test]
fn weights_of_bf16_act_like_f32_weights_that_were_rounded() {
    let config = small();
    let params = params(&config, 4);
    let rounded = params.duplicate().unwrap();
    for name in params.names() {
        let shape = params.ty(&name).unwrap().shape.clone();
        // Layers with few outputs, heads and routers, are not rounded. Experts lie in one tensor.
        if name.ends_with(".weight") && shape[0] > 16 || name.contains(".routed.") {
            let round = |x: f32| {
                let bits = x.to_bits();
                f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
            };
            let data: Vec<f32> = params.get::<f32>(&name).unwrap().into_iter().map(round).collect();
            rounded.set(&name, &data).unwrap();
        }
    }
    let act = |params: &Store, weights: Weights, threads: usize| {
        let mut session = Session::with_weights(&config, params, B, &Pool::new(threads), weights).unwrap();
        outputs_of(&mut session, 0..30, &[0, 100, 200]).concat()
    };
    let got = act(&params, Weights::Bf16, 1);
    assert_eq!(got, act(&params, Weights::Bf16, 2));
    let worst = |other: &[f32]| got.iter().zip(other).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    let (to_rounded, to_exact) =
        (worst(&act(&rounded, Weights::F32, 1)), worst(&act(&params, Weights::F32, 1)));
    assert!(to_rounded < 1e-4, "{to_rounded:e} from rounded weights");
    assert!((1e-4..0.2).contains(&to_exact), "{to_exact:e} from exact weights");
}

#[test]
fn permuting_rows_permutes_outputs() {
    let config = small();
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let straight = outputs_of(&mut session, 0..20, &[0, 100, 200]);
    session.reset(&[(0, 3), (1, 1), (2, 2)]).unwrap();
    let turned = outputs_of(&mut session, 0..20, &[200, 0, 100]);
    for (a, b) in straight.iter().zip(&turned) {
        assert_eq!([&a[10..], &a[..10]].concat(), *b);
    }
}

#[test]
fn a_snapshot_continues_bit_for_bit() {
    for compat in [Compat::default(), Compat { newest_first_times: true, ..Compat::default() }] {
        let mut config = small();
        config.compat = compat;
        let params = params(&config, 4);
        let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        outputs_of(&mut session, 0..6, &[0, 1, 2]);
        session.reset(&[(2, 9)]).unwrap();
        outputs_of(&mut session, 6..13, &[0, 1, 2]);
        let snapshot = session.snapshot(&ALL).unwrap();
        let on = outputs_of(&mut session, 13..30, &[0, 1, 2]);

        let folder = std::env::temp_dir().join(format!("elmur-snapshot-{}-{:?}", std::process::id(), compat));
        snapshot.save(&folder).unwrap();
        let loaded = Snapshot::load(&folder).unwrap();
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(loaded, snapshot);
        let mut other = Session::new(&config, &params, B, &Pool::new(2)).unwrap();
        other.restore(&ALL, &loaded).unwrap();
        assert_eq!(other.times(), [13, 13, 7]);
        assert_eq!(outputs_of(&mut other, 13..30, &[0, 1, 2]), on);

        let bytes = snapshot.to_bytes().unwrap();
        for len in (0..bytes.len()).step_by(97) {
            assert!(Snapshot::from_bytes(&bytes[..len]).is_err());
        }
        let mut smaller = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
        assert_eq!(
            smaller.restore(&[0, 1], &loaded).unwrap_err().to_string(),
            "restore: expected 2 rows, got 3"
        );
    }
}

#[test]
fn a_recording_session_acts_the_same_and_tells_what_it_did() {
    let config = small();
    let params = params(&config, 4);
    let mut silent = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    let mut telling = Session::recording(&config, &params, B, &Pool::new(1)).unwrap();
    assert_eq!(outputs_of(&mut silent, 0..9, &[0, 1, 2]), outputs_of(&mut telling, 0..9, &[0, 1, 2]));
    let records = telling.take_records();
    assert_eq!(records.len(), 9);
    let sums_to_one =
        |data: &[f32], each: usize| data.chunks(each).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    for (t, record) in records.iter().enumerate() {
        assert_eq!((&record.times[..], &record.rows[..]), (&[t as u64; B][..], &ALL[..]));
        assert_eq!(record.taps.keys().collect::<Vec<_>>(), ["read.0", "read.1"]);
        for tap in record.taps.values() {
            assert_eq!(tap.shape, [2, 3], "heads, slots");
            let TensorData::F32(map) = &tap.data else { panic!("floats") };
            assert!(map.len() == B * 2 * 3 && sums_to_one(map, 3));
        }
        assert_eq!(!record.closed.is_empty(), t % 4 == 3);
    }
    let closed = records[7].closed[0].clone();
    assert_eq!(closed.rows, ALL);
    for layer in 0..2 {
        // The second segment takes the second slot.
        assert_eq!(closed.taps[&format!("slots.{layer}")].data, TensorData::I64(vec![1; B]));
    }
    assert_eq!(closed.taps["memory.0"].data, telling.state("memory.0", &ALL).unwrap());
    let TensorData::F32(map) = &closed.taps["write.1"].data else { panic!("floats") };
    assert!(sums_to_one(map, 4));
    assert!(silent.take_records().is_empty());
}

#[test]
fn the_ends_of_windows_are_recorded_for_every_row() {
    for compat in [Compat::default(), Compat { newest_first_times: true, ..Compat::default() }] {
        let config = Elmur { compat, ..small() };
        let params = params(&config, 4);
        let mut session = Session::recording(&config, &params, 2, &Pool::new(1)).unwrap();
        for t in 0..4 {
            for row in [0, 1] {
                session.forward(&[row], floats(&random(3, t)).into()).unwrap();
            }
            for row in [0, 1] {
                session.commit(&[row], Values::default()).unwrap();
            }
        }
        let records = session.take_records();
        assert!(records.iter().all(|record| record.taps.keys().all(|name| name.starts_with("read."))));
        let closed: Vec<usize> =
            records.iter().flat_map(|record| &record.closed).flat_map(|closed| closed.rows.clone()).collect();
        assert_eq!(closed, [0, 1]);
        assert!(records[7].closed[0].taps.keys().all(|name| !name.starts_with("read.")));
    }
}

/// The values of a state of all rows.
fn state(session: &Session, name: &str) -> Vec<f64> {
    let rows: Vec<usize> = (0..session.rows()).collect();
    session.state(name, &rows).unwrap().to_f64()
}

/// Rows that act, are reset, saved and restored in any subset and order act as they would alone: to the bit
/// in a small session, to rounding in a large one.
#[test]
fn any_subset_of_rows_acts_as_each_row_would_alone() {
    let published = Compat { newest_first_times: true, ..Compat::default() };
    for (compat, rows) in [(Compat::default(), 23), (Compat::default(), 3), (published, 23)] {
        let mut config = small();
        config.tokens = TokenFormat::ObservationAction;
        config.compat = compat;
        let params = params(&config, 4);
        let mut bank = Session::new(&config, &params, rows, &Pool::new(2)).unwrap();
        let mut alone: Vec<Session> =
            (0..rows).map(|_| Session::new(&config, &params, rows.min(4), &Pool::new(1)).unwrap()).collect();
        let mut draws = elmur_engine::rng::Rng::new(5, 0);
        for (row, one) in alone.iter_mut().enumerate() {
            one.reset(&[(0, row as u64)]).unwrap();
        }
        for round in 0..60u64 {
            let mut order: Vec<usize> = (0..rows).collect();
            draws.shuffle(&mut order);
            // Mostly a few rows, sometimes all of them in order.
            let list = if round % 9 == 8 {
                (0..rows).collect()
            } else {
                order[..1 + (round as usize * 7) % 12 % rows].to_vec()
            };
            if round % 4 == 3 {
                bank.reset(&[(list[0], 100 + round)]).unwrap();
                alone[list[0]].reset(&[(0, 100 + round)]).unwrap();
            }
            if round % 5 == 4 {
                let kept = bank.snapshot(&list[..1]).unwrap();
                bank.reset(&[(list[0], 7)]).unwrap();
                bank.restore(&list[..1], &Snapshot::from_bytes(&kept.to_bytes().unwrap()).unwrap()).unwrap();
            }
            let seen: Vec<f32> = list.iter().flat_map(|row| random(3, 1000 * round + *row as u64)).collect();
            let got = bank.forward(&list, floats(&seen).into()).unwrap().to_vec();
            let actions: Vec<i32> = list.iter().map(|row| (*row as i32 + round as i32) % 5).collect();
            bank.commit(&list, Values::ints(&actions)).unwrap();
            for (i, row) in list.iter().enumerate() {
                let one = &mut alone[*row];
                let want = one.forward(&[0], floats(&seen[3 * i..3 * i + 3]).into()).unwrap();
                let same = |(a, b): (&f32, &f32)| if rows < 4 { a == b } else { (a - b).abs() < 1e-4 };
                let got = &got[5 * i..5 * i + 5];
                assert!(got.iter().zip(want).all(same), "row {row}, round {round}: {got:?}, {want:?}");
                one.commit(&[0], Values::ints(&actions[i..i + 1])).unwrap();
            }
        }
        for (row, one) in alone.iter().enumerate() {
            assert_eq!(bank.times()[row], one.times()[0]);
            let state = |s: &Session, row: usize| s.state("memory.1", &[row]).unwrap().to_f64();
            let (a, b) = (state(&bank, row), state(one, 0));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-3), "{a:?} {b:?}");
        }
    }
}

/// Writes left for later, done between steps or not, with resets, snapshots and rows that act on their own: the bits of
/// a session that writes at once.
#[test]
fn deferred_writes_change_no_bit() {
    let config = small();
    let params = params(&config, 4);
    for rows in [3, 9] {
        let session = || Session::new(&config, &params, rows, &Pool::new(1)).unwrap();
        let (mut at_once, mut later, mut unsettled) = (session(), session(), session());
        later.defer_writes(true).unwrap();
        unsettled.defer_writes(true).unwrap();
        for t in 0..40u64 {
            let list: Vec<usize> = (0..rows).filter(|row| !(t as usize + row).is_multiple_of(7)).collect();
            let seen: Vec<f32> = list.iter().flat_map(|row| random(3, 100 * t + *row as u64)).collect();
            let mut outputs = Vec::new();
            for (session, settles) in [(&mut at_once, false), (&mut later, true), (&mut unsettled, false)] {
                if t == 13 {
                    session.reset(&[(1, 50)]).unwrap();
                }
                if t == 21 {
                    let kept = session.snapshot(&[0, 2]).unwrap();
                    session.restore(&[2, 0], &kept).unwrap();
                }
                outputs.push(session.forward(&list, floats(&seen).into()).unwrap().to_vec());
                session.commit(&list, Values::default()).unwrap();
                if settles {
                    session.settle().unwrap();
                }
            }
            assert_eq!(outputs[0], outputs[1], "settled between steps, step {t}");
            assert_eq!(outputs[0], outputs[2], "settled by the next step, step {t}");
        }
        let all: Vec<usize> = (0..rows).collect();
        let kept = at_once.snapshot(&all).unwrap();
        assert_eq!((later.snapshot(&all).unwrap(), unsettled.snapshot(&all).unwrap()), (kept.clone(), kept));
    }
}

/// A bank of more than a thousand rows in which clients come, act and go on their own; what they do is what
/// they would do in a small session.
#[test]
fn a_large_bank_serves_rows_one_by_one() {
    let mut config = small();
    (config.d_model, config.layers, config.ffn) = (8, 1, Ffn::SwiGlu { d_ff: 8 });
    let params = params(&config, 4);
    let mut bank = Session::new(&config, &params, 1100, &Pool::new(1)).unwrap();
    let mut one = Session::new(&config, &params, 1, &Pool::new(1)).unwrap();
    let untouched = bank.snapshot(&[500]).unwrap();
    for (client, row) in [3, 1099, 640].into_iter().enumerate() {
        let seed = 70 + client as u64;
        bank.reset(&[(row, seed)]).unwrap();
        one.reset(&[(0, seed)]).unwrap();
        for t in 0..10 {
            let seen = random(3, 10 * seed + t);
            let got = bank.forward(&[row], floats(&seen).into()).unwrap().to_vec();
            bank.commit(&[row], Values::default()).unwrap();
            // One row is one row, in whatever bank.
            assert_eq!(got, one.act(floats(&seen)).unwrap(), "client {client}, step {t}");
        }
        assert_eq!(bank.times()[row], 10);
    }
    assert_eq!(bank.snapshot(&[500]).unwrap(), untouched);
    assert_eq!(bank.times().iter().sum::<u64>(), 30);
    // Many at once, in a list that no program has the size of.
    let rows: Vec<usize> = (0..1100).rev().step_by(2).collect();
    let seen = random(3 * rows.len(), 5);
    assert_eq!(bank.forward(&rows, floats(&seen).into()).unwrap().len(), 5 * rows.len());
    bank.commit(&rows, Values::default()).unwrap();
    assert_eq!(bank.times().iter().sum::<u64>(), 30 + rows.len() as u64);
}

#[test]
fn sampled_actions_depend_on_the_rows_seed_and_survive_snapshots() {
    use elmur_base::ValuesMut;
    use elmur_model::session::Choose;
    let config = small();
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
    let play = |session: &mut Session, rows: &[usize], steps: std::ops::Range<u64>| -> Vec<i32> {
        let mut all = Vec::new();
        for t in steps {
            let seen = random(3, t).repeat(rows.len());
            let mut actions = vec![0; rows.len()];
            let seen = floats(&seen).into();
            session.select_action(rows, seen, Choose::Sample, ValuesMut::ints(&mut actions)).unwrap();
            all.extend(actions);
        }
        all
    };
    session.reset(&[(0, 8), (1, 8)]).unwrap();
    let both = play(&mut session, &[0, 1], 0..40);
    assert!(both.chunks(2).all(|pair| pair[0] == pair[1]), "equal seeds draw equally");
    session.reset(&[(0, 9), (1, 8)]).unwrap();
    let other = play(&mut session, &[0], 0..40);
    assert!(other.iter().zip(both.chunks(2)).any(|(a, b)| *a != b[0]), "other seeds draw otherwise");
    let first = play(&mut session, &[1], 0..15);
    let kept = session.snapshot(&[1]).unwrap();
    let on = play(&mut session, &[1], 15..40);
    assert!([first, on.clone()].concat().iter().zip(both.chunks(2)).all(|(a, b)| *a == b[0]));
    session.restore(&[0], &kept).unwrap();
    assert_eq!(play(&mut session, &[0], 15..40), on);
}

/// The state of a session does not grow with time, and anchors stay exact beyond what a float could count.
#[test]
fn a_million_steps_cost_what_a_thousand_cost() {
    let mut config = small();
    config.d_model = 8;
    config.layers = 1;
    config.ffn = Ffn::SwiGlu { d_ff: 8 };
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, 1, &Pool::new(1)).unwrap();
    let observation = [0.5, -1.0, 2.0];
    let size = |session: &mut Session| session.snapshot(&[0]).unwrap().to_bytes().unwrap().len();
    let before = size(&mut session);
    for _ in 0..1_000_000 {
        session.act(floats(&observation)).unwrap();
    }
    assert_eq!(session.times(), [1_000_000]);
    assert_eq!(size(&mut session), before);
    assert_eq!(state(&session, "anchors.0").into_iter().fold(0.0, f64::max), 999_999.0);
    // Only differences of times reach the model: far in the future nothing changes.
    let snapshot = session.snapshot(&[0]).unwrap();
    let near: Vec<f32> = session.act(floats(&observation)).unwrap().to_vec();
    let mut far = session;
    far.restore(&[0], &snapshot.shifted(1_000_000_000_000).unwrap()).unwrap();
    assert!(snapshot.shifted(3).is_err() && snapshot.shifted(u64::MAX).is_err());
    assert_eq!(far.act(floats(&observation)).unwrap(), near);
}

#[test]
fn mistakes_are_explained() {
    let mut config = small();
    let store = params(&config, 4);
    let mut session = Session::new(&config, &store, 2, &Pool::new(1)).unwrap();
    let message = |r: Result<&[f32], elmur_model::Error>| r.unwrap_err().to_string();
    assert_eq!(message(session.act(floats(&[0.0; 5]))), "observation: expected 6 numbers, got 5");
    assert_eq!(
        message(session.act(floats(&[0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0]))),
        "observation: expected finite numbers, got NaN at 2"
    );
    assert_eq!(message(session.act(Values::ints(&[0; 6]))), "observation: expected floats, got integers");
    assert_eq!(session.reset(&[(2, 0)]).unwrap_err().to_string(), "reset: expected rows below 2, got 2");
    assert_eq!(
        session.commit(&[0, 1], Values::default()).unwrap_err().to_string(),
        "commit: expected forward first, got no step begun"
    );
    let seen = [0.0; 6];
    let error = session.forward(&[1, 1], floats(&seen).into()).unwrap_err().to_string();
    assert_eq!(error, "forward: expected every row once, got row 1 twice");
    session.forward(&[1], floats(&seen[..3]).into()).unwrap();
    let error = session.forward(&[0, 1], floats(&seen).into()).unwrap_err().to_string();
    assert_eq!(error, "forward: expected commit after the previous forward, got an open step");
    session.reset(&[(0, 3)]).unwrap();
    session.commit(&[1], Values::default()).unwrap();
    assert_eq!(session.times(), [0, 1]);
    session.act(floats(&[0.0; 6])).unwrap();
    config.heads = 5;
    let error = Session::new(&config, &store, 2, &Pool::new(1)).unwrap_err().to_string();
    assert_eq!(error, "config `heads`: expected a divisor of d_model = 24, got 5");
    config.heads = 3;
    config.d_model = 12;
    let error = Session::new(&config, &store, 2, &Pool::new(1)).unwrap_err().to_string();
    assert!(error.contains("in the graph, but"), "{error}");
}

#[test]
fn every_encoder_and_head_acts() {
    let mut config = small();
    config.observation = vec![
        Encoder::Vector { dim: 2, bytes: false },
        Encoder::Categorical { sizes: vec![3, 4], encoding: CategoricalEncoding::Embedding },
        Encoder::Categorical { sizes: vec![5], encoding: CategoricalEncoding::OneHot },
        Encoder::Categorical { sizes: vec![5], encoding: CategoricalEncoding::Raw },
        Encoder::Image { channels: 3, height: 40, width: 44, bytes: false },
        Encoder::Image { channels: 1, height: 8, width: 9, bytes: true },
    ];
    for action in [
        Action::Categorical { count: 4 },
        Action::MultiCategorical { sizes: vec![3, 2] },
        Action::Continuous { dim: 2, tanh: true },
        Action::Continuous { dim: 2, tanh: false },
    ] {
        for tokens in [TokenFormat::Observation, TokenFormat::ReturnObservationAction] {
            config.action = action.clone();
            config.tokens = tokens;
            let params = params(&config, 1);
            let mut session = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
            // Each row: two numbers and an image; four integers; a small image of bytes.
            let row = |x: f32| [vec![x, -x], vec![0.5f32; 3 * 40 * 44]].concat();
            let seen_floats = [row(0.1), row(0.3)].concat();
            let ints = [0, 3, 4, 1, 2, 1, 0, 2];
            let bytes: Vec<u8> = (0..2 * 72).collect();
            let seen = Values { floats: &seen_floats, ints: &ints, bytes: &bytes };
            fn with<'a>(observation: Values<'a>, returns: Option<&'a [f32]>) -> Seen<'a> {
                Seen { observation, returns }
            }
            let returns = Some(&[1.0, 0.5][..]);
            let outputs_of = |bytes: &[u8]| {
                let mut session = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
                session.act(with(Values { bytes, ..seen }, returns)).unwrap().to_vec()
            };
            assert_ne!(outputs_of(&bytes), outputs_of(&[0; 2 * 72]), "pixels are seen");
            for _ in 0..9 {
                let outputs = session.act(with(seen, returns)).unwrap();
                assert_eq!(outputs.len(), 2 * action.outputs());
                assert!(outputs.iter().all(|x| x.is_finite()));
                if let Action::Continuous { tanh: true, .. } = action {
                    assert!(outputs.iter().all(|x| x.abs() <= 1.0));
                }
            }
            // One component's values are never taken for another's; what is refused changes nothing.
            let before = session.snapshot(&[0, 1]).unwrap();
            for (place, bad) in [(1, 4), (0, 3), (5, -1), (2, 5)] {
                let mut ints = ints;
                ints[place] = bad;
                let seen = Values { ints: &ints, ..seen };
                assert!(session.act(with(seen, returns)).is_err(), "{bad} at {place}");
            }
            assert!(session.act(with(Values { bytes: &[], ..seen }, returns)).is_err(), "no bytes");
            assert!(session.act(with(Values::floats(&[0.1, 0.2]), returns)).is_err(), "one leaf of six");
            if tokens != TokenFormat::Observation {
                assert!(session.act(with(seen, Some(&[1.0, f32::NAN]))).is_err());
                assert!(session.act(with(seen, None)).is_err());
            }
            assert_eq!(session.snapshot(&[0, 1]).unwrap(), before);
            session.act(with(seen, returns)).unwrap();
        }
    }
}

/// A refused action can be followed by a good one, at any position, in both modes.
#[test]
fn a_refused_action_changes_nothing() {
    for compat in [Compat::default(), Compat { newest_first_times: true, ..Compat::default() }] {
        let mut config = small();
        config.tokens = TokenFormat::ObservationAction;
        config.compat = compat;
        let params = params(&config, 4);
        let run = |mistakes: bool| {
            let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
            let mut outputs = Vec::new();
            for t in 0..10 {
                outputs.extend_from_slice(session.forward(&ALL, floats(&random(3 * B, t)).into()).unwrap());
                if mistakes {
                    let error = session.commit(&ALL, Values::ints(&[0, 99, 0])).unwrap_err().to_string();
                    assert_eq!(error, "action: expected 0 to 5 in component 0, got 99");
                    assert!(
                        session.commit(&ALL, Values::default()).is_err() && session.reset(&[(1, 1)]).is_err()
                    );
                }
                session.commit(&ALL, Values::ints(&[0, 2, 5])).unwrap();
            }
            outputs
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn a_learned_memory_is_kept_by_snapshots_in_both_modes() {
    for shared in [false, true] {
        let mut config = small();
        config.memory.init = MemoryInit::Learned;
        config.memory.shared = shared;
        let params = params(&config, 4);
        let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        let learned = params.get::<f32>("layers.0.memory_init").unwrap();
        let learned: Vec<f64> = learned.repeat(B).into_iter().map(f64::from).collect();
        assert_eq!(state(&session, "memory.0"), learned);
        let fresh = session.snapshot(&ALL).unwrap();
        let first = outputs_of(&mut session, 0..9, &[0, 1, 2]);
        let later = session.snapshot(&ALL).unwrap();
        let on = outputs_of(&mut session, 9..14, &[0, 1, 2]);
        let mut other = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        other.restore(&ALL, &later).unwrap();
        assert_eq!(outputs_of(&mut other, 9..14, &[0, 1, 2]), on);
        other.restore(&ALL, &fresh).unwrap();
        assert_eq!(outputs_of(&mut other, 0..9, &[0, 1, 2]), first);
    }
}

#[test]
fn impossible_snapshots_are_refused() {
    use elmur_model::tensors::{parse, serialise};
    let config = small();
    let store = params(&config, 4);
    let mut session = Session::new(&config, &store, B, &Pool::new(1)).unwrap();
    outputs_of(&mut session, 0..9, &[0, 1, 2]);
    let bytes = session.snapshot(&ALL).unwrap().to_bytes().unwrap();
    let mut changed = |name: &str, to: i64| {
        let mut tensors = parse(&bytes).unwrap();
        if let TensorData::I64(x) = &mut tensors.get_mut(name).unwrap().data {
            x[0] = to;
        }
        Snapshot::from_bytes(&serialise(&tensors).unwrap()).and_then(|s| session.restore(&ALL, &s))
    };
    assert!(changed("times", 9).is_ok() && changed("anchors.0", 3).is_ok());
    for (name, to) in [
        ("times", i64::MAX),
        ("times", -1),
        ("anchors.0", 11),
        ("anchors.1", -2),
        ("clock", 0),
        ("draws", -1),
    ] {
        assert!(changed(name, to).is_err(), "{name} = {to}");
    }
    let mut other = config.clone();
    other.segment_length = 5;
    let params = params(&other, 4);
    let mut other = Session::new(&other, &params, B, &Pool::new(1)).unwrap();
    let error = other.restore(&ALL, &Snapshot::from_bytes(&bytes).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "restore: expected windows of 5 steps of 1 tokens, got windows of 4 steps of 1 tokens");
}
