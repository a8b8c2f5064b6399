//! Pictures: gradients of the residual encoder, changes of pictures in training, weights of steps in the loss.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Leaf, StepWeights, Values};
use elmur_engine::{AdamW, DType, Pool, Store};
use elmur_model::elmur::config::*;
use elmur_model::ends::*;
use elmur_model::session::{Seen, Session};
use elmur_model::window::{Begin, TrainSettings, WindowProgram, evaluation_graph, training_graph};
use elmur_model::{Augment, Checkpoint, Elmur, PolicyConfig, init, presets};

const ROWS: usize = 2;
const STEPS: usize = 3;
const SHAPE: [usize; 3] = [6, 11, 10];

fn residual() -> Encoder {
    let [channels, height, width] = SHAPE;
    Encoder::ResidualImage {
        channels,
        height,
        width,
        bytes: false,
        cameras: 2,
        widths: vec![8, 16],
        strides: vec![2, 1],
        queries: 3,
        grid: 2,
        keypoints: 4,
    }
}

fn model(encoder: Encoder) -> Elmur {
    let small = common::small();
    Elmur {
        observation: vec![encoder],
        action: Action::Continuous { dim: 2, tanh: true },
        d_model: 8,
        layers: 1,
        segment_length: STEPS,
        memory: MemoryConfig { dropout: 0.0, init: MemoryInit::Learned, ..small.memory },
        ffn: Ffn::Gelu { d_ff: 8 },
        dropout: 0.0,
        attention_dropout: 0.0,
        ..small
    }
}

fn settings(augment: Augment, weights: Option<StepWeights>) -> TrainSettings {
    TrainSettings {
        batch: ROWS,
        label_smoothing: 0.1,
        ties: false,
        optimizer: AdamW { weight_decay: 0.0, ..AdamW::default() },
        clip: 1e9,
        dtype: DType::F64,
        export_gradients: true,
        dropout: true,
        table: None,
        augment,
        bytes: Vec::new(),
        weights,
    }
}

fn floats(n: usize, seed: u64) -> Vec<f64> {
    common::random(n, seed).into_iter().map(f64::from).collect()
}

fn pixels() -> usize {
    SHAPE.iter().product()
}

/// A program with learning rate 0 on random pictures.
fn program(model: &Elmur, settings: &TrainSettings, begin: Begin, store: &Store) -> WindowProgram {
    let built = training_graph(model, settings, begin).unwrap();
    let fresh = !store.names().iter().any(|name| name == "rng");
    store.declare(&built.graph).unwrap();
    if fresh {
        init::initialise(&built, store, 3).unwrap();
        store.set("rng", &[5i64, 0]).unwrap();
    }
    let mut window = WindowProgram::new(&built, model, &Pool::new(1), &[store]).unwrap();
    let program = &mut window.program;
    program.set("observation", &floats(ROWS * STEPS * pixels(), 1)).unwrap();
    program.set("targets", &floats(2 * ROWS * STEPS, 2)).unwrap();
    match settings.weights {
        Some(_) => program.set("weights", &[1.0, 0.25, 0.0, 1.0, 1.0, 0.5]).unwrap(),
        None => program.set("mask", &[true, true, false, true, true, true]).unwrap(),
    }
    window.set_rates(0.0, 0).unwrap();
    window
}

fn run(window: &mut WindowProgram, name: &str) -> Vec<f64> {
    window.run(0).unwrap();
    window.program.get::<f64>(name).unwrap().to_vec()
}

#[test]
fn gradients_of_the_residual_encoder_are_those_of_central_differences() {
    let model = model(residual());
    let store = Store::new();
    let mut window = program(&model, &settings(Augment::default(), None), Begin::Fresh, &store);
    let mut loss = |store: &Store| {
        store.set("rng", &[5i64, 0]).unwrap();
        run(&mut window, "loss")[0]
    };
    loss(&store);
    let names: Vec<String> = store.names().into_iter().filter(|name| name.starts_with("encoder")).collect();
    // A stem, a block of two convolutions and a skip, places, queries, the grid's features, keypoints and a linear map.
    assert_eq!(names.len(), 3 + 7 + 1 + 1 + 2 + 1 + 2, "{names:?}");
    let mut known = Vec::new();
    let mut graded = program(&model, &settings(Augment::default(), None), Begin::Fresh, &store);
    run(&mut graded, "loss");
    for name in &names {
        known.push(graded.program.get::<f64>(&format!("grad.{name}")).unwrap().to_vec());
    }
    for (name, analytic) in names.iter().zip(known) {
        let mut data = store.get::<f64>(name).unwrap();
        let mut largest = 0f64;
        for i in (0..data.len()).step_by(data.len().div_ceil(5)) {
            let (x, step) = (data[i], 1e-6);
            let mut at = |value: f64| {
                data[i] = value;
                store.set(name, &data).unwrap();
                loss(&store)
            };
            let numeric = (at(x + step) - at(x - step)) / (2.0 * step);
            at(x);
            let error = (analytic[i] - numeric).abs() / analytic[i].abs().max(numeric.abs()).max(1e-3);
            assert!(error < 1e-5, "{name}[{i}]: {} analytic, {numeric} numeric", analytic[i]);
            largest = largest.max(analytic[i].abs());
        }
        assert!(largest > 0.0, "{name} has no gradient");
    }
}

/// Pictures changed by hand, as draws say: two distances, an order of the colours, the light.
fn changed(images: &[f64], draws: &[f64], most: usize, brightness: f64) -> Vec<f64> {
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]];
    let [_, height, width] = SHAPE;
    let mut out = Vec::new();
    let distance = |draw: f64| (draw * (2 * most + 1) as f64) as isize - most as isize;
    for (row, images) in images.chunks(STEPS * pixels()).enumerate() {
        let [down, right, colours, light] = draws[4 * row..4 * row + 4] else { panic!() };
        let order = ORDERS[(6.0 * colours) as usize];
        for channel in 0..images.len() / (height * width) {
            let image = &images[(channel - channel % 3 + order[channel % 3]) * height * width..];
            for i in 0..height {
                for j in 0..width {
                    let at =
                        |i: usize, by: isize, n: usize| (i as isize + by).clamp(0, n as isize - 1) as usize;
                    let pixel = image[at(i, distance(down), height) * width + at(j, distance(right), width)];
                    out.push(pixel * (1.0 - brightness + 2.0 * brightness * light));
                }
            }
        }
    }
    out
}

#[test]
fn pictures_of_a_crop_are_changed_alike_and_crops_differently() {
    for encoder in [residual(), Encoder::Image { channels: 6, height: 11, width: 10, bytes: false }] {
        let model = model(encoder);
        let augment = Augment { shift: 2, brightness: 0.3, colours: true, hide: 0.0 };
        let (plain, augmented) = (settings(Augment::default(), None), settings(augment, None));
        let store = Store::new();
        let mut first = program(&model, &augmented, Begin::Fresh, &store);
        let mut next = program(&model, &augmented, Begin::Continue, &store);
        let mut unchanged = program(&model, &plain, Begin::Fresh, &store);
        let logits = run(&mut first, "logits");
        let draws = store.get::<f64>("augment").unwrap();
        assert!(draws.len() == 4 * ROWS && draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        assert_ne!(draws[..4], draws[4..]);
        // The same as without changes on pictures that were changed before.
        let images = floats(ROWS * STEPS * pixels(), 1);
        let by_hand = changed(&images, &draws, 2, 0.3);
        unchanged.program.set("observation", &by_hand).unwrap();
        for (a, b) in run(&mut unchanged, "logits").iter().zip(&logits) {
            assert!((a - b).abs() < 1e-12, "{a} {b}");
        }
        unchanged.program.set("observation", &images).unwrap();
        assert_ne!(run(&mut unchanged, "logits"), logits);
        // The crop goes on with the same draws, the next crop has others, and the same state gives the same.
        run(&mut next, "loss");
        assert_eq!(store.get::<f64>("augment").unwrap(), draws);
        run(&mut first, "loss");
        assert_ne!(store.get::<f64>("augment").unwrap(), draws);
        store.set("rng", &[5i64, 0]).unwrap();
        assert_eq!(run(&mut first, "logits"), logits);
        assert_eq!(store.get::<f64>("augment").unwrap(), draws);
    }
}

#[test]
fn weights_of_steps_weigh_their_errors() {
    let model = model(residual());
    let store = Store::new();
    let weights = Some(StepWeights::new(1.0, 0.25));
    let mut weighed = program(&model, &settings(Augment::default(), weights), Begin::Fresh, &store);
    let loss = run(&mut weighed, "action_loss")[0];
    let outputs = weighed.program.get::<f64>("logits").unwrap().to_vec();
    let targets = floats(2 * ROWS * STEPS, 2);
    let error =
        |i: usize| (0..2).map(|k| (outputs[2 * i + k] - targets[2 * i + k]).powi(2)).sum::<f64>() / 2.0;
    let each = [1.0, 0.25, 0.0, 1.0, 1.0, 0.5];
    let expected = (0..6).map(|i| each[i] * error(i)).sum::<f64>() / each.iter().sum::<f64>();
    assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
    // Weights of 0 and 1 are a mask, for choices too.
    let mut plain = program(&model, &settings(Augment::default(), None), Begin::Fresh, &store);
    weighed.program.set("weights", &[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]).unwrap();
    let (a, b) = (run(&mut weighed, "loss")[0], run(&mut plain, "loss")[0]);
    assert!((a - b).abs() < 1e-12, "{a} {b}");
    for action in [Action::Categorical { count: 3 }, Action::MultiCategorical { sizes: vec![2, 3] }] {
        let model = Elmur { action: action.clone(), ..model.clone() };
        let store = Store::new();
        let mut losses = Vec::new();
        for weights in [weights, None] {
            let built = training_graph(&model, &settings(Augment::default(), weights), Begin::Fresh).unwrap();
            store.declare(&built.graph).unwrap();
            init::initialise(&built, &store, 3).unwrap();
            store.set("rng", &[5i64, 0]).unwrap();
            let mut window = WindowProgram::new(&built, &model, &Pool::new(1), &[&store]).unwrap();
            let program = &mut window.program;
            program.set("observation", &floats(ROWS * STEPS * pixels(), 1)).unwrap();
            let counts = |i: usize| !i.is_multiple_of(4);
            let target = |i: usize| if counts(i / action.dim()) { (i % 2) as i64 } else { -10 };
            let targets: Vec<i64> = (0..ROWS * STEPS * action.dim()).map(target).collect();
            program.set("targets", &targets).unwrap();
            if weights.is_some() {
                let each: Vec<f64> = (0..ROWS * STEPS).map(|i| f64::from(u8::from(counts(i)))).collect();
                program.set("weights", &each).unwrap();
            }
            window.set_rates(0.0, 0).unwrap();
            losses.push(run(&mut window, "loss")[0]);
        }
        assert!((losses[0] - losses[1]).abs() < 1e-12, "{action:?} {losses:?}");
    }
}

/// Changes the number of cameras, the widths, and queries, grid and keypoints of an encoder.
type Change<'a> = dyn Fn(&mut usize, &mut Vec<usize>, [&mut usize; 3]) + 'a;

#[test]
fn residual_encoders_are_checked_and_follow_the_size_of_pictures() {
    let changed = |change: &Change<'_>| {
        let mut encoder = residual();
        if let Encoder::ResidualImage { cameras, widths, queries, grid, keypoints, .. } = &mut encoder {
            change(cameras, widths, [queries, grid, keypoints]);
        }
        encoder.validate().map_err(|error| error.to_string())
    };
    assert!(changed(&|_, _, _| {}).is_ok());
    assert!(changed(&|cameras, _, _| *cameras = 4).unwrap_err().contains("divides the channels"));
    assert!(changed(&|cameras, _, _| *cameras = 0).unwrap_err().contains("divides the channels"));
    assert!(changed(&|_, widths, _| widths.clear()).unwrap_err().contains("1 to 8 widths"));
    assert!(changed(&|_, widths, _| widths[0] = 12).unwrap_err().contains("multiples of 8"));
    assert!(changed(&|_, widths, _| widths[1] = 1 << 40).unwrap_err().contains("up to 1024"));
    assert!(changed(&|_, _, [queries, ..]| *queries = 0).is_ok());
    assert!(changed(&|_, _, [_, grid, _]| *grid = 0).is_ok());
    assert!(changed(&|_, _, [queries, grid, _]| (*queries, *grid) = (0, 0)).is_ok());
    let nothing = changed(&|_, _, read| read.into_iter().for_each(|n| *n = 0));
    assert!(nothing.unwrap_err().contains("not all 0, got 0 queries, grid 0 and 0 keypoints"));
    assert!(changed(&|_, _, [queries, ..]| *queries = 257).unwrap_err().contains("0 to 256 queries"));
    assert!(changed(&|_, _, [_, grid, _]| *grid = 257).unwrap_err().contains("grid of 0 to 256"));
    // Strides are checked, and wrong ones are no panic for what adds up sizes.
    for wrong in [vec![0, 2], vec![2], vec![2, 3], vec![usize::MAX, 1]] {
        let mut encoder = residual();
        if let Encoder::ResidualImage { strides, .. } = &mut encoder {
            *strides = wrong;
        }
        let error = model(encoder).validate().unwrap_err().to_string();
        assert!(error.contains("strides of 1 or 2, one for each width"), "{error}");
    }
    // Another size stays residual, with its cameras; what is no picture gets the usual encoder.
    let picture = residual().resized(&Leaf::Bytes { shape: &[6, 32, 40] });
    let Encoder::ResidualImage { channels: 6, height: 32, width: 40, bytes: true, cameras: 2, .. } = picture
    else {
        panic!("{picture:?}")
    };
    assert_eq!(
        residual().resized(&Leaf::Bytes { shape: &[3, 32, 40] }),
        Encoder::of(&Leaf::Bytes { shape: &[3, 32, 40] })
    );
    let mut policy = PolicyConfig::from(model(residual()));
    let parts = vec![elmur_base::Space::Bytes { shape: vec![6, 16, 16] }, elmur_base::Space::unbounded([25])];
    let action = elmur_base::Space::unbounded([8]);
    let spaces = elmur_base::Spaces { observation: elmur_base::Space::Tuple { parts }, action };
    policy.fit_to(&spaces).unwrap();
    let ends = policy.architecture().ends();
    assert!(matches!(ends.observation[0], Encoder::ResidualImage { height: 16, .. }));
    assert_eq!(ends.observation[1], Encoder::Vector { dim: 25, bytes: false });
    ends.check(&spaces, "data").unwrap();
}

#[test]
fn acting_step_by_step_sees_pictures_as_whole_windows_do() {
    let mut bytes = residual();
    if let Encoder::ResidualImage { bytes, .. } = &mut bytes {
        *bytes = true;
    }
    let model = model(bytes);
    let params = init::parameters(&model, 3).unwrap();
    let pixels: Vec<u8> = (0..ROWS * STEPS * pixels()).map(|i| (i * 37 + i / 110 * 11) as u8).collect();
    let built = evaluation_graph(&model, ROWS, DType::F32, Begin::Fresh).unwrap();
    let states = Store::new();
    states.declare_states(&built.graph).unwrap();
    let mut window = WindowProgram::new(&built, &model, &Pool::new(1), &[&states, &params]).unwrap();
    window.program.set("observation", &pixels).unwrap();
    window.run(0).unwrap();
    let whole = window.program.get::<f32>("logits").unwrap().to_vec();
    let mut session = Session::new(&model, &params, ROWS, &Pool::new(1)).unwrap();
    let each = pixels.len() / (ROWS * STEPS);
    for t in 0..STEPS {
        let frame = |row: usize| pixels[(row * STEPS + t) * each..][..each].to_vec();
        let seen: Vec<u8> = (0..ROWS).flat_map(frame).collect();
        let observation = Values { floats: &[], ints: &[], bytes: &seen };
        let got = session.act(Seen { observation, returns: None }).unwrap().to_vec();
        for row in 0..ROWS {
            let want = &whole[(row * STEPS + t) * 2..][..2];
            for (got, want) in got[2 * row..2 * row + 2].iter().zip(want) {
                assert!((got - want).abs() < 1e-5, "row {row}, step {t}: {got} and {want}");
            }
        }
    }
}

/// A policy that sees pictures and four numbers.
fn told() -> Elmur {
    let model = model(residual());
    Elmur { observation: vec![residual(), Encoder::Vector { dim: 4, bytes: false }], ..model }
}

#[test]
fn numbers_beside_pictures_are_hidden_in_a_share_of_crops() {
    let model = told();
    let store = Store::new();
    let numbers = floats(ROWS * STEPS * 4, 7);
    let logits = |hide: f64, numbers: &[f64], draws: Option<&mut Vec<f64>>| {
        let settings = settings(Augment { hide, ..Augment::default() }, None);
        let built = training_graph(&model, &settings, Begin::Fresh).unwrap();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 3).unwrap();
        store.set("rng", &[5i64, 0]).unwrap();
        let mut window = WindowProgram::new(&built, &model, &Pool::new(1), &[&store]).unwrap();
        window.program.set("observation.0", &floats(ROWS * STEPS * pixels(), 1)).unwrap();
        window.program.set("observation.1", numbers).unwrap();
        window.program.set("targets", &floats(2 * ROWS * STEPS, 2)).unwrap();
        window.program.set("mask", &[true; ROWS * STEPS]).unwrap();
        window.set_rates(0.0, 0).unwrap();
        let logits = run(&mut window, "logits");
        if let Some(draws) = draws {
            *draws = store.get::<f64>("hide").unwrap();
        }
        logits
    };
    let mut draws = Vec::new();
    logits(0.5, &numbers, Some(&mut draws));
    // Between the two draws one crop is hidden and the other is not.
    let share = (draws[0] + draws[1]) / 2.0;
    assert!(draws[0] != draws[1]);
    let got = logits(share, &numbers, None);
    let hidden = usize::from(draws[1] < draws[0]);
    let mut by_hand = numbers.clone();
    by_hand[hidden * STEPS * 4..][..STEPS * 4].fill(0.0);
    assert_eq!(got, logits(0.0, &by_hand, None));
    assert_ne!(got, logits(0.0, &numbers, None));
    assert_eq!(logits(1.0, &numbers, None), logits(0.0, &vec![0.0; numbers.len()], None));
}

#[test]
fn a_policy_that_sees_less_does_what_one_does_that_sees_zeros() {
    let (mut told, alone) = (told(), model(residual()));
    let pixels = floats(pixels(), 1);
    let act = |model: &Elmur, params: &Store, numbers: &[f32]| {
        let mut session = Session::new(model, params, 1, &Pool::new(1)).unwrap();
        let mut parts = [pixels.iter().map(|x| *x as f32).collect(), numbers.to_vec()];
        if model.observation[0] != residual() {
            parts.swap(0, 1);
        }
        let floats = parts.concat();
        let observation = Values { floats: &floats, ints: &[], bytes: &[] };
        session.act(Seen { observation, returns: None }).unwrap().to_vec()
    };
    for swapped in [false, true] {
        if swapped {
            told.observation.swap(0, 1);
        }
        let params = init::parameters(&told, 3).unwrap();
        let checkpoint = Checkpoint { config: PolicyConfig::from(told.clone()), params };
        let fewer = checkpoint.seeing_only(&residual()).unwrap().unwrap();
        // All that the smaller policy needs and nothing else.
        let wanted = init::parameters(&alone, 0).unwrap();
        assert_eq!(fewer.names(), wanted.names());
        let same = |name: &String| fewer.ty(name).unwrap() == wanted.ty(name).unwrap();
        assert!(fewer.names().iter().all(same));
        let zeros = act(&told, &checkpoint.params, &[0.0; 4]);
        for (a, b) in act(&alone, &fewer, &[]).iter().zip(&zeros) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        assert_ne!(zeros, act(&told, &checkpoint.params, &[1.0; 4]));
    }
    // Policies of several networks see in each of them.
    let networks = |observation: Vec<Encoder>| {
        let action = Action::Continuous { dim: 2, tanh: true };
        let config = PolicyConfig::CqlContinuous(presets::cql_continuous(observation, action, STEPS));
        Checkpoint { params: init::parameters(config.architecture(), 3).unwrap(), config }
    };
    let (theirs, alone) = (networks(told.observation.clone()), networks(vec![residual()]));
    let fewer = theirs.seeing_only(&residual()).unwrap().unwrap();
    assert!(fewer.names().iter().any(|name| name.starts_with("target.") && name.ends_with("encoder.weight")));
    assert_eq!(fewer.names(), alone.params.names());
    assert!(fewer.names().iter().all(|name| fewer.ty(name).unwrap() == alone.params.ty(name).unwrap()));
    // Parameters that are not those of the config are left alone.
    let params =
        networks([&told.observation[..], &[Encoder::Vector { dim: 2, bytes: false }]].concat()).params;
    assert!(Checkpoint { params, ..theirs }.seeing_only(&residual()).unwrap().is_none());
    // What it does not see, or is no plain number beside it, cannot be left out.
    let checkpoint = |observation: Vec<Encoder>| {
        let model = Elmur { observation, ..told.clone() };
        Checkpoint { params: init::parameters(&model, 3).unwrap(), config: PolicyConfig::from(model) }
    };
    for observation in [vec![residual()], vec![residual(), residual()]] {
        assert!(checkpoint(observation).seeing_only(&residual()).unwrap().is_none());
    }
    let other = Encoder::Vector { dim: 9, bytes: false };
    assert!(checkpoint(told.observation.clone()).seeing_only(&other).unwrap().is_none());
}
